"""`athanor repro --supervise`: what died is started again, three times at most; what said why it ended is not. Real DVC."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest

from athanor.cli import repro
from athanor.runtime import lifetime
from tests.runtime.toy_pipeline import SAVE_EVERY, STEPS, Toy, gone, until

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
    assert "did not finish: how a stage died is above" in said

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
