"""Which models there are to serve: this checkout's exports, those of its DVC experiments, and what `--model` names.

Nothing is loaded here. A model that cannot be served has a `problem`, so that
it hides no other. An experiment's files stay in DVC's cache until somebody
asks it something; then `materialise` links them below .athanor/served/.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from athanor.base.artifacts import MANIFEST, link, manifest_digest, new_dir, read_json
from athanor.base.errors import AthanorError, InputError, suggest
from athanor.export.gguf_reader import read_header
from athanor.runtime.dvc_view import cache_folder
from athanor.serving.experiments import (
    BASE,
    EXPORT,
    HF_DIR,
    TOKENIZER,
    WEIGHTS_OF,
    cached,
    export_of,
    is_base,
    recorded,
    tokenizer_folder,
    unexported,
)
from athanor.serving.files import CONFIG, FACTS_FILE, WEIGHTS, bounded, foreign_problem, gguf_problem, own_problem
from athanor.tokenizer.tokenizer import MODEL_FILE

SERVED = ".athanor/served"
TORCH, LLAMA_CPP, TRANSFORMERS = "torch", "llama.cpp", "transformers"
PACKAGES = {LLAMA_CPP: "xllamacpp", TRANSFORMERS: "transformers"}


@dataclass(frozen=True)
class AvailableModel:
    """A model that could be served.

    id: what clients write as "model"; unique. path: its directory or file; of
    an experiment the one that `materialise` makes. bytes: of its weights, 0
    where that is not known. created: Unix time. problem: why it cannot be
    served, "" if nothing is known. fetch: commit of an experiment.
    """

    id: str
    label: str
    path: str
    backend: str
    source: str
    created: float
    bytes: int
    problem: str = ""
    fetch: str = ""


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
    by_name = {model.id: model for model in available} | {name: by_path[path] for name, path in names.items()}
    unexported_names = [] if set(requested) <= set(by_name) else unexported(root)
    for value in requested:
        if value in unexported_names and value not in by_name:
            what = "this experiment has no export of its own: its dvc.lock names one made from other weights, or none"
            fix = f"dvc exp apply {value}, then dvc repro export; it is {EXPORT} then, and no longer named {value}"
            raise InputError(what, where=f"--model {value}", fix=fix)
    chosen = [by_name[value] if value in by_name else _named_path(value, sorted(by_name)) for value in requested]
    return unique(dict.fromkeys(chosen))


def rank(model: AvailableModel) -> tuple[bool, bool, float]:
    """Key to sort by: the checkout's own exports, its base model, experiments; each group newest first."""
    return bool(model.fetch), model.path.endswith(f"/{BASE}"), -model.created


def materialise(root: Path, model: AvailableModel) -> None:
    """Put an experiment's files at its `path`, by links into DVC's cache; does nothing where they are.

    InputError where the cache lacks one of them.
    """
    target = Path(model.path)
    if not model.fetch or (target / FACTS_FILE).is_file():
        return
    files = _cached_files(root, model)
    with new_dir(target) as folder:
        for name, path in files.items():
            link(path, folder / name)


def problem_of(root: Path, model: AvailableModel) -> str:
    """Why a model cannot be served, as far as that shows without loading it; "" if it does not."""
    package = PACKAGES.get(model.backend)
    if package and importlib.util.find_spec(package) is None:
        return f"the package {package} cannot be imported. Fix: pip install {package}"
    path = Path(model.path)
    try:
        if model.source == "export" and (problem := stale_export_problem(path.parent)):
            return problem
        if model.backend == LLAMA_CPP:
            return gguf_problem(path)
        if model.fetch and not path.is_dir():
            files = _cached_files(root, model)
        elif not path.is_dir():
            return f"{path} is gone"
        elif is_base(path):
            files = {name: path / name for name in (CONFIG, WEIGHTS)}
            return own_problem({**files, MODEL_FILE: tokenizer_folder(path) / MODEL_FILE}, CONFIG, "pretrain")
        else:
            files = {file.name: file for file in path.iterdir() if file.is_file()}
        return own_problem(files) if model.backend == TORCH else foreign_problem(files)
    except (AthanorError, OSError) as error:
        return str(error)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
        return f"{path.name} is no file of a model ({type(error).__name__}: {error})"


# -- this checkout and paths ------------------------------------------------------


class Local:
    """This checkout's own models, looked at again once a file of theirs has changed since it was made."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._seen = self._states()

    def changed(self) -> list[AvailableModel] | None:
        """All of them as they are now, the default first; None where no file has changed since the last call.

        Without a change that costs one stat for each file beside the models; with one, no experiment is looked at.
        """
        states = self._states()  # before the models: what changes meanwhile is seen by the next call
        if states == self._seen:
            return None
        self._seen = states
        return sorted(_local(self.root), key=rank)

    def _states(self) -> list[Any]:
        """Of all that says which models there are and whether they can be served: the weights of exports, too."""
        exports = [folder for export in WEIGHTS_OF for folder in (export, f"{export}/{HF_DIR}")]
        return [_states(self.root / folder) for folder in (*exports, *WEIGHTS_OF.values(), BASE, TOKENIZER)]


def _states(folder: Path) -> list[tuple[str, int, int, int]]:
    states = []
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            stat = None
            with contextlib.suppress(OSError):  # a link to nothing
                stat = file.stat()
            states.append((file.name, *((stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat else (0, 0, 0))))
    return sorted(states)


def _local(root: Path) -> list[AvailableModel]:
    models = []
    for export in WEIGHTS_OF:
        folder = root / export / HF_DIR
        # Neither is there yet while DVC links the files of an export one by one: it would get another name.
        if (folder / FACTS_FILE).is_file() or (folder.parent / MANIFEST).is_file():
            models.append(_looked_at(_directory, folder, export))
    if is_base(root / BASE):
        models.append(_looked_at(_directory, root / BASE, f"{BASE}, goes on with a text"))
    files = (root / EXPORT).glob("*.gguf") if (root / EXPORT).is_dir() else ()
    gguf_models = [_looked_at(_gguf, path, EXPORT) for path in sorted(files)]
    # As old as the exact weights they were made from, which come first.
    exact_created = [model.created for model in models if Path(model.path).parent == root / EXPORT]
    return models + [replace(model, created=exact_created[0]) if exact_created else model for model in gguf_models]


def _looked_at(look: Callable[[Path, str, str], AvailableModel], path: Path, export: str) -> AvailableModel:
    """An export of this checkout; where it cannot be looked at (no permission, a loop of links) that is its problem."""
    try:
        return look(path, "export", export)
    except (OSError, RuntimeError) as error:
        name = f"{path.name} ({export})"
        return AvailableModel(_slug(path.stem), name, str(path), TORCH, "export", 0.0, 0, problem=str(error))


def stale_export_problem(folder: Path) -> str:
    """Why a checkout's export is not one of the weights beside it, "" if it is or cannot be compared."""
    root = folder.parents[1]
    weights = WEIGHTS_OF.get(folder.relative_to(root).as_posix())
    if weights is None or not (root / weights / MANIFEST).is_file() or not (folder / MANIFEST).is_file():
        return ""
    parents = read_json(bounded(folder / MANIFEST))["parents"]
    name = Path(weights).name
    if parents.get(name) == manifest_digest(root / weights):
        return ""
    fix = f"athanor repro; or --model {folder.relative_to(root)}, which takes it all the same"
    return f"it was made from other weights than those in {weights}. Fix: {fix}"


def _directory(folder: Path, source: str, origin: str) -> AvailableModel:
    is_export = (folder / FACTS_FILE).is_file()
    # "hf" alone says nothing: of ours the name inside, of others that of the directory around it.
    name = (_recorded_name(folder / FACTS_FILE) if is_export else "") or (
        folder.parent if folder.name == HF_DIR else folder
    ).name
    main_file = folder / (FACTS_FILE if is_export else CONFIG)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    created = main_file.stat().st_mtime if main_file.is_file() else folder.stat().st_mtime
    backend = TORCH if is_export or is_base(folder) else TRANSFORMERS
    model = AvailableModel(_slug(name), f"{name} ({origin})", str(folder), backend, source, created, size)
    return replace(model, problem=problem_of(folder, model))


def _gguf(path: Path, source: str, origin: str) -> AvailableModel:
    name = path.stem
    with contextlib.suppress(AthanorError, OSError, KeyError):
        header = read_header(path)
        if "athanor.file" in header:  # model-q8_0.gguf: the name of the model is inside
            name = f"{header['general.name']}-{path.stem.removeprefix('model-')}"
    stat = path.stat()
    model = AvailableModel(_slug(name), f"{name} ({origin})", str(path), LLAMA_CPP, source, stat.st_mtime, stat.st_size)
    return replace(model, problem=problem_of(path, model))


def _named_path(value: str, names: Sequence[str]) -> AvailableModel:
    path = Path(value).expanduser()
    if not path.exists():
        beside = [str(path.parent / file.name) for file in path.parent.iterdir()] if path.parent.is_dir() else []
        known = [*names, *(beside if "/" in value else ())]
        fix = suggest(value, known, "name a directory, a .gguf file or an experiment", cutoff=0.5)
        raise InputError("no model, experiment or path of this name", where=f"--model {value}", fix=fix)
    path = path.resolve()
    if path.is_file():
        return _gguf(path, "path", value)
    inner = path / HF_DIR
    # An export as a whole is served as its exact weights; its GGUF files can be named one by one.
    return _directory(inner if inner.is_dir() and not (path / CONFIG).is_file() else path, "path", value)


def _recorded_name(path: Path) -> str:
    try:
        return str(read_json(bounded(path)).get("name") or "")
    except (AthanorError, AttributeError):
        return ""


def _slug(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-") or "model"


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


# -- experiments ----------------------------------------------------------------------


def _with_experiments(root: Path, local: list[AvailableModel]) -> tuple[list[AvailableModel], dict[str, str]]:
    """`local` and the experiments, equal models once; the second: name of an experiment -> path of its model."""
    experiments = recorded(root)
    if not experiments:
        return local, {}
    cache = cache_folder(root)
    by_content: dict[str, AvailableModel] = {}
    export_folder = root / EXPORT / HF_DIR
    own_export = next((model for model in local if model.path == str(export_folder) and not model.problem), None)
    if own_export is not None and (export_folder / FACTS_FILE).is_file():
        by_content[hashlib.md5((export_folder / FACTS_FILE).read_bytes(), usedforsecurity=False).hexdigest()] = (
            own_export
        )
        lock = root / "dvc.lock"
        export = export_of(lock.read_text(encoding="utf-8")) if lock.is_file() else None
        if export and cached(cache, export[0]) is None:  # nothing better to go by
            by_content[export[0]] = own_export
    names: dict[str, str] = {}
    experiments_of: dict[str, list[str]] = {}
    for name, revision, created, export in experiments:
        if export is None:
            continue
        folder, size = export
        files = cached(cache, folder)
        # athanor.json holds the hashes of the files beside it, so equal ones mean equal models.
        key = (
            folder
            if files is None or FACTS_FILE not in files
            else files[FACTS_FILE].parent.name + files[FACTS_FILE].name
        )
        if key not in by_content:
            if files is not None and WEIGHTS in files and files[WEIGHTS].is_file():
                size = files[WEIGHTS].stat().st_size
            path = str(root / SERVED / folder)
            by_content[key] = model = AvailableModel(name, "", path, TORCH, "experiment", created, size, fetch=revision)
            by_content[key] = replace(model, problem=problem_of(root, model))
        names.setdefault(name, by_content[key].path)
        experiments_of.setdefault(by_content[key].path, []).append(name)
    result = []
    for model in [*local, *(model for model in by_content.values() if model.source == "experiment")]:
        listed = ", ".join(experiments_of.get(model.path, ()))
        word = "experiments" if "," in listed else "experiment"
        label = (
            f"{model.id} ({word} {listed})" if model.source == "experiment" else f"{model.label}, also {word} {listed}"
        )
        result.append(replace(model, label=label) if listed else model)
    return result, names


def _cached_files(root: Path, model: AvailableModel) -> dict[str, Path]:
    """An experiment's files in DVC's cache; InputError where it lacks one of them."""
    files = cached(cache_folder(root), Path(model.path).name)
    if files is None or not all(path.is_file() for path in files.values()):
        fix = f"dvc exp pull REMOTE {model.id}, or dvc exp apply {model.id} and then dvc pull or dvc repro export"
        raise InputError(f"the files of experiment {model.id} are not in DVC's cache", fix=fix)
    return files
