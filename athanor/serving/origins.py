"""Where an answer comes from: athanor/origins for a model whose training data is in this checkout."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from athanor.base.artifacts import MANIFEST, manifest_digest, read_manifest
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.export.places import BASE, HF_DIR, is_base
from athanor.origins.documents import trained_on
from athanor.origins.index import ready
from athanor.origins.replacing import at_work, not_here
from athanor.origins.tracing import Tracer
from athanor.runtime.locks import locked
from athanor.serving.discover import ODD, AvailableModel
from athanor.serving.files import FACTS_FILE, read_bounded
from athanor.serving.retraining import FOLDER, LOCK

# By its name in the lineage: what a model learned from, and the models of this checkout whose steps are told.
DATA = {"shards": Path("data/shards"), "sft_data": Path("data/sft")}
WEIGHTS = {"base": Path("models/base"), "sft": Path("models/sft")}
MADE_ELSE = "{} is not here as this model was made from it, so where its answers come from is not known"
MOST_TOKENS = 100_000_000  # that are indexed while somebody waits at a page: a minute
_one_at_a_time = threading.Lock()


def trace(model: AvailableModel, text: str) -> Facts:
    """The parts of a text that stand in what the model was trained on; InputError where that is not known here."""
    root = _checkout(model)
    with _one_at_a_time:
        tracer = _tracer(root, *(_digest(root / folder) for folder in (DATA | WEIGHTS).values()))
    return tracer.trace(text).as_json()


@lru_cache(maxsize=2)
def _tracer(root: Path, *digests: str) -> Tracer:
    missing = sum(documents.tokens for documents in trained_on(root) if not ready(root, documents))
    if missing > MOST_TOKENS:
        fix = 'type athanor trace "some text" once in a terminal, then ask here again'
        raise InputError(f"{missing:,} tokens of training data are not indexed yet", where="trace", fix=fix)
    return Tracer(root)


def _checkout(model: AvailableModel) -> Path:
    """The checkout that holds the model and what it was trained on."""
    path = Path(model.path)
    if is_base(path):  # its other data are its fine-tuned model's
        if read_manifest(path, "model", 1)["parents"]["shards"] != _digest(path.parents[1] / DATA["shards"]):
            raise _made_else(path.parents[1], DATA["shards"], model, "dvc repro pretrain")
        return path.parents[1]
    removed_base = path.as_posix().endswith(f"/{BASE}")  # its process still answers while pretraining runs again
    root = path.parents[1 if removed_base else 2] if len(path.parents) > 2 else path
    # A checkpoint lies deeper than an export.
    root = next((folder.parent for folder in path.parents if folder.name == ".athanor"), root)
    lineage: Mapping[str, str] = {}
    for file in (path / FACTS_FILE, path.parent / HF_DIR / FACTS_FILE):
        with suppress(*ODD):
            lineage = lineage or json.loads(read_bounded(file))["lineage"]
    for name, folder in (DATA | WEIGHTS).items():
        here = _digest(root / folder)
        if lineage.get(name) != here and (here or name in DATA):
            fix = "dvc checkout or dvc pull; for an experiment's model first dvc exp apply"
            raise _made_else(root, folder, model, fix)
    return root


def _made_else(root: Path, folder: Path, model: AvailableModel, fix: str) -> InputError:
    # Between two stages no run is alive, and a training that the page has started is still at work.
    stages = at_work(root) or ["athanor repro"] * locked(root / FOLDER / LOCK)
    stages = [] if model.fetch else stages  # its data are another experiment's
    return not_here(MADE_ELSE.format(folder), model.id, fix, stages)


def _digest(folder: Path) -> str:
    """Of a folder's manifest; "" where it is not here."""
    return manifest_digest(folder) if (folder / MANIFEST).is_file() else ""
