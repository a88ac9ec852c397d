"""Where the time goes: parts that add up to the wall, attributed to what took them. About 8 s."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from athanor.model.flops import run_flops, training_flops
from athanor.training.meter import OUTSIDE_STEP, STEP_PARTS, Meter, memory
from tests.training import micro

CPU = torch.device("cpu")


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def one_step(meter, clock, data=0.25, work=1.0):
    meter.begin_step()
    with meter.time("data"):
        clock.now += data
    with meter.time("forward_backward"):
        for part, share in (("forward", 0.25), ("backward", 0.75)):
            with meter.time(part):
                clock.now += work * share
    with meter.time("optimizer"):
        clock.now += 0.125
    clock.now += 0.0625
    meter.end_step()


def test_a_window_tells_the_arithmetic_of_its_steps_per_second():
    clock = Clock()
    meter = Meter(CPU, clock)
    for windows, pairs in ((2, 20), (1, 40)):
        for _ in range(windows):
            meter.count(100, pairs, 3)
            one_step(meter, clock, work=3.5625)
        rates = meter.window(lambda tokens, pairs, targets: {"gflops": tokens + 10 * pairs + 1000 * targets})
        assert rates["gflops"] == (100 + 10 * pairs + 3000) / 4


def test_a_window_tells_means_per_step_and_what_each_thing_in_between_took():
    clock = Clock()
    meter = Meter(CPU, clock)
    one_step(meter, clock, work=5.0)
    with meter.time("evaluation"):
        clock.now += 10.0
    clock.now += 100.0  # outside of everything
    for _ in range(3):
        one_step(meter, clock)
    row = meter.window()
    assert row["time.step_s"] == 0.4375 + 8.0 / 4
    assert row["time.step_s"] == sum(row[f"time.{part}_s"] for part in STEP_PARTS)
    assert (row["time.data_s"], row["time.optimizer_s"], row["time.other_s"]) == (0.25, 0.125, 0.0625)
    assert (row["time.forward_s"], row["time.backward_s"]) == (0.5, 1.5)
    assert row["time.evaluation_s"] == 10.0 and "time.checkpoint_s" not in row
    assert meter.window() == {}
    summary = meter.summary()
    assert summary["compile"] == 4.0 and summary["evaluation"] == 10.0
    assert sum(summary[part] for part in STEP_PARTS) == pytest.approx(meter.step_seconds) == pytest.approx(9.75)


def test_threads_that_overlap_share_the_time_of_the_whole():
    """Two threads of one second each, at once, are one second of the step, not two."""
    clock, meter, barrier = Clock(), None, threading.Barrier(2)
    meter = Meter(CPU, clock)

    def lane(main):
        for part, seconds in (("forward", 0.25), ("backward", 0.75)):
            with meter.time(part):
                barrier.wait()
                if main:
                    clock.now += seconds
                barrier.wait()

    meter.begin_step()
    with meter.time("forward_backward"):
        threads = [threading.Thread(target=lane, args=(number == 0,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    meter.end_step()
    row = meter.window()
    assert row["time.step_s"] == row["time.forward_backward_s"] == 1.0
    assert row["time.forward_s"] + row["time.backward_s"] == 1.0


class SlowSampler:
    def __init__(self, inner, seconds):
        self.inner, self.seconds = inner, seconds

    def batch(self, *at):
        time.sleep(self.seconds)
        return self.inner.batch(*at)


def test_the_parts_of_a_run_add_up_to_its_wall(tmp_path, monkeypatch):
    """Sleeps where the loader, the evaluation and the checkpoint are: each is found where it belongs."""
    from athanor.training import checkpoint

    def validate(model):
        time.sleep(0.1)
        return micro.validate(model)

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: (time.sleep(0.2), save(*a, **k)))
    rows, started = [], []
    hooks = {"validate": validate, "on_step": rows.append}
    hooks["before_first_step"] = lambda model: started.append(time.perf_counter())
    _, result = micro.run(tmp_path, SlowSampler(micro.CountingSampler(), 0.03), hooks)
    wall = time.perf_counter() - started[0]
    parts = result.seconds
    assert sum(parts.get(part, 0.0) for part in (*STEP_PARTS, *OUTSIDE_STEP)) == pytest.approx(wall, rel=0.02)
    assert parts["data"] >= 24 * 0.03 and parts["evaluation"] >= 5 * 0.1 and parts["checkpoint"] >= 0.2
    assert parts["forward"] + parts["backward"] == pytest.approx(parts["forward_backward"])
    step_seconds = result.timings(micro.CONFIG)["train_seconds"]
    assert step_seconds <= wall - parts["evaluation"] - parts["checkpoint"]
    told = [row for row in rows if "time.step_s" in row]
    assert [row["step"] for row in told][:5] == [3, 5, 8, 10, 13] and told[-1]["step"] == 24
    assert all(row["time.data_s"] >= 0.03 and row["memory.host_bytes"] > 1e6 for row in told)
    assert sum("time.evaluation_s" in row for row in told) == 4  # that of the last step has no row after it
    assert told[0]["tokens_per_second"] == pytest.approx(128 / told[0]["time.step_s"])


def test_operations_count_the_documents_really_trained(tmp_path):
    packed, whole = (micro.run(tmp_path / str(mask), document_mask=mask)[1] for mask in (True, False))
    assert whole.pairs == 24 * 8 * (16 * 17 // 2) > packed.pairs > 24 * 128
    flops = packed.metrics(micro.CONFIG)["flops"]
    assert flops == run_flops(micro.CONFIG, packed.tokens, packed.pairs, packed.supervised_tokens)
    assert flops < packed.timings(micro.CONFIG)["planned_flops"] == packed.tokens * training_flops(micro.CONFIG, 16)
    # Killed and resumed, the count is the same.
    with pytest.raises(Exception, match="stopped at step"):
        micro.run(tmp_path / "stopped", hooks={"should_stop": lambda: True})
    assert micro.run(tmp_path / "stopped")[1].pairs == packed.pairs


def test_memory_of_this_process():
    """In a process of its own: another test may have left this one a heap that is large enough already."""
    code = """
import torch
from athanor.training.meter import memory
told = memory(torch.device("cpu"))
assert told["memory.bytes"] >= told["memory.host_bytes"] > 1e7
block = torch.ones(64 << 20, dtype=torch.uint8)
assert memory(torch.device("cpu"))["memory.host_bytes"] > told["memory.host_bytes"] + (48 << 20)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_of_a_device_add_up():
    device = torch.device("cuda")
    meter, big = Meter(device), torch.randn(2048, 2048, device=device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        meter.begin_step()
        with meter.time("data"):
            time.sleep(0.002)
        with meter.time("forward_backward"), meter.time("forward"):
            for _ in range(20):
                big @ big
        meter.end_step()
    torch.cuda.synchronize()
    wall = time.perf_counter() - started
    row = meter.window()
    assert 20 * row["time.step_s"] == pytest.approx(wall, rel=0.05)
    assert row["time.step_s"] == pytest.approx(sum(row.get(f"time.{part}_s", 0.0) for part in STEP_PARTS))
    assert memory(device)["memory.bytes"] >= 16e6
