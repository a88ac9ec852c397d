"""What a training stage's hooks leave in the journal."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from athanor.model.flops import pass_flops, run_flops
from athanor.runtime.hooks import hooks
from athanor.runtime.progress import Progress
from athanor.runtime.run import Run
from athanor.training.memory import StepFootprint
from tests.runtime.view import ROOT
from tests.training import micro


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("{}")
    for name in ("athanor", "stages"):  # checkpoints hold the digest of the code
        (tmp_path / name).symlink_to(ROOT / name)
    return Run("sft", "stages.sft")


def test_a_validation_that_is_not_finite_does_not_end_the_run(tmp_path, run):
    """It comes as None, which the journal took for no number; a TypeError then met every attempt at the same step."""
    losses = iter([1.5, math.nan, math.inf, 1.25, 1.0, 0.75])
    wired = hooks(
        run,
        Progress(None, "sft", "tokens"),
        SimpleNamespace(document_name=None),
        128,
        validate=lambda model: {"loss": next(losses)},
        scalars=lambda score: {"val_loss": score["loss"]},
        before_first_step=lambda model: None,
    )
    _, result = micro.run(tmp_path / "slot", hooks={"validate": wired.validate, "on_validation": wired.on_validation})
    assert [row["scores"]["loss"] for row in result.validations] == [1.5, None, None, 1.25, 1.0]
    written = [json.loads(line) for line in run.journal.path.read_text().splitlines()]
    assert [row["m"]["val_loss"] for row in written if "val_loss" in row.get("m", {})] == [1.5, "nan", "nan", 1.25, 1.0]


def test_each_log_point_tells_which_share_of_the_peak_the_training_reaches(tmp_path, run):
    """The model's arithmetic of the whole run, as its documents allow it, over the time of its steps."""
    nothing = {"validate": micro.validate, "scalars": lambda score: {}, "before_first_step": lambda model: None}
    bases = {"mfu": 50.0, "of_ceiling": 25.0}
    bar, namer = Progress(None, "sft", "tokens"), SimpleNamespace(document_name=None)
    wired = hooks(run, bar, namer, 128, **nothing, bases=bases)
    load = StepFootprint(2, 16, "fp32", checkpointing=True)
    _, result = micro.run(tmp_path / "slot", hooks={"on_step": wired.on_step}, footprint=load)
    written = [row for row in map(json.loads, run.journal.path.read_text().splitlines()) if "mfu" in row.get("m", {})]
    rows = [row["m"] for row in written]
    steps = [row["s"] - before for row, before in zip(written, [0, *(row["s"] for row in written)], strict=False)]
    assert max(steps) == 3 and sum(steps) == 24  # a log point every three steps, and at each validation
    for row in rows:
        assert row["mfu"] == row["model_gflops"] / 50 and row["of_ceiling"] == row["model_gflops"] / 25
    again = pass_flops(micro.CONFIG, result.tokens, result.pairs, 0)
    model = run_flops(micro.CONFIG, result.tokens, result.pairs, result.supervised_tokens)
    seconds = [row["time.step_s"] * count for row, count in zip(rows, steps, strict=True)]
    for name, expected in (("mfu", model), ("hfu", model + again)):
        done = sum(50 * row[name] * taken for row, taken in zip(rows, seconds, strict=True))
        assert done == pytest.approx(expected / 1e9)
