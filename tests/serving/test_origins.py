"""Where an answer is from, while the data that tells it is not here. What it finds is in tests/origins and tests/e2e."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.cli import trace
from athanor.runtime.journal import Journal
from athanor.serving import origins
from athanor.serving.discover import AvailableModel
from athanor.serving.retraining import FOLDER, LOCK

EXPORTS = ["models/export/hf", "models/export/model-q8_0.gguf", ".athanor/served/md5"]
PLACES = [*EXPORTS, ".athanor/slots/sft/a/step_3", "models/base"]


def why(root: Path, place: str) -> str:
    with pytest.raises(InputError) as error:
        origins.trace(AvailableModel("own", "own", str(root / place), "export", "export", 0.0), "some text")
    return str(error.value)


@pytest.mark.parametrize("place", PLACES)
def test_a_training_at_work_is_the_reason_and_its_end_the_fix(tmp_path, monkeypatch, place):
    write_json(tmp_path / "models/export/hf/athanor.json", {"lineage": {"shards": "1" * 64, "sft_data": "2" * 64}})
    (tmp_path / ".athanor").mkdir()
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    assert "dvc checkout" in why(tmp_path, place)
    journal = Journal(tmp_path / ".athanor/runs/sft-1")
    write_json(journal.folder / "meta.json", {"pid": os.getpid(), "stage": "sft"})
    said = why(tmp_path, place)
    assert "a training is running here (sft)" in said and said.endswith("ask again when it has ended")
    with pytest.raises(InputError, match=r"running here \(sft\)"):  # in a terminal, too
        trace._tracer()
    journal.close("FAILED")
    assert "data/shards is not here as this model was made from it" in why(tmp_path, place)
    (tmp_path / FOLDER).mkdir()
    with (tmp_path / FOLDER / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "a training is running here (athanor repro)" in why(tmp_path, place)
