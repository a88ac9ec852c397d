"""Scores that were taken beside the pipeline, as a run of their own in the tracking UI.

The run's journal is open only while rows are written into it: a journal that
stays open is a stage at work to `athanor stop`, and this is none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.strict import read_yaml
from athanor.runtime import facts
from athanor.runtime.journal import Journal, now_ms
from athanor.runtime.redact import redact
from athanor.runtime.ship import start_detached

STAGE = "perplexity"
NUMBERS = ("loss", "perplexity", "bits_per_byte")
SUBJECT_KEYS = (
    "set",
    "set_sha256",
    "tokenizer_digest",
    "template_hash",
    "context_tokens",
    "weights_sha256",
    "model",
    "slot",
)


class Evaluations:
    """One run of the tracking UI for all scores of this process."""

    def __init__(self, root: Path, anchor: Path) -> None:
        self.root, self.anchor, self.started_ms = root, anchor, now_ms()
        self.folder = anchor / ".athanor" / "runs" / f"{STAGE}-{self.started_ms}-{os.getpid()}"

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows at their steps (0 for a model that is no checkpoint) and let them be shipped."""
        params = self.root / "params.yaml"
        if not params.is_file() or not rows:
            return  # no project here: the history has them
        (self.folder / "end.json").unlink(missing_ok=True)
        journal = Journal(self.folder)
        subject_values = {name: rows[0][name] for name in SUBJECT_KEYS if rows[0].get(name) is not None}
        subject = {
            "stage": STAGE,
            "started_ms": self.started_ms,
            "params": redact(subject_values),
            "inputs": {},
            "made_by": {},
        }
        journal.begin(lambda: {**subject, **facts.provenance(self.root, read_yaml(params))})
        last: dict[str, float] = {}
        for row in rows:
            name = ".".join(filter(None, (row.get("stage") or Path(row["model"]).name, row["method"], row["backend"])))
            numbers = {f"{name}.{key}": row[key] for key in NUMBERS if row.get(key) is not None}
            journal.scalars(int(row.get("step") or 0), numbers)
            last |= numbers
        seconds = (now_ms() - self.started_ms) / 1000
        journal.close("FINISHED", metrics=last, facts={}, seconds=seconds)
        start_detached(self.anchor)
