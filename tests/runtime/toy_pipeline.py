"""A two-stage pipeline in a Git and DVC repository of its own, to kill things in.

The first stage is a resumable body of twelve cheap steps on the real stage
runner: it checkpoints into its slot every four steps and writes each step that
it takes to a log outside the repository, where outputs and checkpoints cannot
hide it. Tests never guess how long anything takes: they put a `hold` file next
to the log, wait until the stage stands at that step, do their damage, and
remove the file.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from athanor.runtime import presets
from tests.e2e.clone import ROOT, environment

STEPS, SAVE_EVERY = 12, 4
PATIENCE = 120.0  # seconds; only a test that fails waits this long

COUNT = f"""
import os, time
from pathlib import Path
from athanor.base.artifacts import new_dir, read_json, write_json, write_manifest
from athanor.base.errors import Interrupted
from athanor.training.sft_params import SftParams
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run

CONTROL = Path(os.environ["TOY_CONTROL"])

def say(*words):
    with open(CONTROL / "log", "a") as log:
        log.write(" ".join(map(str, (os.getpid(), *words))) + "\\n")

def held(step):
    hold = CONTROL / "hold"
    return hold.exists() and step >= int(hold.read_text() or 0)

def run(run: Run) -> None:
    seed = run.params("sft", SftParams).seed
    with run.slot({{"seed": seed}}, {{}}) as slot:
        state = slot.path / "state.json"
        step = read_json(state)["step"] if state.is_file() else 0
        while not slot.done and step < {STEPS}:
            say("count", seed, step)
            step += 1
            time.sleep(0.01)
            if step % {SAVE_EVERY} == 0:
                write_json(state, {{"step": step}})
            while held(step) and not run.stop_requested():
                (CONTROL / f"held-{{os.getpid()}}").touch()
                time.sleep(0.01)
            run.note(f"step {{step}}")
            if run.stop_requested():
                write_json(state, {{"step": step}})
                raise Interrupted(f"stopped after step {{step}}")
        with new_dir("data/count") as out:
            (out / "sum").write_text(f"{{seed}} {{sum(range(step))}}\\n")
            write_manifest(out, kind="count", version=1, counts={{}})
        slot.mark_done()
    run.metrics({{"steps": step}})

if __name__ == "__main__":
    stage_main("count", run)
"""

REPORT = """
import time
from pathlib import Path
from athanor.base.artifacts import new_dir
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from stages.count import CONTROL, say

def run(run: Run) -> None:
    say("report", 0, 0)
    while (CONTROL / "hold-report").exists():
        time.sleep(0.01)
    with new_dir("data/report") as out:
        (out / "text").write_text("counted " + Path("data/count/sum").read_text())

if __name__ == "__main__":
    stage_main("report", run)
"""

GRAPH = """stages:
  count:
    cmd: python -m stages.count
    deps: [stages/count.py]
    params: [sft]
    outs: [data/count]
    metrics: [{metrics/count.json: {cache: false}}, {metrics/runs/count.json: {cache: false}}]
  report:
    cmd: python -m stages.report
    deps: [data/count, stages/count.py, stages/report.py]
    outs: [data/report]
    metrics: [{metrics/runs/report.json: {cache: false}}]
"""


def place_stages(folder: Path, graph: str = "", **stages: str) -> None:
    """A working directory with these stages, micro's params and, if there is one, this `dvc.yaml`."""
    (folder / "stages").mkdir(parents=True)
    for name, code in (("__init__", ""), *stages.items()):
        (folder / "stages" / f"{name}.py").write_text(code)
    (folder / "params.yaml").write_text(presets.complete(ROOT / "presets" / "micro.yaml"))
    if graph:
        (folder / "dvc.yaml").write_text(graph)


class Step(NamedTuple):
    """A line of the log: who did what."""

    pid: int
    stage: str
    seed: int
    step: int


class Toy:
    """The repository, the processes started in it, and the log of what they did."""

    def __init__(self, folder: Path) -> None:
        self.path, self.control = folder / "repo", folder / "control"
        self.control.mkdir(parents=True)
        place_stages(self.path, GRAPH, count=COUNT, report=REPORT)
        (self.path / ".dvc").mkdir()
        for name in (".gitignore", ".dvcignore", ".dvc/config", ".dvc/.gitignore"):
            shutil.copyfile(ROOT / name, self.path / name)
        self.git("init", "-q", "-b", "main")
        self.git("add", "-A")
        self.git("commit", "-qm", "start")

    # -- commands -----------------------------------------------------------

    def environment(self) -> dict[str, str]:
        who = {f"GIT_{role}_{what}": "t@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        return environment(
            PYTHONPATH=f"{self.control}{os.pathsep}{ROOT}",  # a test may put a sitecustomize.py into the first
            ATHANOR_TRACKING="off",
            TOY_CONTROL=str(self.control),
            DVC_SITE_CACHE_DIR=str(self.control / "site"),
            DVC_NO_ANALYTICS="1",
            GIT_CONFIG_GLOBAL=os.devnull,
            **who,
        )

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # Files, not pipes: queue workers inherit the pipe and keep it open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                command, cwd=self.path, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, timeout=PATIENCE,
            )  # fmt: skip
            out.seek(0), err.seek(0)
            done.stdout, done.stderr = out.read(), err.read()
        if check and done.returncode:
            raise AssertionError(f"{command} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done

    def git(self, *words: str) -> str:
        return self.run("git", *words).stdout.strip()

    def dvc(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *words, check=check)

    def doctor(self, *words: str) -> tuple[int, list[dict[str, Any]]]:
        """Exit status and findings of `athanor doctor --json`."""
        done = self.run(sys.executable, "-m", "athanor", "doctor", "--json", *words, check=False)
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)["findings"]

    def start(self, *words: str, into: int | None = None) -> Job:
        """dvc in the background, as the leader of a process group, as a shell would start it."""
        return Job(self, [sys.executable, "-m", "dvc", *words], into)

    def repro(self, *words: str) -> Job:
        """`athanor repro` in the background."""
        return Job(self, [sys.executable, "-m", "athanor", "repro", *words])

    # -- what happened ------------------------------------------------------

    def hold(self, step: int) -> None:
        """The stage will stand still when it has taken this many steps."""
        (self.control / "hold.new").write_text(str(step))
        os.replace(self.control / "hold.new", self.control / "hold")

    def release(self) -> None:
        (self.control / "hold").unlink()

    def log(self) -> list[Step]:
        path = self.control / "log"
        rows = [line.split() for line in path.read_text().splitlines()] if path.is_file() else []
        return [Step(int(pid), stage, int(seed), int(step)) for pid, stage, seed, step in rows]

    def steps(self, stage: str = "count") -> list[int]:
        return [row.step for row in self.log() if row.stage == stage]

    def trainers(self) -> list[int]:
        """Processes that counted, in order; fails when two of them worked at once on the same thing."""
        counted = [row for row in self.log() if row.stage == "count"]
        for seed in {row.seed for row in counted}:
            pids = [row.pid for row in counted if row.seed == seed]
            changes = sum(left != right for left, right in itertools.pairwise(pids))
            assert changes == len(set(pids)) - 1, f"two trainers at once: {pids}"
        return list(dict.fromkeys(row.pid for row in counted))

    def wait_held(self, count: int = 1) -> int:
        """Wait until `count` stages stand at the hold; the pid of the last."""
        until(lambda: len(list(self.control.glob("held-*"))) >= count, "a stage stands at the hold", self)
        newest = max(self.control.glob("held-*"), key=lambda path: path.stat().st_mtime_ns)
        return int(newest.name.removeprefix("held-"))

    def forget_held(self) -> None:
        for path in self.control.glob("held-*"):
            path.unlink()

    def rwlock(self) -> dict[str, Any]:
        path = self.path / ".dvc" / "tmp" / "rwlock"
        return json.loads(path.read_text()) if path.is_file() else {}

    def locked_by(self) -> set[int]:
        lock = self.rwlock()
        entries = [*lock.get("write", {}).values(), *(entry for row in lock.get("read", {}).values() for entry in row)]
        return {entry["pid"] for entry in entries}

    def lock_has(self, *stages: str) -> bool:
        path = self.path / "dvc.lock"
        text = path.read_text() if path.is_file() else ""
        return all(f"\n  {stage}:\n" in text for stage in stages)

    # -- the end ------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started in this repository, however detached."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TOY_CONTROL") == str(self.control) and process.status() != "zombie":
                    mine.append(process)
            except psutil.Error:
                continue
        return mine

    def kill_all(self) -> None:
        """Repeated, because a worker may start a child while it is being killed."""
        while mine := self.processes():
            for process in mine:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(mine, timeout=5)


class Job:
    """A command in the background and what it printed, unless that goes into a pipe."""

    def __init__(self, toy: Toy, command: list[str], into: int | None = None) -> None:
        self.toy = toy
        self.output = toy.control / f"output-{time.monotonic_ns()}"
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                command, cwd=toy.path, env=toy.environment(), stdin=subprocess.DEVNULL,
                stdout=into or file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill_group(self, number: int) -> None:
        os.killpg(self.pid, number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def wait_text(self, text: str) -> None:
        until(lambda: text in self.text(), f"the output says {text!r}", self.toy)


def until(condition: Callable[[], object], what: str, toy: Toy | None = None, pause: float = 0.02) -> None:
    """Wait for a state; the failure tells what everything printed."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            outputs = toy.control.glob("output-*") if toy else ()
            said = "".join(path.read_text(errors="replace")[-2000:] for path in outputs)
            raise AssertionError(f"waited {PATIENCE:.0f} s in vain until {what}\n{said}")
        time.sleep(pause)


def gone(pid: int) -> bool:
    """True when a process has ended; one that nobody has reaped yet counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), f"process {pid} is gone")
