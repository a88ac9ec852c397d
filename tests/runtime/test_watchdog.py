"""Hanging and slow stages: who is told, with which stacks, and who is left alone. Real processes; about 25 s."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from athanor.runtime.watchdog import GRACE, MIN_HANG_SECONDS, Watch
from tests.runtime.guarded_stage import PATIENCE, ROOT, Place, ended, until


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def test_a_training_that_hangs_is_dumped_and_ended(place):
    child = place.start({"train": True, "9": "stuck_loader"}, ATHANOR_HANG_SECONDS="1", ATHANOR_SAVE_EVERY_SECONDS="1")
    code, said = ended(child)
    assert code == 75, said
    (stacks,) = place.stacks().values()
    assert "stuck_loader" in stacks and "in learn" in stacks and "no sign of life for" in stacks, stacks
    (event,) = place.events("hang")
    assert event["stacks"].endswith("stacks.rank0.txt") and Path(event["stacks"]).is_file()
    assert event["phase"] == "training"
    assert event["stacks"] in said and "the same command goes on from the last checkpoint" in said
    end = json.loads(next(place.state.glob("runs/*/end.json")).read_text())
    assert end["status"] == "KILLED" and "no sign of life" in end["error"]
    lasted = re.search(r"for ([\d.]+) s", end["error"])
    assert event["seconds"] >= 1 and lasted and float(lasted[1]) >= 2, end["error"]
    assert place.log(child)[-1] == 9 and not (place.path / "out.bin").exists()


def test_what_takes_long_for_a_reason_raises_no_alarm(place):
    """The first steps, a validation, and a checkpoint that is being written."""
    plan = {"seconds": 1.7, "1": "sleeps", "3": "sleeps", "validate_at": 5, "8": "writes"}
    code, said = place.run(plan, ATHANOR_HANG_SECONDS="1")
    assert code == 0 and place.events("hang") == [] and place.stacks() == {}, said


def test_a_step_that_ends_after_the_alarm_goes_on(place):
    code, said = place.run({"seconds": 3.0, "6": "sleeps"}, ATHANOR_HANG_SECONDS="2")
    assert code == 0 and "it goes on" in said, said
    assert [("stacks" in row) for row in place.events("hang")] == [True, False]
    (stacks,) = place.stacks().values()
    assert "in before" in stacks


def test_a_stopped_process_does_not_hang(place):
    """Ctrl-Z, a suspended machine: the clock went on, but nobody had the chance to take a step."""
    place.hold(6)
    child = place.start({}, ATHANOR_HANG_SECONDS="3")
    place.wait_held(child)
    time.sleep(0.8)  # the watchdog has looked at this step, too
    child.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    child.send_signal(signal.SIGCONT)
    place.release()  # after two looks of the watchdog
    code, said = ended(child)
    assert code == 0 and place.events("hang") == [], said


def test_zero_never_looks(place):
    for seconds, watched in (("-1", True), ("0", False)):
        code, said = place.run({"name": seconds, "6": "tells_threads"}, ATHANOR_HANG_SECONDS=seconds)
        assert code == 0 and ("watchdog" in (place.control / "threads").read_text()) == watched, said


def test_stacks_are_dumped_though_something_holds_pythons_lock(place):
    code, said = place.run({"seconds": 3, "5": "pauses", "6": "holds_the_lock"}, ATHANOR_HANG_SECONDS="1")
    (stacks,) = place.stacks().values()
    assert code == 0 and "Timeout" in stacks and "in holds_the_lock" in stacks, said


def test_all_ranks_dump_when_one_hangs(place):
    """Two processes of one launcher; the other one still takes part when it is asked for its stacks."""
    ranks = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "ATHANOR_HANG_SECONDS": "1"}
    place.hold(5)
    other = place.start({"6": "waits_until_over"}, RANK="1", **{**ranks, "ATHANOR_HANG_SECONDS": "0"})
    place.wait_held(other)
    hangs = place.start({"6": "stuck_loader"}, RANK="0", **ranks)
    place.wait_held(hangs)  # it has the slot, and a journal for the stacks of both
    place.release()
    assert ended(hangs)[0] == 75
    (place.control / "over").touch()
    stacks = place.stacks()
    assert ended(other)[0] == 0 and sorted(stacks) == ["stacks.rank0.txt", "stacks.rank1.txt"]
    assert "stuck_loader" in stacks["stacks.rank0.txt"] and "in waits_until_over" in stacks["stacks.rank1.txt"]


HELPER = """
import os, signal, sys, time
from pathlib import Path
from athanor.runtime.watchdog import Watch

def helps():
    os.kill(os.getpid(), signal.SIGUSR2)
    while not ended:
        time.sleep(0.05)

said, ended = [], []
watch = Watch(0.2, [Path(sys.argv[1])], lambda text, facts: (said.append(text), ended.append(text)), None)
watch.begin()
for _ in range(4):
    watch.step()
    time.sleep(0.05)
helps()
time.sleep(0.5)  # longer than twice the wait: it is not ended
print(said)
"""


def test_a_process_that_only_helps_dumps_beside_the_main_one_and_is_not_ended(tmp_path):
    slot, run = tmp_path / "slots" / "toy" / "x", tmp_path / "runs" / "toy-1-1"
    slot.mkdir(parents=True), run.mkdir(parents=True)
    (slot / "run.json").write_text('{"run": "toy-1-1"}')
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"}
    done = subprocess.run(
        [sys.executable, "-c", HELPER, str(slot)], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0 and "no sign of life" in done.stdout and "it ends" not in done.stdout, done.stderr
    stacks = (run / "stacks.rank3.txt").read_text()
    assert stacks.count("in helps") >= 2 and not (run / "heartbeat.json").exists()  # asked for, and by the alarm


def test_a_signal_dumps_the_stacks_of_any_stage_that_goes_on(place):
    place.hold(1)
    child = place.start()
    place.wait_held(child)
    child.send_signal(signal.SIGUSR2)
    until(lambda: "in before" in "".join(place.stacks().values()), "the stacks are there", child)
    (place.control / "hold").unlink()
    assert ended(child)[0] == 0


def test_the_heartbeat_says_where_a_run_is_and_goes_with_it(place):
    place.hold(2)
    child = place.start()
    place.wait_held(child)
    (path,) = place.state.glob("runs/*/heartbeat.json")
    told = json.loads(path.read_text())
    assert told["pid"] == child.pid and told["step"] == 1 and abs(told["time_ms"] / 1000 - time.time()) < 60
    (place.control / "hold").unlink()
    assert ended(child)[0] == 0 and not path.exists()


def test_how_long_it_waits_by_itself():
    """Ten usual steps, five minutes at least; an hour while kernels compile or something slow is known to run."""
    watch = Watch(-1, [], lambda text, facts: None, lambda text: None)
    watch.phase = "training"
    watch._steps.extend([100.0])
    assert watch.allowed() == GRACE
    watch._steps.extend([0.1] * 5)
    assert watch.allowed() == MIN_HANG_SECONDS == 300
    watch._steps.extend([40.0] * 20)
    assert watch.allowed() == 400
    watch.phase = "validation"
    assert watch.allowed() == GRACE
    watch._longest["validation"] = 1000.0
    assert watch.allowed() == 10_000
