"""What a training stage's hooks leave in the journal."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

from athanor.runtime.hooks import hooks
from athanor.runtime.progress import Progress
from athanor.runtime.run import Run
from tests.runtime.view import ROOT
from tests.training import micro


def test_a_validation_that_is_not_finite_does_not_end_the_run(tmp_path, monkeypatch):
    """It comes as None, which the journal took for no number; a TypeError then met every attempt at the same step."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("{}")
    for name in ("athanor", "stages"):  # checkpoints hold the digest of the code
        (tmp_path / name).symlink_to(ROOT / name)
    losses = iter([1.5, math.nan, math.inf, 1.25, 1.0, 0.75])
    run = Run("sft", "stages.sft")
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
