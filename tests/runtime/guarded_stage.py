"""A stage on the real stage runner that tests stop, save, stall and ask, in a directory of its own.

It takes twelve cheap steps, or with `train` the micro training of
tests/training/micro.py, and tells each step in a log. Nothing guesses how long
anything takes: a file `hold` makes it stand still at a step until it is removed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime.toy_pipeline import place_stages
from tests.runtime.view import ROOT

STEPS = 12
PATIENCE = 120.0  # s; only a test that fails waits so long

STAGE = f'''
import contextlib, ctypes, json, os, threading, time
from pathlib import Path
from athanor.base.artifacts import new_dir, write_bytes
from athanor.base.errors import Interrupted
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run

PLAN = json.loads(os.environ["TOY_PLAN"])
CONTROL = Path(os.environ["TOY_CONTROL"])

def stuck_loader():
    while True:
        time.sleep(0.05)

def tells_threads():
    (CONTROL / "threads").write_text(" ".join(thread.name for thread in threading.enumerate()))

def pauses():
    time.sleep(0.5)

def holds_the_lock():
    ctypes.PyDLL(None).sleep(PLAN["seconds"])  # unlike CDLL, PyDLL does not let other threads run

def waits_until_over():
    while not (CONTROL / "over").exists():
        time.sleep(0.02)

def before(step, slot):
    """What happens within a step."""
    with open(CONTROL / "log", "a") as log:
        log.write(f"{{os.getpid()}} {{step}}\\n")
    with contextlib.suppress(FileNotFoundError):  # which it is from one look to the next
        while step >= int((CONTROL / "hold").read_text() or 0):
            (CONTROL / f"held-{{os.getpid()}}").touch()
            time.sleep(0.01)
    what = PLAN.get(str(step))
    if what == "writes":  # a checkpoint that takes long
        (slot.path / ".step_x.tmp").mkdir()
        until = time.monotonic() + PLAN["seconds"]
        while time.monotonic() < until:
            with open(slot.path / ".step_x.tmp" / "data", "ab") as file:
                file.write(b"x")
            time.sleep(0.05)
    elif what == "sleeps":
        time.sleep(PLAN["seconds"])
    elif what:
        globals()[what]()

def count(run, slot):
    steps = [int(path.name[5:]) for path in slot.path.glob("step_*")]
    step = max(steps, default=0)
    while step < {STEPS}:
        before(step + 1, slot)
        step += 1
        run.log(step, loss=1.0)
        stop, save = run.stop_requested(), run.save_requested()
        if step == PLAN.get("validate_at"):
            run.long_operation("validation", time.sleep)(PLAN["seconds"])
        if stop or save:
            with new_dir(slot.path / f"step_{{step:08d}}") as out:
                (out / "data").write_bytes(bytes(PLAN.get("bytes", 10)))
        if stop:
            raise Interrupted(f"stopped at step {{step}}")

def learn(run, slot, bar):
    from tests.training import micro

    class Sampler(micro.CountingSampler):
        def batch(self, position, batch_tokens):
            before(position // batch_tokens + 1, slot)
            return super().batch(position, batch_tokens)

    hooks = {{"should_stop": run.stop_requested, "should_save": run.save_requested, "on_resume": bar.resume_at}}
    hooks["on_step"] = lambda row: (run.log(int(row["step"]), loss=row["loss"]), bar.update(128))
    model, result = micro.run(slot.path, Sampler(), hooks, log_every_steps=1)
    weights, rest = micro.outcome(model, result)
    write_bytes("out.bin", weights + repr(rest).encode())

def run(run: Run) -> None:
    total = 24 * 128 if PLAN.get("train") else None
    with run.slot({{"name": PLAN.get("name", "")}}, {{}}) as slot, run.progress(total, "toy", "tokens") as bar:
        learn(run, slot, bar) if PLAN.get("train") else count(run, slot)
        slot.mark_done()

if __name__ == "__main__":
    stage_main("toy", run)
'''


class Place:
    """A working directory with the stage in it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.control = folder / "repo", folder / "control"
        self.control.mkdir(parents=True)
        place_stages(self.path, "stages:\n  toy:\n    cmd: python -m stages.toy\n    outs: [o]\n", toy=STAGE)
        self.state = self.path / ".athanor"
        self.children: list[subprocess.Popen[str]] = []

    def environment(self, plan: dict[str, Any], **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_", "ATHANOR_", "SLURM_"))}
        told = {"TOY_PLAN": json.dumps(plan), "TOY_CONTROL": str(self.control), "PYTHONPATH": str(ROOT)}
        return {**clean, "ATHANOR_TRACKING": "off", **told, **more}

    def start(self, plan: dict[str, Any] | None = None, **more: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "stages.toy"], cwd=self.path, env=self.environment(plan or {}, **more),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.children.append(child)
        return child

    def run(self, plan: dict[str, Any] | None = None, **more: str) -> tuple[int, str]:
        return ended(self.start(plan, **more))

    def athanor(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "athanor", *words], cwd=self.path, env=self.environment({}),
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip

    def hold(self, step: int) -> None:
        (self.control / "hold.new").write_text(str(step))
        os.replace(self.control / "hold.new", self.control / "hold")

    def wait_held(self, child: subprocess.Popen[str]) -> None:
        until((self.control / f"held-{child.pid}").exists, "the stage stands still", child)

    def release(self, until: int | None = None) -> None:
        """Let it go on, to the step `until` if there is one, when it has not looked for a file for longer than it may."""
        time.sleep(0.6)
        if until is None:
            (self.control / "hold").unlink()
        else:
            self.hold(until)

    def log(self, child: subprocess.Popen[str]) -> list[int]:
        rows = [line.split() for line in (self.control / "log").read_text().splitlines()]
        return [int(step) for pid, step in rows if int(pid) == child.pid]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows() if row.get("event") == name]

    def rows(self) -> list[dict[str, Any]]:
        lines = [line for path in self.state.glob("runs/*/journal.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.state.glob("slots/toy/*/step_*"))

    def stacks(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.state.glob("runs/*/stacks.*")}

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stderr is not None:
                child.stderr.close()


def ended(child: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = child.communicate(timeout=PATIENCE)
    return child.returncode, said


def until(condition: Callable[[], object], what: str, child: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if child is not None and child.poll() is not None and not condition():
            raise AssertionError(f"the stage ended with {child.returncode} before {what}")
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE:.0f} s in vain until {what}")
        time.sleep(0.02)
