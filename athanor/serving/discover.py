"""List the models that can be served: this checkout's exports, those of its DVC experiments, and what `--model` names.

Nothing is loaded here. A model that cannot be served has a `problem`, so that it hides no other. An experiment's files
stay in DVC's cache until somebody asks it something; then `materialise` links them below .athanor/served/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from athanor.base.artifacts import MANIFEST, link, manifest_digest, new_dir
from athanor.base.errors import AthanorError, InputError, suggest
from athanor.export.gguf_reader import read_header
from athanor.export.places import BASE, EXPORT, HF_DIR, TOKENIZER, WEIGHTS_OF, is_base, tokenizer_folder
from athanor.runtime.dvc_view import cache_folder
from athanor.serving.experiments import cached, export_of, recorded
from athanor.serving.files import ADAPTED, CONFIG, FACTS_FILE, gguf_problem, own_problem, read_bounded
from athanor.tokenizer.tokenizer import MODEL_FILE

SERVED = ".athanor/served"
GGUF, EXPORTED, BASE_MODEL, CHECKPOINT = "gguf", "export", "base", "checkpoint"
NO_EXPORT = (
    f"it has no {FACTS_FILE}, so it is no export of this pipeline. Fix: name a .gguf file (of other models llama.cpp's "
    "convert_hf_to_gguf.py makes one), or a directory that athanor shrink made of a checkpoint"
)
# What damaged or odd files raise.
ODD = (AthanorError, OSError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class AvailableModel:
    """A model that could be served.

    id: what clients write as "model"; unique. path: its directory or file; of an experiment the one that `materialise`
    makes. kind: of its files. created: Unix time. problem: why it cannot be served, "" if nothing is known. fetch: commit
    of an experiment. base: the GGUF file that a LoRA is added to.
    """

    id: str
    label: str
    path: str
    kind: str
    source: str
    created: float
    problem: str = ""
    fetch: str = ""
    base: str = ""


def discover(root: Path, requested: Sequence[str]) -> list[AvailableModel]:
    """The models to serve, or exactly those that `requested` (`--model`) names, in its order.

    This checkout's own come first (no experiment is the default), each group newest first. A value of `requested` is
    the id of an available model, the name of an experiment, or a path; InputError for any other, with the nearest.
    """
    root = root.resolve()
    available, names = _with_experiments(root, _local(root))
    available = unique(sorted(available, key=rank))
    if not requested:
        return available
    by_path = {model.path: model for model in available}
    by_name = {model.id: model for model in available} | {name: by_path[path] for name, path in names.items() if path}
    for value in requested:
        if value not in by_name and value in names:
            what = "this experiment has no export of its own: its dvc.lock names one made from other weights, or none"
            fix = f"dvc exp apply {value}, then dvc repro export; it is {EXPORT} then, and no longer named {value}"
            raise InputError(what, where=f"--model {value}", fix=fix)
    chosen = [by_name[value] if value in by_name else _named_path(value, sorted(by_name)) for value in requested]
    return unique(dict.fromkeys(chosen))


def rank(model: AvailableModel) -> tuple[bool, bool, float]:
    """Key to sort by: the checkout's own exports, its base model, experiments; each group newest first."""
    return bool(model.fetch), model.kind == BASE_MODEL, -model.created


def unique(models: Iterable[AvailableModel], taken: Collection[str] = ()) -> list[AvailableModel]:
    """The models with a number behind each id that another one has, or that is `taken`."""
    used_ids = set(taken)
    result = []
    for model in models:
        name, number = model.id, 1
        while name in used_ids:
            number += 1
            name = f"{model.id}-{number}"
        used_ids.add(name)
        result.append(replace(model, id=name))
    return result


def materialise(root: Path, model: AvailableModel) -> None:
    """Put an experiment's files at its `path`, by links into DVC's cache; does nothing where they are.

    InputError where the cache lacks one of them.
    """
    target = Path(model.path)
    if model.fetch and not (target / FACTS_FILE).is_file():
        files = _cached_files(root, model)
        with new_dir(target) as folder:
            for name, path in files.items():
                link(path, folder / name)


def problem_of(root: Path, model: AvailableModel) -> str:
    """Why a model cannot be served, as far as that shows without loading it; "" if it does not."""
    path = Path(model.path)
    try:
        if model.source == "export" and (problem := stale_export_problem(path.parent)):
            return problem
        if model.kind == GGUF:
            return gguf_problem(path)
        if model.fetch and not path.is_dir():
            return own_problem(_cached_files(root, model))
        files = {file.name: file for file in path.iterdir()}
        if model.kind == CHECKPOINT:
            return ""
        if model.kind == BASE_MODEL:
            files[MODEL_FILE] = tokenizer_folder(path) / MODEL_FILE
            return own_problem(files, CONFIG, "pretrain")
        return own_problem(files) if FACTS_FILE in files else NO_EXPORT
    except FileNotFoundError:
        why = ": a training keeps its two newest checkpoints. Fix: choose the newest of the list"
        return f"{path} is gone{why if model.kind == CHECKPOINT else ''}"
    except ODD as error:
        odd = f"{path.name} is no file of a model ({type(error).__name__}: {error})"
        return str(error) if isinstance(error, AthanorError) else odd


def stale_export_problem(folder: Path) -> str:
    """Why a checkout's export is not one of the weights beside it, "" if it is or cannot be compared."""
    root = folder.parents[1]
    weights = WEIGHTS_OF.get(folder.relative_to(root).as_posix())
    if weights is None or not (root / weights / MANIFEST).is_file() or not (folder / MANIFEST).is_file():
        return ""
    parents = json.loads(read_bounded(folder / MANIFEST))["parents"]
    if parents.get(Path(weights).name) == manifest_digest(root / weights):
        return ""
    fix = f"athanor repro; or --model {folder.relative_to(root)}, which takes it all the same"
    return f"it was made from other weights than those in {weights}. Fix: {fix}"


# -- this checkout and paths ------------------------------------------------------


class Local:
    """This checkout's own models, looked at again once a file of theirs was made, replaced or removed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._seen = self._states()

    def changed(self) -> list[AvailableModel] | None:
        """All of them as they are now, the default first; None where no file has changed since the last call.

        Without a change that costs one stat for each folder of models; with one, no experiment is looked at.
        """
        states = self._states()  # before the models: what changes meanwhile is seen by the next call
        if states == self._seen:
            return None
        self._seen = states
        return sorted(_local(self.root), key=rank)

    def _states(self) -> list[Any]:
        """Of all that says which models there are and whether they can be served: the weights of exports, too."""
        folders = (*WEIGHTS_OF, *(f"{export}/{HF_DIR}" for export in WEIGHTS_OF), *WEIGHTS_OF.values(), BASE, TOKENIZER)
        found = [path.stat() for folder in folders if (path := self.root / folder).is_dir()]
        return [(stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in found]  # a file that is replaced changes it


def _local(root: Path) -> list[AvailableModel]:
    models = []
    for export in WEIGHTS_OF:
        folder = root / export
        exact = [_described(folder / HF_DIR, "export", export)] if (folder / HF_DIR / FACTS_FILE).exists() else []
        files = [_described(path, "export", export) for path in sorted(folder.glob("*.gguf"))]
        # As old as the exact weights they were made from, which come first.
        models += exact + [replace(model, created=exact[0].created) if exact else model for model in files]
    if is_base(root / BASE):
        models.append(_described(root / BASE, "export", f"{BASE}, goes on with a text"))
    return models


def _described(path: Path, source: str, origin: str) -> AvailableModel:
    """The model in a file or a directory; where it cannot be looked at (no permission, a loop of links) with that problem."""
    kind = BASE_MODEL if is_base(path) else EXPORTED if path.is_dir() else GGUF
    folder = path.parent if path.name == HF_DIR else path
    name, base, created = path.stem if kind == GGUF else folder.name, "", 0.0
    with suppress(*ODD):
        main_file = path if kind == GGUF else path / (CONFIG if kind == BASE_MODEL else FACTS_FILE)
        created = main_file.stat().st_mtime
        if kind == EXPORTED:
            name = str(json.loads(read_bounded(main_file))["name"] or name)
        header = read_header(path) if kind == GGUF else {}
        if "athanor.file" in header:  # model-q8_0.gguf: the name of the model is inside
            name = f"{header['general.name']}-{path.stem.removeprefix('model-')}"
        base = str(path.with_name(ADAPTED)) if header.get("general.type") == "adapter" else ""
    model = AvailableModel(_slug(name), f"{name} ({origin})", str(path), kind, source, created, base=base)
    return replace(model, problem=problem_of(path, model))


def _slug(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-") or "model"


def _named_path(value: str, names: Sequence[str]) -> AvailableModel:
    path = Path(value).expanduser()
    if not path.exists():
        fix = suggest(value, names, "name a directory, a .gguf file or an experiment", cutoff=0.5)
        raise InputError("no model, experiment or path of this name", where=f"--model {value}", fix=fix)
    path = path.resolve()
    inner = path / HF_DIR
    # An export as a whole is served as its exact weights; its GGUF files can be named one by one.
    return _described(inner if inner.is_dir() and not (path / CONFIG).is_file() else path, "path", value)


# -- experiments ----------------------------------------------------------------------


def _with_experiments(root: Path, local: list[AvailableModel]) -> tuple[list[AvailableModel], dict[str, str]]:
    """`local` and the experiments, equal exports once; the second: name of an experiment -> path of its model, or ""."""
    models, names, lock, exact = list(local), dict[str, str](), root / "dvc.lock", str(root / EXPORT / HF_DIR)
    served = lock.is_file() and any(model.path == exact and not model.problem for model in local)
    paths = {export_of(lock.read_text(encoding="utf-8")) if served else None: exact, None: ""}
    for name, commit, created, export in recorded(root):
        if export not in paths:
            paths[export] = str(root / SERVED / export)
            model = AvailableModel(name, name, paths[export], EXPORTED, "experiment", created, fetch=commit)
            models.append(replace(model, problem=problem_of(root, model)))
        names[name] = paths[export]
    for place, model in enumerate(models):
        if listed := [name for name, path in names.items() if path == model.path]:
            text = f"{', also' if model.source == 'export' else ':'} experiment {', '.join(listed)}"
            models[place] = replace(model, label=model.label + text)
    return models, names


def _cached_files(root: Path, model: AvailableModel) -> dict[str, Path]:
    """An experiment's files in DVC's cache; InputError where it lacks one of them."""
    files = cached(cache_folder(root), Path(model.path).name)
    if files is None or not all(path.is_file() for path in files.values()):
        fix = f"dvc exp pull REMOTE {model.id}, or dvc exp apply {model.id} and then dvc pull or dvc repro export"
        raise InputError(f"the files of experiment {model.id} are not in DVC's cache", fix=fix)
    return files
