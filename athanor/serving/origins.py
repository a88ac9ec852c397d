"""Where an answer comes from: athanor/origins for a model whose training data is in this checkout."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from athanor.base.artifacts import MANIFEST, manifest_digest
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.catalog.discover import ODD, AvailableModel
from athanor.catalog.files import FACTS_FILE, read_object
from athanor.catalog.places import HF_DIR, is_base
from athanor.origins.documents import trained_on
from athanor.origins.index import ready
from athanor.origins.replacing import at_work, not_here
from athanor.origins.tracing import Tracer
from athanor.runtime.locks import locked
from athanor.serving.retraining import FOLDER, LOCK

# By its name in the lineage: what a model learned from, and the models of this checkout whose steps are told.
DATA = {"shards": Path("data/shards"), "sft_data": Path("data/sft")}
WEIGHTS = {"base": Path("models/base"), "sft": Path("models/sft")}
MADE_ELSE = "{} is not here as this model was made from it, so where its answers come from is not known"
MOST_TOKENS = 100_000_000  # that are indexed while somebody waits at a page: a minute
_one_at_a_time = threading.Lock()


def trace(root: Path, model: AvailableModel, text: str) -> Facts:
    """The parts of a text that are in what the model was trained on; InputError where that is not here."""
    _check(root, model)
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


def _check(root: Path, model: AvailableModel) -> None:
    """InputError unless the checkout holds what the model was trained on."""
    path, wanted = Path(model.path), DATA | WEIGHTS
    lineage: Mapping[str, str] = {}
    with suppress(*ODD):
        if is_base(path):  # its other data are its fine-tuned model's
            wanted = {"shards": DATA["shards"]}
            lineage = read_object(path / MANIFEST)["parents"]
        else:
            facts = (path if path.is_dir() else path.parent / HF_DIR) / FACTS_FILE
            lineage = read_object(facts)["lineage"]
    for name, folder in wanted.items():
        here = _digest(root / folder)
        if lineage.get(name) != here and (here or name in DATA):
            # Between two stages no run is alive, and a training that the page has started is still at work.
            stages = at_work(root) or ["athanor repro"] * locked(root / FOLDER / LOCK)
            fix = "dvc checkout or dvc pull; for an experiment's model first dvc exp apply"
            raise not_here(MADE_ELSE.format(folder), model.id, fix, [] if model.fetch else stages)


def _digest(folder: Path) -> str:
    """Of a folder's manifest; "" where it is not here."""
    return manifest_digest(folder) if (folder / MANIFEST).is_file() else ""
