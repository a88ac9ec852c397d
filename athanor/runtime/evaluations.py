"""Scores that were taken beside the pipeline, as a run of their own in the tracking UI.

The run's journal is open only while rows are written into it: a journal that
stays open is a stage at work to `athanor stop`, and this is none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, write_json
from athanor.base.strict import read_yaml
from athanor.runtime import facts
from athanor.runtime.journal import Journal, now_ms
from athanor.runtime.redact import redact
from athanor.runtime.ship import start_detached

STAGE = "perplexity"
NUMBERS = ("loss", "perplexity", "bits_per_byte")
TOLD = ("set", "set_sha256", "tokenizer_digest", "template_hash", "context_tokens", "weights_sha256", "model", "slot")


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
        meta_path, end = self.folder / "meta.json", self.folder / "end.json"
        end.unlink(missing_ok=True)
        journal = Journal(self.folder)
        if meta_path.is_file():
            meta = read_json(meta_path)
        else:
            meta = {
                "run": self.folder.name,
                "stage": STAGE,
                "started_ms": self.started_ms,
                "resumed": -1,
                "params": redact({name: rows[0].get(name) for name in TOLD if rows[0].get(name) is not None}),
                "inputs": {},
                "made_by": {},
                "hardware": facts.hardware(),
                **facts.provenance(self.root, facts.params_digest(read_yaml(params))),
            }
        write_json(meta_path, {**meta, "pid": os.getpid(), "resumed": meta["resumed"] + 1})
        last: dict[str, float] = {}
        for row in rows:
            name = ".".join(filter(None, (row.get("stage") or Path(row["model"]).name, row["method"], row["backend"])))
            numbers = {f"{name}.{key}": row[key] for key in NUMBERS if row.get(key) is not None}
            journal.scalars(int(row.get("step") or 0), numbers)
            last |= numbers
        seconds = (now_ms() - self.started_ms) / 1000
        journal.close("FINISHED", metrics=last, facts={}, seconds=seconds)
        start_detached(self.anchor)
