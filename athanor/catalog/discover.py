"""List the models that can be served: this checkout's exports, those of its DVC experiments, and what `--model` names.

Nothing is loaded here. A model that cannot be served has a `problem`, so that it hides no other. An experiment's files
stay in DVC's cache until somebody asks it something; then `materialise` links them below .athanor/served/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from athanor.base.artifacts import MANIFEST, link, manifest_digest, new_dir
from athanor.base.errors import AthanorError, InputError, suggest
from athanor.catalog.files import (
    ADAPTED,
    CONFIG,
    FACTS_FILE,
    WEIGHTS,
    gguf_problem,
    own_problem,
    read_bounded,
    read_object,
)
from athanor.catalog.places import BASE, CARD, EXPORT, HF_DIR, WEIGHTS_OF, is_base, is_checkpoint, tokenizer_folder
from athanor.export.gguf_reader import read_header
from athanor.model.config import ModelConfig
from athanor.runtime.dvc_lock import parsed
from athanor.runtime.facts import git
from athanor.runtime.sharing import cache_folder
from athanor.tokenizer.tokenizer import MODEL_FILE

SERVED = ".athanor/served"
_NAMED = re.compile(r"(\S+) (\d+) refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/(.+)")
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
    makes. source: export (of this checkout), experiment, path, undone. created: Unix time. problem: why it cannot be
    served, "" if nothing is known. fetch: commit of an experiment. base: the GGUF file that a LoRA is added to.
    """

    id: str
    label: str
    path: str
    source: str
    created: float
    problem: str = ""
    fetch: str = ""
    base: str = ""
    context_tokens: int | None = None
    parameters: int | None = None


def discover(root: Path, requested: Sequence[str] = ()) -> list[AvailableModel]:
    """The models to serve, or exactly those that `requested` (`--model`) names, in its order.

    This checkout's own come first (no experiment is the default), each group newest first. A value of `requested` is
    the id of an available model, the name of an experiment, or a path; InputError for any other, with the nearest.
    """
    root = root.resolve()
    own = _own(root)
    experiments = _experiments(root, own)
    available = unique(dict.fromkeys([*own, *experiments.values()]))
    if not requested:
        return available
    by_name = experiments | {model.id: model for model in available}
    chosen = [by_name[value] if value in by_name else _named_path(root, value, sorted(by_name)) for value in requested]
    return unique(dict.fromkeys(chosen))


def unique(models: Iterable[AvailableModel]) -> list[AvailableModel]:
    """The models with a number behind each id that an earlier one has."""
    found: dict[str, AvailableModel] = {}
    for model in models:
        name, number = model.id, 1
        while name in found:
            number += 1
            name = f"{model.id}-{number}"
        found[name] = replace(model, id=name)
    return list(found.values())


def materialise(root: Path, model: AvailableModel) -> None:
    """Put an experiment's files at its `path`, by links into DVC's cache; does nothing where they are.

    InputError where the cache lacks one of them.
    """
    target = Path(model.path)
    if model.fetch and not (target / FACTS_FILE).is_file():
        files = cached(root, model)
        with new_dir(target) as folder:
            for name, path in files.items():
                link(path, folder / name)


def problem_of(root: Path, model: AvailableModel) -> str:
    """Why a model cannot be served, as far as that shows without loading it; "" if it does not."""
    path = Path(model.path)
    try:
        if model.source == "export" and (problem := stale_export_problem(path.parent)):
            return problem
        if path.is_file():
            return gguf_problem(path)
        if model.fetch and not path.is_dir():
            return own_problem(cached(root, model))
        files = {file.name: file for file in path.iterdir()}
        if is_checkpoint(path):
            return ""
        if is_base(path):
            files[MODEL_FILE] = tokenizer_folder(path) / MODEL_FILE
            return own_problem(files, CONFIG)
        return own_problem(files) if FACTS_FILE in files else NO_EXPORT
    except ODD as error:
        odd = f"{path.name} is no file of a model ({type(error).__name__}: {error})"
        return str(error) if isinstance(error, AthanorError) else odd


def stale_export_problem(folder: Path) -> str:
    """Why a checkout's export is not one of the weights beside it, "" if it is or cannot be compared."""
    root = folder.parents[1]
    weights = WEIGHTS_OF.get(folder.relative_to(root).as_posix())
    if weights is None or not (root / weights / MANIFEST).is_file() or not (folder / MANIFEST).is_file():
        return ""
    if read_object(folder / MANIFEST)["parents"].get(Path(weights).name) == manifest_digest(root / weights):
        return ""
    fix = f"athanor repro; or --model {folder.relative_to(root)}, which takes it all the same"
    return f"it was made from other weights than those in {weights}. Fix: {fix}"


# -- this checkout and paths ------------------------------------------------------


def _own(root: Path) -> list[AvailableModel]:
    """The exports, newest first, each with its exact weights first, and then the base model."""
    exports = []
    for export in WEIGHTS_OF:
        folder = root / export
        paths = [folder / HF_DIR] if (folder / HF_DIR / FACTS_FILE).exists() else []
        exports.append([described(path, "export", export) for path in (*paths, *sorted(folder.glob("*.gguf")))])
    exports.sort(key=lambda models: -models[0].created if models else 0)
    base = [described(root / BASE, "export", f"{BASE}, continues a text")] if is_base(root / BASE) else []
    return [*chain(*exports), *base]


def described(path: Path, source: str, origin: str) -> AvailableModel:
    """The model in a file or a directory; where it cannot be looked at (no permission, a loop of links) with that problem."""
    name = (path.parent if path.name == HF_DIR else path).name.removesuffix(".gguf")
    known: dict[str, Any] = {"created": 0.0}
    with suppress(*ODD):
        if path.is_dir():
            main_file = path / (CONFIG if is_base(path) else FACTS_FILE)
            facts = read_object(main_file)
            name = str(facts.get("name") or name)
            config = ModelConfig.from_dict(facts["model"])
            known |= {"context_tokens": config.context_tokens, "parameters": config.parameter_count()}
            # Of the weights: a training with another seed leaves all other files as they are.
            known["created"] = (path / WEIGHTS).stat().st_mtime
        else:
            known["created"], header = path.stat().st_mtime, read_header(path)
            if "athanor.file" in header:  # model-q8_0.gguf: the name of the model is inside
                name = f"{header['general.name']}-{name.removeprefix('model-')}"
            known["base"] = str(path.with_name(ADAPTED)) if header.get("general.type") == "adapter" else ""
            known["context_tokens"] = int(header[f"{header['general.architecture']}.context_length"])
    slug = re.sub(r"[^\w.+-]+", "-", name).strip("-") or "model"
    model = AvailableModel(slug, f"{name} ({origin})", str(path), source, **known)
    return replace(model, problem=problem_of(path, model))


def _named_path(root: Path, value: str, names: Sequence[str]) -> AvailableModel:
    path = Path(value).expanduser()
    if not path.exists() and value in unexported(root):
        fix = f"dvc exp apply {value} && dvc repro export; commit your own edits before"
        raise InputError("this experiment ended before the export", where=f"--model {value}", fix=fix)
    if not path.exists():
        fix = suggest(value, names, "name a directory, a .gguf file or an experiment", cutoff=0.5)
        raise InputError("no model, experiment or path of this name", where=f"--model {value}", fix=fix)
    path = path.resolve()
    inner, whole = path / HF_DIR, path / "model.gguf"
    if whole.is_file() and not (inner / FACTS_FILE).is_file():  # of another model, which llama.cpp alone runs here
        return described(whole, "path", value)
    # An export as a whole is served as its exact weights; its GGUF files can be named one by one.
    return described(inner if inner.is_dir() and not (path / CONFIG).is_file() else path, "path", value)


# -- experiments, read from Git and from DVC's cache without opening either with DVC -----------------------


def _experiments(root: Path, own: Sequence[AvailableModel]) -> dict[str, AvailableModel]:
    """Models by the names of experiments, newest first. Equal exports are one model, that of the newest or one of `own`."""
    lock, by_export, found = root / "dvc.lock", dict[str | None, AvailableModel](), dict[str, AvailableModel]()
    for model in own:
        if model.path == str(root / EXPORT / HF_DIR) and not model.problem and lock.is_file():
            by_export[export_of(lock.read_text(encoding="utf-8"))] = model
    for name, commit, created, export in recorded(root):
        if export is None:
            continue
        if export not in by_export:
            path = str(root / SERVED / export)
            model = AvailableModel(name, f"{name} (experiment)", path, "experiment", created, fetch=commit)
            by_export[export] = replace(model, problem=problem_of(root, model))
        found[name] = by_export[export]
    return found


def cached(root: Path, model: AvailableModel) -> dict[str, Path]:
    """Files of an experiment's `hf/`, and its card, in DVC's cache; InputError where that lacks one of them."""
    cache, md5 = cache_folder(root) / "files/md5", Path(model.path).name
    with suppress(*ODD):
        rows = json.loads(read_bounded(cache / md5[:2] / f"{md5[2:]}.dir"))
        md5_of = {row["relpath"]: row["md5"] for row in rows}
        # The list may be somebody else's: an export's files lie side by side, and each has the hash of its content.
        files = {
            name.removeprefix(f"{HF_DIR}/"): cache / checksum[:2] / checksum[2:]
            for name, checksum in md5_of.items()
            if re.fullmatch(rf"{CARD}|{HF_DIR}/[\w-][\w.-]*", name) and re.fullmatch("[0-9a-f]{32}", checksum)
        }
        if all(path.is_file() for path in files.values()):
            return files
    fix = f"dvc exp pull REMOTE {model.id}, or dvc exp apply {model.id} and then dvc pull or dvc repro export"
    raise InputError(f"the files of experiment {model.id} are not in DVC's cache", fix=fix)


def recorded(root: Path) -> list[tuple[str, str, float, str | None]]:
    """(name, commit, Unix time, MD5 of its export), newest first; None for one that came to no export."""
    rows = git(root, "for-each-ref", "--format=%(objectname) %(committerdate:unix) %(refname)", "refs/exps")
    found = [match.groups() for row in rows.splitlines() if (match := _NAMED.fullmatch(row))]
    experiments = [(name, commit, float(seconds), _export_of(root, commit)) for commit, seconds, name in found]
    return sorted(experiments, key=lambda experiment: (-experiment[2], experiment[0]))


def unexported(root: Path) -> list[str]:
    """Names of the experiments that have no export of their own."""
    return [name for name, _, _, out in recorded(root) if out is None]


@lru_cache(maxsize=1000)
def _export_of(root: Path, commit: str) -> str | None:
    return export_of(git(root, "show", f"{commit}:./dvc.lock"))


def export_of(lock: str) -> str | None:
    """MD5 (without .dir) of the export that a dvc.lock names; None where it was made from other weights.

    An experiment that ends before the export stage keeps that stage's entry of the commit it began from.
    """
    try:
        stages = parsed(lock.encode()) or {}
        outs = {row["path"]: row.get("md5") for stage in stages.values() for row in stage.get("outs", ())}
        made_from = {row["path"]: row.get("md5") for row in stages["export"]["deps"]}.get(WEIGHTS_OF[EXPORT])
        if made_from and (outs.get(WEIGHTS_OF[EXPORT]) or made_from) != made_from:
            return None
        return re.fullmatch(r"([0-9a-f]{32})(?:\.dir)?", outs[EXPORT])[1]
    except (KeyError, TypeError, AttributeError):
        return None
