"""Origins of an answer whose training data is not here. Those that are found are tested in tests/origins and tests/e2e."""

from __future__ import annotations

import os

import pytest

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.catalog.discover import AvailableModel
from athanor.cli import trace
from athanor.runtime.journal import Journal
from athanor.runtime.locks import lock
from athanor.serving import origins
from athanor.serving.retraining import FOLDER, LOCK


@pytest.mark.parametrize(
    "place",
    ["models/export/hf", "models/export/x.gguf", ".athanor/served/md5", ".athanor/slots/sft/a/step_3", "models/base"],
)
def test_a_training_at_work_is_the_reason_and_its_end_the_fix(tmp_path, monkeypatch, place):
    def refused(why: str) -> None:
        with pytest.raises(InputError, match=why):
            origins.trace(tmp_path, AvailableModel("own", "own", str(tmp_path / place), "export", 0.0), "some text")

    write_json(tmp_path / "models/export/hf/athanor.json", {"lineage": {"shards": "1" * 64, "sft_data": "2" * 64}})
    refused("data/shards is not here as this model was made from it.*dvc checkout")
    journal = Journal(tmp_path / ".athanor/runs/sft-1")
    write_json(journal.folder / "meta.json", {"pid": os.getpid(), "stage": "sft"})
    refused(r"a training is running here \(sft\).*ask again when it has ended$")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with pytest.raises(InputError, match=r"running here \(sft\)"):  # in a terminal, too
        trace._tracer()
    journal.close("FAILED")
    with os.fdopen(lock(tmp_path / FOLDER / LOCK, print)):
        refused(r"a training is running here \(athanor repro\)")
