"""docs/experiments.md: its commands are run as they stand, in order, in a clone that has its first run behind it.

Every heading with commands has a check below, named after it, of what the commands should have led to.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from athanor.base.strict import read_yaml
from tests.e2e.clone import Clone, environment
from tests.e2e.page import blocks, promised

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "experiments.md"
SECONDS = 900.0


def commands() -> list[tuple[str, str]]:
    """(heading, line) of every line of every block of the page."""
    found = [(block.heading, line) for block in blocks(PAGE) for line in block.text.splitlines() if line.strip()]
    assert {block.language for block in blocks(PAGE)} == {"bash"}, "a block that is not run"
    assert not any(line.endswith("\\") for _, line in found), "one line for one command, please"
    return found


class Tour:
    """A shell that remembers its directory, and what each command printed."""

    def __init__(self, start: Path) -> None:
        self.start = self.here = start
        self.printed: list[tuple[str, str]] = []
        self.grid: dict[str, tuple[str, str]] = {}

    @property
    def clone(self) -> Clone:
        return Clone(self.here)

    def run(self, command: str) -> None:
        interrupt = "press Ctrl-C" in command
        where, log = self.start.parent / "where", self.start.parent / f"{len(self.printed)}.log"
        with open(log, "w") as out:  # not a pipe, which the queue's workers would hold open
            child = subprocess.Popen(
                ["bash", "-c", f'{command}\nstatus=$?\npwd > "{where}"\nexit $status'],
                cwd=self.here,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        stopped = interrupt and self._interrupt(child)
        child.wait(SECONDS)
        output = log.read_text()
        self.printed.append((command, output))
        if stopped:
            assert child.returncode != 0 and "progress is kept" in output, output
            return
        assert child.returncode == promised(command), f"{command}\nexit {child.returncode}\n{output[-6000:]}"
        self.here = Path(where.read_text().strip())
        if command.startswith("dvc queue status"):
            self._wait_for_queue()

    def _interrupt(self, child: subprocess.Popen[bytes]) -> bool:
        """What a terminal does at Ctrl-C, as soon as sft has a checkpoint slot; False when the run was faster."""
        before = set(self._sft_runs())
        deadline = time.monotonic() + SECONDS
        while child.poll() is None and set(self._sft_runs()) == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.1)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGINT)
        return child.wait(SECONDS) != 0

    def _sft_runs(self) -> list[Path]:
        return list(self.here.glob(".athanor/slots/sft/*/run.json"))

    def _wait_for_queue(self) -> None:
        deadline = time.monotonic() + SECONDS
        while re.search(r"Queued|Running", said := self.clone.dvc("queue", "status").stdout):
            assert time.monotonic() < deadline, said
            time.sleep(1)
        assert said.count("Success") == 4, said

    def output(self, start: str) -> str:
        """What the last command printed that begins like this."""
        return [text for line, text in self.printed if line.startswith(start)][-1]

    def run_of(self, stage: str) -> str:
        return json.loads((self.here / "metrics" / "runs" / f"{stage}.json").read_text())["run"]

    def param(self, section: str, name: str) -> object:
        return read_yaml(self.here / "params.yaml")[section][name]

    def experiments(self) -> dict[str, dict[str, str]]:
        rows = csv.DictReader(io.StringIO(self.clone.dvc("exp", "show", "--csv", "--hide-workspace").stdout))
        return {row["Experiment"]: row for row in rows if row["Experiment"]}


CHECKS: dict[str, Callable[[Tour], None]] = {}


def after(heading: str) -> Callable[[Callable[[Tour], None]], None]:
    return lambda check: CHECKS.__setitem__(heading, check)


@after("Commit the first run")
def _(tour: Tour) -> None:
    assert "dvc.lock" in tour.clone.run("git", "ls-files").stdout
    assert tour.clone.run("git", "status", "--porcelain").stdout == ""


@after("Change one thing")
def _(tour: Tour) -> None:
    said = tour.output("dvc exp run -n lower-lr")
    ran = set(re.findall(r"Running stage '([\w-]+)'", said))
    assert ran == {"sft", "eval", "export"}
    assert tour.param("sft", "lr") == 0.001
    assert tour.clone.run("git", "symbolic-ref", "--short", "HEAD").stdout == "main\n"


@after("Look")
def _(tour: Tour) -> None:
    table = tour.output("dvc exp show")
    titles = next(line for line in table.splitlines() if "Experiment" in line).split()
    assert titles == ["Experiment", "loss", "sft_bpb", "sft.lr"] and "lower-lr" in table
    for said in (table, tour.clone.dvc("metrics", "show").stdout):
        assert len(said.splitlines()) <= 40 and max(map(len, said.splitlines())) <= 100, said
    assert re.search(r"params.yaml +sft.lr +0.004 +0.001", tour.output("dvc params diff"))
    metrics = set(re.findall(r"metrics/\S+ +(\w+)", tour.output("dvc metrics diff")))
    assert {"loss", "sft_bpb"} <= metrics <= {"loss", "sft_bpb", "accuracy"}
    page = (tour.here / "dvc_plots" / "index.html").read_text()
    assert page.index("Pretraining_loss") < page.index("SFT_loss") < page.index("Learning_rate")
    said = tour.output("athanor compare")
    assert re.search(r"sft.lr +0.004 -> 0.001", said) and "eval.sft_bpb" in said and "beyond the noise?" in said
    # The workspace is at the commit again.
    assert tour.clone.run("git", "status", "--porcelain").stdout == ""
    assert "up to date" in tour.clone.dvc("status").stdout


@after("Sweep")
def _(tour: Tour) -> None:
    found = tour.experiments()
    grid = {name: (row["sft.lr"], row["sft.weight_decay"]) for name, row in found.items() if name.startswith("grid-")}
    tour.grid = grid
    assert sorted(grid.values()) == [("0.002", "0.0"), ("0.002", "0.2"), ("0.006", "0.0"), ("0.006", "0.2")], grid
    log = tour.output("dvc queue logs")
    assert "python -m stages.sft" in log and "stages.pretrain" not in log
    table = tour.output("dvc exp show --hide-workspace").splitlines()
    assert len(table) <= 40 and max(map(len, table)) <= 100, table
    column = next(line for line in table if "Experiment" in line).split().index("loss")
    rows = [line.replace("── ", "──").replace(" [", "[").split() for line in table if "[grid-" in line]
    scores = [float(row[column]) for row in rows]
    assert len(rows) == 4 and scores == sorted(scores) and len(set(scores)) > 1
    assert tour.clone.run("git", "status", "--porcelain").stdout == ""  # the queue left the workspace alone


@after("Take the best")
def _(tour: Tour) -> None:
    assert tour.clone.run("git", "status", "--porcelain").stdout == ""
    assert (str(tour.param("sft", "lr")), str(tour.param("sft", "weight_decay"))) == tour.grid["grid-2"]
    plan = tour.output("athanor plan")
    assert re.search(r"export +run", plan), plan
    assert set(re.findall(r"Running stage '([\w-]+)'", tour.output("dvc repro"))) == {"export"}
    tour.clone.run("git", "rev-parse", "--verify", "lower-lr-branch")


@after("In MLflow")
def _(tour: Tour) -> None:
    assert "models/export is registered as version 1 of 'athanor'" in tour.output("athanor promote")


@after("Stop and go on")
def _(tour: Tour) -> None:
    assert tour.clone.run("git", "symbolic-ref", "--short", "HEAD").stdout == "main\n"
    assert "longer" in tour.experiments()
    runs = [json.loads(path.read_text()) for path in tour.here.glob(".athanor/runs/sft-*/meta.json")]
    longer = [run for run in runs if run["experiment"] == "longer"]
    stopped = "progress is kept" in "".join(text for line, text in tour.printed if "press Ctrl-C" in line)
    assert [run["resumed"] for run in longer] == [int(stopped)]  # one run, continued
    assert "sft" in tour.output("athanor slots")


@after("Share")
def _(tour: Tour) -> None:
    store = tour.here.parent / "athanor-store" / "files" / "md5"
    lock = tour.clone.run("git", "show", "lower-lr-branch:dvc.lock").stdout
    tuned = re.search(r"path: models/sft\n +hash: md5\n +md5: (..)(\S+)", lock)
    assert tuned and (store / tuned[1] / tuned[2]).is_file()  # with a relative path DVC took it to /athanor-store
    assert "lower-lr" in tour.clone.dvc("exp", "list", "share", "--all-commits").stdout


@after("On another machine")
def _(tour: Tour) -> None:
    assert tour.here.name == "athanor-2"
    said = tour.output("dvc exp run --pull --allow-missing")
    assert set(re.findall(r"Running stage '([\w-]+)'", said)) == {"eval"}
    assert "lower-lr" in tour.output("dvc exp list")
    assert tour.param("sft", "lr") == 0.001  # the experiment was applied, with its model
    assert "up to date" in tour.clone.dvc("status").stdout
    assert not (tour.here / ".athanor" / "slots").exists()  # nothing was trained here


@after("Clean up")
def _(tour: Tour) -> None:
    assert tour.here == tour.start
    assert re.search(r"[1-9]\d* objects", tour.output("dvc gc")), tour.output("dvc gc")
    for name in ("grid-1", "longer"):  # what the flags say is kept, is
        tour.clone.dvc("exp", "apply", name)
        tour.clone.dvc("status", "-q", "sft", "eval")
    tour.clone.run("git", "checkout", "-q", "--force", "main")
    tour.clone.dvc("checkout", "-q", "--force")
    tour.clone.dvc("status", "-q")


@pytest.fixture(scope="module")
def start(micro: Clone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as `make repro` leaves it: outputs made, nothing of them committed, no remote."""
    home = tmp_path_factory.mktemp("tour") / "athanor"
    clone = Clone(home)
    micro.run("git", "clone", "-q", "--single-branch", "--branch", "main", str(micro.path), str(home))
    shutil.copytree(micro.path / ".dvc" / "cache", home / ".dvc" / "cache")
    clone.run("git", "remote", "remove", "origin")
    clone.dvc("checkout", "-q")
    first = clone.run("git", "rev-list", "--max-parents=0", "HEAD").stdout.strip()
    clone.run("git", "reset", "-q", "--mixed", first)
    return home


def test_every_heading_with_commands_has_a_check():
    assert list(dict.fromkeys(heading for heading, _ in commands())) == list(CHECKS)


def test_the_tour(start, monkeypatch):
    """On a machine where Git does not know its user."""
    monkeypatch.setenv("HOME", str(start.parent / "home"))
    (start.parent / "home").mkdir()
    tour, todo = Tour(start), commands()
    for number, (heading, command) in enumerate(todo):
        tour.run(command)
        if number + 1 == len(todo) or todo[number + 1][0] != heading:
            CHECKS[heading](tour)
