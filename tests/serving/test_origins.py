"""Where an answer is from, while the data that tells it is not here. What it finds is in tests/origins and tests/e2e."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.catalog.discover import AvailableModel
from athanor.cli import trace
from athanor.runtime.journal import Journal
from athanor.serving import origins
from athanor.serving.retraining import FOLDER, LOCK

PLACES = [
    "models/export/hf",
    "models/export/x.gguf",
    ".athanor/served/md5",
    ".athanor/slots/sft/a/step_3",
    "models/base",
]


def why(root: Path) -> set[str]:
    """What is said of the models at all places."""
    found = set()
    for place in PLACES:
        with pytest.raises(InputError) as error:
            origins.trace(root, AvailableModel("own", "own", str(root / place), "export", 0.0), "some text")
        found.add(str(error.value))
    return found


def test_a_training_at_work_is_the_reason_and_its_end_the_fix(tmp_path, monkeypatch):
    write_json(tmp_path / "models/export/hf/athanor.json", {"lineage": {"shards": "1" * 64, "sft_data": "2" * 64}})
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    (said,) = why(tmp_path)
    assert "data/shards is not here as this model was made from it" in said and "dvc checkout" in said
    journal = Journal(tmp_path / ".athanor/runs/sft-1")
    write_json(journal.folder / "meta.json", {"pid": os.getpid(), "stage": "sft"})
    (said,) = why(tmp_path)
    assert "a training is running here (sft)" in said and said.endswith("ask again when it has ended")
    with pytest.raises(InputError, match=r"running here \(sft\)"):  # in a terminal, too
        trace._tracer()
    journal.close("FAILED")
    (tmp_path / FOLDER).mkdir()
    with (tmp_path / FOLDER / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (said,) = why(tmp_path)
        assert "a training is running here (athanor repro)" in said
