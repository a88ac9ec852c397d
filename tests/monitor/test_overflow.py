"""Real trainings in fp16: an overflow in one block is foretold, and healthy runs raise no alarm. About 15 s and 60 s."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from athanor.model.transformer import Transformer
from athanor.monitor.finding import Finding
from athanor.monitor.monitor import Monitor, plan_facts, plan_of
from athanor.training.loop import Hooks, train
from athanor.training.schedule import Schedule
from tests.monitor.test_planted import BATCH_TOKENS, OF_THE_MACHINE, findings
from tests.stages.test_train_stages import inputs, work  # noqa: F401  (fixtures)
from tests.training import micro

LAYERS, BLOCK = 9, 7


class Told(NamedTuple):
    rows: list[dict[str, float]]
    findings: list[Finding]
    forensics: list[dict[str, Any]]


def run(folder: Path, growth: float, steps: int) -> Told:
    """Train in fp16 while a matrix of one block grows by a factor in every step."""
    tokens = steps * micro.SETTINGS.batch_tokens
    schedule = Schedule("wsd", 0.01, 0.0, 256, 256, tokens)
    model = Transformer.fresh(dataclasses.replace(micro.CONFIG, layers=LAYERS), 0)
    monitor = Monitor(plan_of(plan_facts("pretrain", schedule, 128, 64, None, precision="fp16")))
    told = Told([], [], [])

    class Sampler(micro.CountingSampler):
        def batch(self, position_tokens: int, batch_tokens: int) -> micro.Rows:
            with torch.no_grad():
                model.model.layers[BLOCK].mlp.up_proj.weight.mul_(growth)
            return super().batch(position_tokens, batch_tokens)

    def on_step(row: dict[str, float]) -> None:
        told.rows.append(row)
        told.findings.extend(monitor.feed(row))

    def on_event(name: str, facts: dict[str, Any]) -> None:
        if name == "forensics":
            told.forensics.append(facts)

    changes = {"total_tokens": tokens, "precision": "fp16", "max_rollbacks": 0, "spike_guard": False}
    settings = dataclasses.replace(micro.SETTINGS, **changes)
    hooks = Hooks(validate=micro.validate, on_step=on_step, on_event=on_event)
    train(model, Sampler(), micro.ADAMW, schedule, settings, folder, hooks)
    return told


def test_an_overflow_in_one_block_is_foretold_and_its_last_frames_are_kept(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    told = run(tmp_path, 1.1, 145)
    first = next(row["step"] for row in told.rows if not math.isfinite(row["loss"] + row["grad_norm"]))
    ahead = [finding for finding in told.findings if finding.rule == "overflow_ahead"]
    assert ahead and ahead[0].step <= first - 20, (first, told.findings)
    assert f"Block {BLOCK} " in ahead[0].diagnosis and "fp16" in ahead[0].diagnosis
    frames, where = told.forensics[0]["frames"], told.forensics[0]["where"]
    assert f"layers.{BLOCK}." in where
    last = frames[-1]
    assert first - 20 <= last["step"] < first and len(frames) > 3
    assert all(len(last[name]) == LAYERS for name in ("largest", "tiny", "gradient_largest", "gradient_tiny"))
    assert last["largest"].index(max(last["largest"])) == BLOCK


def test_without_growth_nothing_is_foretold(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    told = run(tmp_path, 1.0, 60)
    assert not told.findings and any("vitals.largest" in row for row in told.rows)


@pytest.mark.parametrize("seed", range(10))
def test_no_false_alarm_in_a_healthy_run_in_fp16(work: Path, seed: int) -> None:  # noqa: F811
    found = findings(seed=seed, precision="fp16", lr=(3e-3, 5e-3)[seed % 2], tokens=120 * BATCH_TOKENS)
    assert set(found) <= OF_THE_MACHINE, found
