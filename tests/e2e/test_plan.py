"""Plan on the real graph: the reasons, and forecasts from the run that built it."""

from __future__ import annotations

import platform

import pytest

from athanor.cli.plan.main import as_text, make_plan
from tests.e2e.clone import Clone


@pytest.fixture
def at_clone(micro: Clone, monkeypatch: pytest.MonkeyPatch):
    """The built clone as the current directory; params.yaml is put back."""
    monkeypatch.chdir(micro.path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    text = (micro.path / "params.yaml").read_text()
    yield micro
    (micro.path / "params.yaml").write_text(text)


def test_a_learning_rate_costs_what_comes_behind_it(at_clone):
    path = at_clone.path / "params.yaml"
    assert not make_plan(at_clone.path).work
    before, after = path.read_text().split("\npretrain:", 1)
    path.write_text(before + "\npretrain:" + after.replace("lr: 0.004", "lr: 0.003", 1))
    plan = make_plan(at_clone.path)
    told = {step.stage: step.action for step in plan.steps if step.action != "keep"}
    assert told == {"pretrain": "run", "sft": "follows", "eval": "follows", "export": "run"}
    pretrain = plan.forecasts["pretrain"]
    assert pretrain.tokens == 98304 and pretrain.seconds and pretrain.seconds > 0 and pretrain.runs >= 1
    assert plan.forecasts["sft"].tokens and plan.forecasts["eval"].seconds
    text = as_text(plan)
    assert "parameter pretrain.lr: 0.004 -> 0.003" in text and "2 run, 2 follows, 6 keep" in text


def test_another_interpreter_is_told(at_clone, monkeypatch):
    """DVC does not see that the standard library, the micro preset's source, is another one."""
    assert make_plan(at_clone.path).notes == []
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    plan = make_plan(at_clone.path)
    assert not plan.work and "this is 3.99.0" in "".join(plan.notes)
