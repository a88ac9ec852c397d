"""A stage as a process: exit codes, one-line errors, journal, leaf files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from athanor.cli.slots import busy
from athanor.runtime.run import Run
from athanor.runtime.terminal import say, stop_signals
from tests.runtime.toy_pipeline import place_stages
from tests.runtime.view import ROOT

TOY = """
import sys, time
from athanor.base.errors import GateError, Interrupted
from athanor.cleaning.params import CleanParams
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run

def run(run: Run) -> None:
    what = sys.argv[1]
    run.params("clean", CleanParams)
    if what == "ok":
        run.log(0, loss=1.0)
        run.fact(speed=3)
        run.metrics({"a": {"b": 1 / 3}})
        run.plot("curve", [{"x": 1, "y": 0.123456789}, {"x": 2, "y": 0.5}])
    elif what == "gate":
        raise GateError("shares", "web is 3 %", where="data/shards", fix="add web text")
    elif what == "full":
        import errno
        raise OSError(errno.ENOSPC, "No space left on device", "data/x")
    elif what == "edit":
        from pathlib import Path
        path, old, new = sys.argv[2:]
        run.metrics({"a": 1})
        text = Path(path).read_text()
        assert old in text
        Path(path).write_text(text.replace(old, new, 1))
    elif what == "limited":
        import resource
        from athanor.base.artifacts import write_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        write_bytes("data/big", bytes(1 << 21))
    elif what == "undeclared":
        run.params("sft", CleanParams)
    elif what == "slot":
        with run.slot({"lr": 1}, {"data": "abc"}) as slot:
            for step in range(200):
                run.log(step, loss=float(step))
                print("step", flush=True)
                time.sleep(0.05)
                if run.stop_requested():
                    raise Interrupted("stopped, checkpoint saved")

if __name__ == "__main__":
    stage_main("toy", run)
"""


@pytest.fixture
def repo(tmp_path):
    graph = "stages:\n  toy:\n    cmd: python -m stages.toy\n    deps: [stages/toy.py]\n    params: [clean]\n    outs: [o]\n"
    place_stages(tmp_path, graph, toy=TOY)
    return tmp_path


def env(**more):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "MLFLOW_", "ATHANOR_"))}
    return {**clean, "PYTHONPATH": str(ROOT), "ATHANOR_TRACKING": "off", **more}


def toy(repo, what):
    return subprocess.run(
        [sys.executable, "-m", "stages.toy", what], cwd=repo, env=env(), capture_output=True, text=True, timeout=60
    )


def end(repo):
    return [json.loads(path.read_text()) for path in sorted((repo / ".athanor" / "runs").glob("*/end.json"))]


def test_results_are_separate_from_facts_that_vary(repo):
    assert toy(repo, "ok").returncode == 0
    assert json.loads((repo / "metrics/toy.json").read_text()) == {"a": {"b": 0.333333}}
    assert (repo / "plots/curve.tsv").read_text() == "x\ty\n1\t0.123457\n2\t0.5\n"
    leaf = json.loads((repo / "metrics/runs/toy.json").read_text())
    assert leaf["facts"] == {"speed": 3} and leaf["seconds"] > 0
    meta = json.loads(next((repo / ".athanor" / "runs").glob("*/meta.json")).read_text())
    took = end(repo)[0]["ended_ms"] - meta["started_ms"]  # from the stage's start, though the journal opens later
    assert abs(took / 1000 - leaf["seconds"]) < 0.5
    assert end(repo)[0]["status"] == "FINISHED" and end(repo)[0]["metrics"] == {"a.b": 0.333333}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gate", "toy: data/shards: gate 'shares' failed: web is 3 %. Fix: add web text"),
        ("full", "the disk is full"),
        ("undeclared", "reads 'sft' but does not declare it"),
    ],
)
def test_failure_is_one_line_and_recorded(repo, what, message):
    done = toy(repo, what)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert end(repo)[0]["status"] == "FAILED" and not (repo / "metrics/toy.json").exists()


def test_typo_in_a_section_of_a_later_stage_fails_now(repo):
    path = repo / "params.yaml"
    path.write_text(path.read_text().replace("\npretrain:\n", "\npretrain:\n  learning_rat: 1\n"))
    done = toy(repo, "ok")
    assert done.returncode == 1 and "pretrain.learning_rat: unknown key" in done.stderr
    assert not (repo / "metrics").exists()


def test_a_write_that_meets_a_limit_names_the_file_and_leaves_nothing(repo):
    """A failed write carries no file name; the message once named the working directory, or was a traceback."""
    done = toy(repo, "limited")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "data/big: the file is larger than a limit allows" in done.stderr and "Fix:" in done.stderr
    assert not list((repo / "data").iterdir())


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        (
            "params.yaml",
            "max_line_chars: 1000,",
            "max_line_chars: 999,",
            "clean.rules.code.max_line_chars (1000 -> 999)",
        ),
        ("stages/toy.py", "run.fact(speed=3)", "run.fact(speed=4)", "stages/toy.py"),
        ("params.yaml", "epochs: ", "epochs: 1", ""),  # another stage's
        ("stages/toy.py", "import sys, time", "import sys, time  # why", ""),
    ],
)
def test_an_edit_during_the_run_is_not_recorded_as_what_made_the_results(repo, path, old, new, told):
    """DVC hashes parameters and code after the command, so it would call the edited ones up to date."""
    command = [sys.executable, "-m", "stages.toy", "edit", path, old, new]
    done = subprocess.run(command, cwd=repo, env=env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if told else 0), done.stderr
    assert [row["status"] for row in end(repo)] == ["FAILED" if told else "FINISHED"]
    assert f"{told}: edited while the stage ran" in done.stderr or not told


def test_interrupted_slot_exits_75_and_resumes_the_same_journal(repo):
    command = [sys.executable, "-m", "stages.toy", "slot"]
    child = subprocess.Popen(command, cwd=repo, env=env(), stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 75
    assert [row["status"] for row in end(repo)] == ["KILLED"]
    again = subprocess.Popen(command, cwd=repo, env=env(), stdout=subprocess.PIPE, text=True)
    for _ in range(8):
        again.stdout.readline()
    again.kill()
    again.wait()
    runs = list((repo / ".athanor" / "runs").iterdir())
    assert len(runs) == 1 and json.loads((runs[0] / "meta.json").read_text())["resumed"] == 1
    steps = [row["s"] for row in map(json.loads, (runs[0] / "journal.jsonl").read_text().splitlines()) if "m" in row]
    assert steps == sorted(set(steps)) and len(steps) >= 7


def test_a_note_before_the_slot_opens_no_journal_of_its_own(repo, monkeypatch):
    """A note on epochs once did, and the resumed training was a second run in MLflow."""
    monkeypatch.chdir(repo)
    for _ in range(2):
        run = Run("toy", "stages.toy")
        run.note("the stream is read twice")
        with run.slot({}, {}) as slot:
            run.note("in the slot")
        slot.release()  # as the end of the process does
    (made,) = (repo / ".athanor" / "runs").iterdir()
    rows = [json.loads(line) for line in (made / "journal.jsonl").read_text().splitlines()]
    told = [row["text"] for row in rows if row["event"] == "note"]
    assert told == ["the stream is read twice", "in the slot"] * 2


def test_a_line_that_nobody_can_read_is_no_error(monkeypatch):
    class Stream:
        def __init__(self, error):
            self.error = error

        def write(self, text):
            raise self.error

    for error in (
        OSError(errno.ENOSPC, "full"),
        ValueError("I/O operation on closed file"),
        RuntimeError("reentrant call"),
    ):
        monkeypatch.setattr(sys, "stderr", Stream(error))
        say("a line")


def test_a_closed_terminal_counts_for_nothing_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        for how, counts in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, how)
            assert (signal.SIGHUP in stop_signals()) is counts
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_kill_before_the_journal_is_open_leaves_no_second_run(repo, monkeypatch):
    """The slot names its run first; once the run was made first, and a kill in between left an empty one."""
    monkeypatch.chdir(repo)
    first = Run("toy", "stages.toy")
    monkeypatch.setattr(first, "_open_journal", lambda name: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), first.slot({}, {}):
        pass
    assert not list((repo / ".athanor").glob("runs/*"))
    second = Run("toy", "stages.toy")
    with second.slot({}, {}):
        pass
    (made,) = (repo / ".athanor" / "runs").iterdir()
    assert made.name == first._run_id and json.loads((made / "meta.json").read_text())["resumed"] == 0


def test_a_run_that_was_killed_after_done_is_continued_and_a_finished_one_is_not(repo, monkeypatch):
    monkeypatch.chdir(repo)
    folders = []
    for finish in (False, True, True):
        run = Run("toy", "stages.toy")
        with run.slot({}, {}) as slot:
            slot.mark_done()
        if finish:
            run.finish()
        else:
            slot.release()  # as the end of the process does
        folders.append(run.journal.folder.name)
    assert folders[0] == folders[1] != folders[2]


def test_the_slot_stays_locked_until_the_run_has_ended(repo, monkeypatch):
    """A process that waited for the slot once found the journal open and wrote it together with its owner."""
    monkeypatch.chdir(repo)
    for end in (Run.finish, lambda run: run.fail("FAILED", "no")):
        run = Run("toy", "stages.toy")
        with run.slot({}, {}) as slot:
            pass
        assert busy(slot.path)
        end(run)
        assert not busy(slot.path)


def test_a_parameter_section_and_an_input_of_one_name_do_not_hide_each_other(repo, monkeypatch):
    """An sft run with another learning rate once got the slot of the first, because an input was called sft, too."""
    monkeypatch.chdir(repo)
    run = Run("toy", "stages.toy")
    prints = {
        run.slot(params, inputs).fingerprint
        for params, inputs in (({"sft": 1}, {"sft": "a"}), ({"sft": 2}, {"sft": "a"}), ({"sft": 1}, {"sft": "b"}))
    }
    assert len(prints) == 3


def test_importing_stages_does_nothing(tmp_path):
    names = sorted(path.stem for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__")
    code = "".join(f"import stages.{name}\n" for name in names)
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir())
    assert names and time.monotonic() - started < 60
