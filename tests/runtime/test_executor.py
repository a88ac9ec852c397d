"""Work on shards in processes: the same bytes in every way, nothing lost, nothing left running."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import athanor
from athanor.base.errors import GateError, InputError, Interrupted, ParamsError
from athanor.runtime.executor import KILLS, Call, Executor, from_machine, name_of, run_call, run_task
from athanor.runtime.machine import machine
from tests.runtime.shard_toy import ROOT, ShardToy, alive, done, until
from tests.runtime.toy_work import SHARDS, NumbersOfNames, began, contents, score, where_am_i


@pytest.fixture
def toy(raw_shards: tuple[Path, dict[str, str]], tmp_path: Path) -> ShardToy:
    (tmp_path / "control").mkdir()
    return ShardToy(raw_shards[0], tmp_path / "control", tmp_path, raw_shards[1])


# -- the same bytes ---------------------------------------------------------------


def test_one_process_two_processes_and_shuffled_tasks_give_the_same_bytes(toy: ShardToy) -> None:
    advanced: list[int] = []
    two = Executor(2, advanced.append)
    tasks = toy.tasks()
    facts = two(score, tasks, toy.tmp / "two", sizes=dict.fromkeys(tasks, 10))
    assert advanced == [10] * SHARDS and list(facts) == list(tasks)
    shuffled = list(tasks.items())
    random.Random(1).shuffle(shuffled)
    assert two(score, dict(shuffled), toy.tmp / "shuffled") == facts
    assert list(two(score, dict(shuffled), toy.tmp / "shuffled")) == [name for name, _ in shuffled]
    assert contents(toy.tmp / "two") == contents(toy.tmp / "shuffled") == toy.serial
    assert sum(map(len, began(toy.control).values())) == 2 * SHARDS, "a done task was done again"


def test_what_another_process_has_finished_meanwhile_stands(toy: ShardToy) -> None:
    """A worker that outlived its coordinator may do the same shard as the next run."""
    name, task = next(iter(toy.tasks().items()))

    def twin(_: Any, out: Path) -> dict[str, Any]:
        run_task(score, name, task, toy.tmp / "out")
        raise OSError("swept away by the other")

    first = run_task(twin, name, task, toy.tmp / "out")
    assert first == run_task(twin, name, task, toy.tmp / "out")  # would raise another time, were it begun
    assert len(began(toy.control)["00000"]) == 1
    with pytest.raises(OSError, match="full"):
        run_task(no_room, "other", None, toy.tmp / "out")


def large_facts(task: int, out: Path) -> dict[str, Any]:
    return {"task": task, "text": "x" * 4000}


def test_the_coordinator_holds_names_and_neither_tasks_nor_facts(tmp_path: Path) -> None:
    """160 bytes of memory for each further task, of which the test's list of names has none."""
    peaks = {}
    for count in (100, 1000):
        names = [f"source-{number % 3}/{number:05d}" for number in range(count)]
        tasks, advanced = NumbersOfNames(names), 0

        def advance(size: int) -> None:
            nonlocal advanced
            advanced += size

        tracemalloc.start()
        facts = Executor(1, advance)(large_facts, tasks, tmp_path / str(count), sizes=tasks)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert tasks.made == 2 * count and advanced == sum(range(count)), "a task, or a size, was made twice"
        assert [found["task"] for found in facts.values()] == list(range(count))
    assert (peaks[1000] - peaks[100]) / 900 < 160, peaks
    with pytest.raises(KeyError):
        facts["source-0/99999"]
    again = Executor(1, resumed=lambda size: advance(-size))(large_facts, tasks, tmp_path / "1000", sizes=tasks)
    assert advanced == 0 and again == facts


def no_room(task: Any, out: Path) -> dict[str, Any]:
    raise OSError(28, "full")


def test_workers_run_the_code_of_this_folder_with_one_thread(toy: ShardToy, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"a": None, "b": None}
    found = Executor(2)(where_am_i, tasks, toy.tmp / "here")
    assert found["a"]["pid"] != os.getpid()
    assert found["a"]["code"] == athanor.__file__ and found["a"]["threads"] == ["1", "1", "1"]
    (toy.tmp / "elsewhere").mkdir()
    monkeypatch.chdir(toy.tmp / "elsewhere")  # of the same workers, as an executor lives on
    assert Executor(2)(where_am_i, tasks, toy.tmp / "there")["b"]["cwd"] == str(toy.tmp / "elsewhere")


def test_an_experiment_in_another_checkout_runs_its_own_code(tmp_path: Path) -> None:
    """DVC runs experiments in temporary copies: their workers must not import the main checkout."""
    copy = tmp_path / "copy"
    (copy / "tests" / "runtime").mkdir(parents=True)
    (copy / "athanor").symlink_to(ROOT / "athanor")  # its __file__ names the copy all the same
    (copy / "tests/runtime/toy_work.py").symlink_to(ROOT / "tests/runtime/toy_work.py")
    code = (
        "from pathlib import Path; from athanor.runtime.executor import Executor;"
        "from tests.runtime.toy_work import where_am_i;"
        "print(Executor(2)(where_am_i, {'a': 1, 'b': 2}, Path('out'))['a']['code'])"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=copy, text=True, capture_output=True, check=True)
    assert told.stdout.strip() == str(copy / "athanor" / "__init__.py")


# -- stopped ------------------------------------------------------------------------


@pytest.fixture
def held(toy: ShardToy) -> Iterator[tuple[ShardToy, subprocess.Popen[str], list[int]]]:
    """A coordinator whose two workers hang in shards 2 and 3, with the first two done."""
    toy.order("hold", *range(2, SHARDS))
    job = toy.start(toy.tmp / "out")
    workers: list[int] = []
    try:
        until(lambda: done(toy.tmp / "out") == 2 and len(began(toy.control)) == 4, "two done, two held")
        workers += [pid for shard in ("00002", "00003") for pid in began(toy.control)[shard]]
        assert len(set(workers)) == 2 and alive(workers) == workers
        yield toy, job, workers
    finally:
        for pid in [*workers, job.pid]:
            if alive([pid]):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def resume(toy: ShardToy) -> None:
    toy.withdraw("hold")
    Executor(2)(score, toy.tasks(), toy.tmp / "out")
    assert contents(toy.tmp / "out") == toy.serial
    times = {shard: len(pids) for shard, pids in began(toy.control).items()}
    assert times == {f"{n:05d}": 2 if n in (2, 3) else 1 for n in range(SHARDS)}, "only what was cut short is repeated"


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, True), (signal.SIGTERM, True)],
)
def test_a_signal_stops_in_the_middle_of_a_shard(held: Any, number: int, group: bool) -> None:
    toy, job, workers = held
    os.killpg(job.pid, number) if group else os.kill(job.pid, number)
    assert job.wait(60) == 75
    assert job.stderr.read() == "Interrupted: stopped after 2 of 8 shards (toy); run again to continue\n"
    assert alive(workers) == []
    resume(toy)


def test_workers_end_with_a_killed_coordinator(held: Any) -> None:
    toy, job, workers = held
    job.kill()
    job.wait()
    until(lambda: not alive(workers), "the orphans have ended", 30)
    assert list(toy.tmp.glob("out/toy/.*.tmp")), "nothing was cut short: the test tests nothing"
    resume(toy)


def test_stop_is_asked_before_a_later_task_in_one_process(toy: ShardToy) -> None:
    asked: list[int] = []
    with pytest.raises(Interrupted, match="stopped after 3 of 8 shards"):
        Executor(1, stop=lambda: len(asked) >= 3, advance=asked.append)(score, toy.tasks(), toy.tmp / "out")
    assert done(toy.tmp / "out") == 3


# -- killed workers -----------------------------------------------------------------


def test_one_long_shard_holds_up_no_other(toy: ShardToy) -> None:
    out = toy.tmp / "out"
    toy.order("hold", 0)
    job = toy.start(out, "--workers", "2")
    try:
        until(lambda: done(out) == SHARDS - 1 or job.poll() is not None, "the other worker has done all others")
        toy.withdraw("hold")
        assert job.wait() == 0, job.stderr.read()
    finally:
        job.kill()
        job.wait()


def test_a_killed_worker_costs_its_shard_once(toy: ShardToy) -> None:
    """As the kernel does when memory runs out."""
    toy.order("hold", 2, 3)
    job = toy.start(toy.tmp / "out")
    until(lambda: {"00002", "00003"} <= set(began(toy.control)), "two are held")
    os.kill(began(toy.control)["00002"][0], signal.SIGKILL)
    until(lambda: len(began(toy.control)["00002"]) == 2, "it began again")
    toy.withdraw("hold")
    assert job.wait(120) == 0, job.stderr.read()
    assert contents(toy.tmp / "out") == toy.serial, "something is lost, or left over"


def test_a_shard_that_always_kills_its_worker_ends_in_advice(toy: ShardToy) -> None:
    toy.order("die", SHARDS - 1)
    with pytest.raises(InputError, match="worker was killed 3 times, probably because memory ran out.*lower `workers`"):
        Executor(2)(score, toy.tasks(), toy.tmp / "out")
    assert len(began(toy.control)[f"{SHARDS - 1:05d}"]) >= KILLS
    assert done(toy.tmp / "out") == SHARDS - 1, "what could be done is kept"
    toy.withdraw("die")
    Executor(1)(score, toy.tasks(), toy.tmp / "out")
    assert contents(toy.tmp / "out") == toy.serial


# -- errors -------------------------------------------------------------------------


def test_an_error_of_the_work_arrives_as_it_is(toy: ShardToy) -> None:
    toy.order("fail", 4)
    found = []
    for workers in (1, 2):
        with pytest.raises(GateError) as caught:
            Executor(workers)(score, toy.tasks(), toy.tmp / f"out{workers}")
        error = caught.value
        found.append((str(error), error.gate, error.what, error.where, error.fix))
        assert not (toy.tmp / f"out{workers}" / "toy" / "00004").exists()
    assert found[0] == found[1]
    assert "gate 'toy' failed: shard 00004 is bad. Fix: mend it" in found[0][0]
    assert "toy_work.py" in "".join(error.__notes__)


class Foreign(Exception):
    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(f"{text} {code}")


ERRORS: list[BaseException] = []


def fails(task: Any, out: Path) -> dict[str, Any]:
    raise ERRORS.pop()


def answer(error: BaseException, tmp_path: Path) -> Any:
    """What comes of a worker whose function raises this."""
    ERRORS.append(error)
    found = run_call(Call(str(tmp_path), name_of(fails), "a", None, str(tmp_path / "out")))
    return pickle.loads(pickle.dumps(found))


@pytest.mark.parametrize(
    "error",
    [
        GateError("g", "bad", where="w", fix="f"),
        InputError("bad"),
        ParamsError("bad", where="a.b"),
        ValueError("bad", 3),
        MemoryError("bad"),
        KeyError("bad"),
        OSError(28, "No space left on device", "/some/file"),
        FileNotFoundError(2, "No such file or directory"),
        json.JSONDecodeError("bad", "{", 1),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_whole(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    back = answer(error, tmp_path)
    assert type(back) is type(error) and str(back) == str(error) and back.args == error.args
    assert {**vars(back), "__notes__": None} == {**vars(error), "__notes__": None}
    if isinstance(error, OSError):
        assert (back.errno, back.filename) == (error.errno, error.filename)
    if not isinstance(error, json.JSONDecodeError):  # which leaves notes behind
        assert "in fails" in back.__notes__[0]


def test_an_error_that_cannot_travel_tells_its_type_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    back = answer(Foreign("bad", code=7), tmp_path)
    assert type(back) is RuntimeError and str(back) == "Foreign: bad 7" and "in fails" in back.__notes__[0]


def test_work_must_stand_in_a_module(toy: ShardToy) -> None:
    assert name_of(score) == "tests.runtime.toy_work:score"
    with pytest.raises(TypeError, match="no function at the top of a module"):
        Executor(1)(lambda task, out: {}, {"a": 1}, toy.tmp / "out")


# -- settings -----------------------------------------------------------------------


def test_settings_come_from_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for name in ("EXECUTOR", "WORKERS"):
        monkeypatch.delenv(f"ATHANOR_{name}", raising=False)
    assert from_machine(machine()).kind == "processes"
    Path("machine.yaml").write_text("executor: ray\nworkers: 7\n")
    made = from_machine(machine())
    assert (made.kind, made.workers) == ("ray", 7)
    monkeypatch.setenv("ATHANOR_EXECUTOR", "processes")
    assert from_machine(machine()).kind == "processes"
    monkeypatch.setenv("ATHANOR_EXECUTOR", "rays")
    with pytest.raises(ParamsError, match="did you mean 'ray'"):
        machine()
