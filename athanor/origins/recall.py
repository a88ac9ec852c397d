"""Whether right answers of the battery are recall: how much of each stands word for word in the training data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from athanor.base.artifacts import MANIFEST, manifest_digest, read_manifest
from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.evaluation.taught import ORIGIN
from athanor.origins.documents import MODEL
from athanor.origins.tracing import Tracer

EVAL = Path("data/eval")
KINDS = VERBATIM, PIECES, OWN, SHORT = "verbatim", "pieces", "own words", "too short to tell"
ALL = "all"


def right_answers(root: Path) -> list[Facts]:
    """Rows of data/eval: what models/sft wrote for the battery, greedily, and was right. InputError if they are not here."""
    if not (root / EVAL / MANIFEST).is_file():
        fix = "dvc checkout data/eval (dvc pull where it was made elsewhere), or dvc repro eval"
        raise InputError("the answers to the battery are not here", where=str(EVAL), fix=fix)
    if read_manifest(root / EVAL, "eval", 1)["parents"][str(MODEL)] != manifest_digest(root / MODEL):
        raise InputError(f"its answers are those of another model than {MODEL}", where=str(EVAL), fix="dvc repro eval")
    with open(root / EVAL / "battery.jsonl", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["model"] == MODEL.name and row["correct"]]
    # Of choices the likeliest is taken, so nothing was written; and one's own questions are those that were taught.
    return [row for row in rows if not row["log_likelihoods"] and row["origin"] != ORIGIN]


def recall_of(text: str, tracer: Tracer) -> str:
    """One of KINDS. What a find could not tell from chance is no find, and no sign of the model's own words either."""
    if not tracer.tells(text):
        return SHORT
    trace = tracer.trace(text)
    if {number for piece, number in trace.pieces if piece.strip()} == {1}:
        return VERBATIM
    return PIECES if 2 * trace.found >= trace.tokens else OWN


def table(found: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    """How many answers are of each kind, by category and in all, from pairs of category and kind."""
    rows: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for category, kind in found:
        rows.setdefault(category, Counter())[kind] += 1
        total[kind] += 1
    return {**dict(sorted(rows.items())), ALL: total}
