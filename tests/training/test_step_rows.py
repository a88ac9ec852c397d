"""What a step tells beside its loss: the loss of each source, the loss scale, and waiting for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from athanor.model.loss import targets, token_losses
from athanor.monitor.finding import status
from athanor.monitor.monitor import Monitor, plan_facts, plan_of
from athanor.training.meter import Meter, queue
from tests.training import micro

SOURCES = ("even", "odd", "never")


class Rows(NamedTuple):
    tokens_BS: np.ndarray
    document_BS: np.ndarray
    mask_BS: np.ndarray | None
    source_BS: np.ndarray
    sources: tuple[str, ...] = SOURCES


def sampler(masked: bool = False) -> Any:
    """Micro's sampler, with documents of two sources and none of a third; the first batch has one source only."""

    class Told(micro.CountingSampler):
        def batch(self, position: int, tokens: int) -> Rows:
            rows = super().batch(position, tokens)
            return Rows(*rows, rows.document_BS % 2 * (position > 0))

    return Told(masked)


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_each_source_is_told_and_changes_nothing(tmp_path, masked):
    rows, told = sampler(masked), []
    done = micro.run(tmp_path / "a", rows, {"on_step": told.append}, threads=2)
    assert micro.outcome(*done) == micro.outcome(*micro.run(tmp_path / "b", micro.CountingSampler(masked)))
    assert [sorted(name for name in row if name.startswith("loss.")) for row in told[:2]] == [
        ["loss.even"], ["loss.even", "loss.odd"]
    ]  # fmt: skip
    assert told[0]["loss.even"] == pytest.approx(told[0]["loss"], rel=1e-5)
    model, first = micro.make_model(), rows.batch(0, 128)
    losses = token_losses(model, targets(first.tokens_BS, first.document_BS, first.mask_BS, document_mask=True))
    assert told[0]["loss.even"] == pytest.approx(float(losses.mean()), rel=1e-4)
    for number, row in enumerate(told[1:], 1):
        batch = rows.batch(number * 128, 128)
        counts = [
            len(targets(batch.tokens_BS, np.where(batch.source_BS == source, batch.document_BS, -1), batch.mask_BS,
                        document_mask=True).next_N)
            for source in (0, 1)
        ]  # fmt: skip
        mixed = np.average([row["loss.even"], row["loss.odd"]], weights=counts)
        assert row["loss"] == pytest.approx(mixed, rel=1e-4)


def test_fp16_begins_without_false_alarms_and_its_rules_are_awake(tmp_path):
    told: list[dict[str, float]] = []
    micro.run(tmp_path, hooks={"on_step": told.append}, precision="fp16", z_loss=30.0)
    assert told[0]["loss_scale"] == 65536.0 and told[0]["skipped"] and told[0]["loss_scale"] > told[-1]["loss_scale"]
    facts = plan_facts("pretrain", micro.SCHEDULE, 128, 64, None, precision="fp16")
    monitor = Monitor(plan_of(facts))
    found = [finding for row in told for finding in monitor.feed(row)]
    assert not [each for each in found if each.rule in ("skipped_steps", "loss_scale")]
    # A run whose record was lost is told anew without the scale: the format alone has to say what a skip means.
    again = Monitor(plan_of(facts))
    bare = [{key: value for key, value in row.items() if key != "loss_scale"} for row in told]
    assert not [each for row in bare for each in again.feed(row) if each.rule == "skipped_steps"]
    used_up = [finding for finding in monitor.feed({**told[-1], "step": 25, "loss_scale": 0.5})]
    assert [each.rule for each in used_up] == ["loss_scale"] and status(used_up) == "critical"


def test_other_formats_tell_no_loss_scale(tmp_path):
    told: list[dict[str, float]] = []
    micro.run(tmp_path, hooks={"on_step": told.append})
    assert len(told) == 24 and not any("loss_scale" in row for row in told)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system does not tell")
def test_waiting_for_a_processor_is_told():
    """Beside two busy programs on one core this process waits for most of the time that it wants to run."""
    mine = os.sched_getaffinity(0)
    core = {min(mine)}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, core)
        os.sched_setaffinity(0, core)
        meter = Meter(torch.device("cpu"))
        until = time.monotonic() + 1.0
        meter.begin_step()
        with meter.time("data"):
            while time.monotonic() < until:
                sum(range(1000))
            time.sleep(0.2)
        meter.end_step()
        told = meter.window()
    finally:
        os.sched_setaffinity(0, mine)
        for one in busy:
            one.kill()
            one.wait()
    assert 0.4 < told["cpu.wait_share"] < 1.0
    # Of the data's time only what the data took: its own work, and the wait for a disk.
    assert 0.2 <= told["time.data_s"] < 0.8 * told["time.step_s"]


def test_a_thread_that_ended_is_no_negative_time():
    meter = Meter(torch.device("cpu"))
    thread = threading.Thread(target=lambda: sum(range(10**6)))
    thread.start()
    meter._queue = queue()
    thread.join()
    meter.begin_step()
    meter.end_step()
    assert 0.0 <= meter.window().get("cpu.wait_share", 0.0) <= 1.0
