"""`athanor repro`: signals, a foreign base, and stages that die; and side stages. Real DVC."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.strict import read_yaml
from athanor.cli import repro
from athanor.runtime import lifetime, presets
from tests.cli import toy_pipeline
from tests.e2e.clone import ROOT, Clone, environment
from tests.runtime.toy_pipeline import SAVE_EVERY, STEPS, Toy, gone, place_stages, until

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"PYTHONPATH": str(ROOT), "ATHANOR_TRACKING": "off"}
REPRO = (sys.executable, "-m", "athanor", "repro")
STAGE = """
import time
from athanor.base.errors import Interrupted
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run

def run(run: Run) -> None:
    with run.slot({"lr": 1}, {}) as slot:
        (slot.path / "started").touch()
        while not run.stop_requested():
            time.sleep(0.05)
        time.sleep(1.5)  # saving takes a while
        (slot.path / "saved").touch()
        raise Interrupted("stopped, checkpoint saved")

if __name__ == "__main__":
    stage_main("toy", run)
"""


def test_dvc_goes_on_and_records_the_stage_when_repro_is_killed_on_a_terminal(tmp_path):
    """Found with a view that read DVC's output through a pipe: killed, it took DVC with it."""
    graph = "stages:\n  slow:\n    cmd: python slow.py\n    outs: [o]\n"
    place_stages(tmp_path, graph)
    (tmp_path / "slow.py").write_text(
        "import time\nopen('started', 'w')\ntime.sleep(3)\nprint('end')\nopen('o', 'w').write('1')\n"
    )
    env = environment(**QUIET, TERM="xterm")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, env=env, check=True)
    ours, theirs = pty.openpty()
    child = subprocess.Popen(REPRO, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    until(lambda: (tmp_path / "started").exists(), "the stage runs")
    child.kill()
    child.wait()
    os.close(theirs)
    until(lambda: (tmp_path / "dvc.lock").exists(), "DVC has recorded the stage")
    os.close(ours)
    assert (tmp_path / ".athanor/repro.log").read_text().count("end\n")  # the view was there
    assert "slow" in read_yaml(tmp_path / "dvc.lock")["stages"]


def test_an_interrupt_of_the_whole_group_lets_the_stage_save(tmp_path):
    """The wrapper once died of the signal before dvc and the stage; in a container that killed both in mid-save."""
    graph = "stages:\n  toy:\n    cmd: python -m stages.toy\n    deps: [stages/toy.py]\n    outs: [o]\n"
    place_stages(tmp_path, graph, toy=STAGE)
    env = environment(**QUIET)
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, env=env, check=True)
    child = subprocess.Popen(
        REPRO,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".athanor/slots/toy/*/started")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=90)
    assert child.returncode not in (0, -signal.SIGINT) and "Traceback" not in output, output
    assert list(tmp_path.glob(".athanor/slots/toy/*/saved")) and "stopped, checkpoint saved" in output
    end = json.loads(next(tmp_path.glob(".athanor/runs/*/end.json")).read_text())
    assert end["status"] == "KILLED"
    assert "Stopped on request. The same command goes on from there" in output and "did not finish" not in output


def test_stop_reaches_the_pipeline_in_a_stage_that_does_not_look(tmp_path):
    """It once said "no stage runs here" for all the short stages before training."""
    short = 'import os, time\nopen("o", "w").write("1")\nwhile not os.path.exists("go"):\n    time.sleep(0.05)\n'
    graph = "stages:\n  short:\n    cmd: python short.py\n    outs: [o]\n  toy:\n    cmd: python -m stages.toy\n"
    place_stages(tmp_path, f"{graph}    deps: [o]\n    outs: [p]\n", toy=STAGE)
    (tmp_path / "short.py").write_text(short)
    env = environment(**QUIET)
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=tmp_path, env=env, check=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(REPRO, cwd=tmp_path, env=env, **pipes)
    until((tmp_path / "o").exists, "the short stage runs")
    stopping = subprocess.Popen([*REPRO[:-1], "stop"], cwd=tmp_path, env=env, **pipes)
    until((tmp_path / ".athanor/STOP").exists, "the command has asked")
    (tmp_path / "go").touch()
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 75 and "stopped, checkpoint saved" in said, said
    told, _ = stopping.communicate(timeout=120)
    assert stopping.returncode == 0 and "toy (process" in told and "stopped, checkpoint saved" in told, told
    assert not (tmp_path / ".athanor/STOP").exists()


def test_a_failed_run_ends_with_its_error_and_shows_nothing_of_older_runs(toy):
    """The error once stood above 35 lines of the last run's scores and "Chat make serve"."""
    done = toy.run(*REPRO)
    assert "Stages" in done.stdout and "count" in done.stdout
    stage, params = toy.path / "stages/report.py", toy.path / "params.yaml"
    planted = '    from athanor.base.errors import InputError\n    raise InputError("no words", fix="write some")\n'
    stage.write_text(stage.read_text().replace('    say("report"', f'{planted}    say("report"'))
    params.write_text(re.sub(r"(?m)(^sft:\n(?:  .*\n)*?  seed: )\d+", r"\g<1>77", params.read_text()))
    done = toy.run(*REPRO, check=False)
    assert done.returncode not in (0, 75) and "Stages" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "report: no words. Fix: write some", done.stderr
    assert "Finished in this run: count\n" in done.stderr


WRITES = 'printf "%s: %s\\n" "$ATHANOR_EVENT" "$ATHANOR_TEXT" >> told'


def told_by(toy: Toy) -> str:
    """What `notify` was told by an `athanor repro` that fails."""
    (toy.path / "machine.yaml").write_text(json.dumps({"notify": WRITES}))
    assert toy.run(*REPRO, check=False).returncode not in (0, 75)
    return (toy.path / "told").read_text()


def test_a_failure_of_dvc_alone_is_told_elsewhere(toy):
    graph = toy.path / "dvc.yaml"
    graph.write_text(graph.read_text().replace("stages:\n", "stages:\n  lost:\n    cmd: 'true'\n    deps: [nowhere]\n"))
    said = told_by(toy)
    assert said.startswith("failed: dvc repro in ") and said.count("failed: ") == 1, said
    assert "and no stage says why.\n" in said


def test_a_stage_that_is_refused_before_its_run_is_told_once(toy):
    stage = toy.path / "stages/count.py"
    text = stage.read_text()
    planted = "from athanor.base.errors import InputError\nfrom athanor.runtime import process\n"
    planted += (
        "def refuse():\n    raise InputError('no such machine', fix='mend it')\nprocess._refuse_troubles = refuse\n"
    )
    stage.write_text(
        text.replace("if __name__", f"{planted}if __name__").replace(
            'main("count", ', 'main("count", several=True, body='
        )
    )
    said = told_by(toy)
    assert said == "failed: count: no such machine. Fix: mend it\n", said


def test_a_slip_in_params_is_told_before_dvc_deletes_anything(tmp_path):
    """DVC removes a stage's outputs and only then starts it, so the stage's own check came too late for them."""
    text = presets.complete(ROOT / "presets" / "micro.yaml")
    (tmp_path / "params.yaml").write_text(text.replace("\npretrain:\n", "\npretrain:\n  learning_rat: 1\n"))
    done = Clone(tmp_path).run(*REPRO, check=False, **QUIET)
    assert done.returncode == 1 and "pretrain.learning_rat: unknown key" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]


# -- a foreign base --------------------------------------------------------------------------------------------------

HELD = """
import pathlib, time
pathlib.Path("at_work").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def tuning(tmp_path) -> Clone:
    """A checkout with a base of another model, and a graph of the real stages' names that only copies files."""
    values = presets.values(ROOT / "presets" / "micro.yaml")
    values["side"]["base"] = "theirs"
    YAML().dump(values, tmp_path / "params.yaml")
    for name in ("theirs", "side"):
        (tmp_path / name).mkdir()
    (tmp_path / "theirs/config.json").write_text("{}")
    (tmp_path / "theirs/model.safetensors").write_text("weights")
    (tmp_path / "source").write_text("s")
    (tmp_path / "tune.json").write_text(json.dumps({"steps": 2, "before": {"val_loss": 3}, "after": {"val_loss": 2}}))

    def stages(*rows: tuple[str, str, str]) -> dict[str, dict[str, object]]:
        return {name: {"cmd": f"cp -r {dep} {out}", "deps": [dep], "outs": [out]} for name, dep, out in rows}

    tuned = stages(("tune-data", "raw", "rows"), ("tune", "rows", "tuned"), ("tune-export", "tuned", "out"))
    tuned["tune"] |= {"cmd": "mkdir -p metrics; cp tune.json metrics; cp rows tuned"}
    tuned["tune"]["deps"] = ["rows", "side.base"]
    graph = {"stages": {name: {"wdir": "..", **stage} for name, stage in tuned.items()}}
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": stages(("download", "source", "raw"))}))
    YAML().dump(graph, tmp_path / "side/tune.yaml")
    clone = Clone(tmp_path)
    clone.run("git", "init", "-q")
    clone.dvc("init", "-q")
    return clone


def ran(clone: Clone, *words: str) -> list[str]:
    said = clone.run(sys.executable, "-m", "athanor", "side", "tune", *words, **QUIET).stdout
    assert not (clone.path / "side/dvc.yaml").exists()
    return [name.removeprefix("side/dvc.yaml:") for name in re.findall(r"Running stage '([^']+)'", said)]


def test_a_side_graph_runs_what_its_base_and_what_is_before_it_changed(tuning):
    assert ran(tuning) == ["download", "tune-data", "tune", "tune-export"]
    assert ran(tuning) == []
    (tuning.path / "theirs/model.safetensors").write_text("others")
    assert ran(tuning) == ["tune"]  # its bytes come out equal
    assert ran(tuning, "--force") == ["tune"]
    (tuning.path / "theirs/config.json").unlink()
    done = tuning.run(sys.executable, "-m", "athanor", "side", "tune", check=False, **QUIET)
    assert done.returncode == 1 and "side.base: theirs" in done.stderr


def test_a_sigterm_leaves_no_side_graph_behind(tuning):
    """`dvc status` and plain `dvc repro` read a graph that is left lying there."""
    (tuning.path / "held.py").write_text(HELD)
    path = tuning.path / "side/tune.yaml"
    path.write_text(path.read_text().replace("mkdir -p metrics;", "python held.py;"))
    command = [sys.executable, "-m", "athanor", "side", "tune"]
    child = subprocess.Popen(command, cwd=tuning.path, env=environment(**QUIET), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tuning.path / "at_work").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert (tuning.path / "side/dvc.yaml").exists()
        child.terminate()
        assert child.wait(60) != 0 and not (tuning.path / "side/dvc.yaml").exists()
    finally:
        (tuning.path / "end").touch()


# -- --supervise: what died is started again, three times at most; what said why it ended is not --------------------------

HOLD = 6


def kill_held(toy: Toy, number: int) -> None:
    stage = toy.wait_held()
    toy.forget_held()
    os.kill(stage, number)
    until(lambda: gone(stage), "the stage has ended", toy)


def test_a_stage_that_dies_is_started_again_three_times_at_most(toy):
    toy.hold(HOLD)
    job = toy.repro("--supervise")
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL):
        kill_held(toy, number)
    assert job.wait() not in (0, 75) and len(toy.trainers()) == 4
    said = job.text()
    assert [f"starts it again, {n} of 3" in said for n in (1, 2, 3, 4)] == [True, True, True, False], said
    assert "count was killed and could say nothing" in said and "Fix: close other programs, or in machine.yaml" in said
    assert (
        "count died: Fatal Python error: Segmentation fault" in said
        and "count died: Fatal Python error: Bus error" in said
    )
    assert said.splitlines()[-1].startswith("count was killed")

    job = toy.repro("--supervise")
    kill_held(toy, signal.SIGKILL)
    toy.release()
    assert job.wait() == 0 and toy.lock_has("count", "report"), job.text()
    assert job.text().count("count was killed and could say nothing") == 2  # when it died, and at the end
    assert toy.steps()[-STEPS + SAVE_EVERY :] == list(range(SAVE_EVERY, STEPS))  # from the last checkpoint


def test_without_it_a_death_is_explained_once_and_nothing_is_started(toy):
    toy.hold(HOLD)
    job = toy.repro()
    kill_held(toy, signal.SIGKILL)
    assert job.wait() not in (0, 75) and len(toy.trainers()) == 1
    assert job.text().count("count was killed and could say nothing") == 1
    assert "GiB" in job.text() and "the message of the stage is above" not in job.text()


def test_what_a_person_stops_stays_stopped(toy):
    toy.hold(HOLD)
    job = toy.repro("--supervise")
    toy.wait_held()
    job.kill_group(signal.SIGINT)
    assert job.wait() == 75 and len(toy.trainers()) == 1 and "starts it again" not in job.text(), job.text()


@pytest.mark.parametrize(
    ("left", "asked", "calls", "told"),
    [
        ("999999999\n", [], 4, "could say nothing"),
        ("999999999\nTypeError('x')", [], 4, "toy died: TypeError('x')"),
        ("", [], 1, ""),  # the stage has told why: a refused parameter, a gate, a request to stop
        ("999999999\n", [signal.SIGTERM], 1, "could say nothing"),
        (f"{os.getpid()}\n", [], 1, ""),  # locked by one that lives
    ],
    ids=["killed", "crashed", "told", "asked", "alive"],
)
def test_which_ends_are_worth_another_start(tmp_path, capfd, left, asked, calls, told):
    path, made = tmp_path / lifetime.FOLDER / "toy", []
    path.parent.mkdir(parents=True)

    def call() -> int:
        made.append(1)
        path.write_text(left)
        return 255

    with open(tmp_path / "other", "w") if left != f"{os.getpid()}\n" else open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, deaths = repro.supervise(tmp_path, call, asked, repro.RESTARTS)
    assert status == 255 and len(made) == calls
    assert len(deaths) == (calls if told else 0) and all(told in text for text in deaths)


def test_dvc_that_is_killed_itself_is_started_again(tmp_path):
    ends = iter((-9, 0))
    assert repro.supervise(tmp_path, lambda: next(ends), [], 3) == (0, ["dvc itself was killed (signal 9, Killed)"])


# -- a side stage: what `--force` runs and what it leaves alone ---------------------------------------------------------

CALL = "import sys; from pathlib import Path; from athanor.cli import side; "
CALL += "sys.exit(side.repro(Path.cwd(), Path('probes/x.yaml'), 'x', 'force' in sys.argv))"


def test_force_runs_nothing_upstream(tmp_path):
    """`dvc repro --force` forces all that a stage depends on: hours, and requests that are paid for again."""
    root = toy_pipeline.make(tmp_path / "toy")
    (root / "probes").mkdir()
    side = {"wdir": "..", "cmd": "cp b/part.txt x", "deps": ["b"], "outs": ["x"]}
    (root / "probes/x.yaml").write_text(json.dumps({"stages": {"x": side}}))

    def ran(*words: str) -> list[str]:
        done = Clone(root).run(sys.executable, "-c", CALL, *words, PYTHONPATH=str(ROOT), ATHANOR_TRACKING="off")
        assert not (root / "probes/dvc.yaml").exists()
        return re.findall(r"Running stage '([^']+)'", done.stdout)

    mine = "probes/dvc.yaml:x"
    assert ran() == ["a", "b", mine] and ran() == []
    assert ran("force") == [mine]
    # What it depends on is brought up to date all the same.
    (root / "params.yaml").write_text(json.dumps(toy_pipeline.PARAMS | {"a": {"value": 2, "fold": 10, "more": []}}))
    assert ran("force") == ["a", "b", mine]
