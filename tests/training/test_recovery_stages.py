"""A way back as the stages see it: journal, metrics and manifest. About 10 s."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from athanor.base.artifacts import read_json
from athanor.base.errors import Interrupted
from athanor.model.weights import load_config
from athanor.runtime.journal import live
from athanor.training import recovery
from athanor.training.guard import Divergence, Rules
from athanor.training.settings import LoopSettings
from tests.stages import test_train_stages as stages
from tests.stages.conftest import settle


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The workspace of the stages' own tests, where the rules find a spike at step 9."""
    (tmp_path / "work").mkdir()
    stages.write_inputs(tmp_path / "work")
    settle(monkeypatch, tmp_path / "work")

    def trouble(rows, rules, step):
        return Divergence("planted", len(rows) - 2) if step == 9 and "9" not in found else None

    found = []
    real = recovery.Recovery.roll_back
    monkeypatch.setattr(recovery, "detect_divergence", trouble)
    monkeypatch.setattr(recovery.Recovery, "roll_back", lambda self, *a: (found.append("9"), real(self, *a)))
    of = LoopSettings.of.__func__
    monkeypatch.setattr(
        LoopSettings, "of", classmethod(lambda cls, *told, **own: of(cls, *told, rules=Rules(margin=1), **own))
    )
    yield tmp_path / "work"
    torch.set_flush_denormal(False)


def journal(run):
    folder = Path(".athanor/runs") / run.journal.folder.name
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_way_back_is_in_journal_metrics_and_manifest(work):
    run = stages.execute("pretrain")
    batch = stages.PRETRAIN["batch_tokens"]
    expected = [{"found": 9, "step": 7, "from": 6 * batch, "to": 9 * batch, "reason": "planted"}]
    assert read_json(work / "metrics/pretrain.json")["skipped_ranges"] == expected
    assert load_config(work / "models/base")[1]["skipped_ranges"] == expected
    written = journal(run)
    (event,) = [row for row in written if row.get("event") == "rollback"]
    assert event["to"] == 0 and event["skip"] == expected[0] and event["found"] == 9
    named = event["documents"][0]["document"]
    assert named.startswith("document ") and " of train" in named
    steps = [row["s"] for row in written if "loss" in row.get("m", {})]
    assert steps == [*range(1, 10), *range(1, 21)]
    losses = {row["s"]: row["m"]["loss"] for row in live(written) if "loss" in row.get("m", {})}
    assert sorted(losses) == list(range(1, 21))
    note = next(row["text"] for row in written if row.get("event") == "note" and "planted" in row["text"])
    assert "Most suspicious: document" in note and "left out from step 7 on" in note


def test_sft_names_conversations(work):
    stages.execute("pretrain")
    shutil.rmtree(work / ".athanor/slots/sft", ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        always = Divergence("planted", 2)
        patch.setattr(recovery, "detect_divergence", lambda rows, rules, step: always if step == 3 else None)
        with pytest.raises(Exception, match="3 ranges of data were left out before"):  # a rule that always speaks
            stages.execute("sft")
    journals = sorted((work / ".athanor/runs").glob("sft-*/journal.jsonl"))
    written = [json.loads(line) for line in journals[-1].read_text().splitlines()]
    events = [row for row in written if row.get("event") == "rollback"]
    assert len(events) == 3 and all(row["documents"][0]["document"].startswith("conversation ") for row in events)


def test_stopped_after_a_way_back_the_same_run_goes_on(work):
    with pytest.raises(Interrupted):
        stages.execute("pretrain", stop_after=14)  # nine steps, and five of the new way
    run = stages.execute("pretrain")
    assert len(read_json(work / "metrics/pretrain.json")["skipped_ranges"]) == 1
    written = journal(run)
    assert [row["s"] for row in live(written) if "loss" in row.get("m", {})] == list(range(1, 21))
