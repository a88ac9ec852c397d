"""When things die: real signals at real DVC commands, and what the next command makes of it.

The table in docs/outages.md names these tests, row by row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from athanor.base.errors import InputError
from athanor.runtime import dvc_lock
from athanor.runtime.locks import try_lock
from tests.runtime.toy_pipeline import SAVE_EVERY, STEPS, Toy, end, gone, until

HOLD = 6  # between two checkpoints
ALL = list(range(STEPS))
AGAIN_FROM_CHECKPOINT = ALL[:HOLD] + ALL[HOLD - HOLD % SAVE_EVERY :]


def kinds(toy: Toy, *words: str) -> list[str]:
    """What doctor finds; notes say that nothing is wrong and do not count."""
    return [finding["kind"] for finding in toy.doctor(*words)[1] if not finding["note"]]


# -- dvc repro ------------------------------------------------------------------


def mended(toy: Toy) -> list[str]:
    """What doctor --fix repairs, notes included: the entries of an ended reader harm nobody."""
    return [row["kind"] for row in toy.doctor("--fix")[1] if row["fixed"]]


@pytest.mark.parametrize(
    ("victim", "number", "saves", "cleans"),
    [
        pytest.param("group", signal.SIGINT, True, True, id="ctrl-c"),
        pytest.param("stage", signal.SIGINT, True, True, id="sigint-stage"),
        pytest.param("stage", signal.SIGTERM, True, True, id="sigterm-stage"),
        pytest.param("group", signal.SIGTERM, True, False, id="sigterm-group"),
        pytest.param("stage", signal.SIGHUP, True, True, id="sighup-stage"),
        pytest.param("group", signal.SIGHUP, True, False, id="closed-terminal"),
        pytest.param("stage", signal.SIGKILL, False, True, id="sigkill-stage"),
        pytest.param("group", signal.SIGKILL, False, False, id="sigkill-both"),
    ],
)
def test_a_killed_stage_is_resumed(toy: Toy, victim: str, number: int, saves: bool, cleans: bool) -> None:
    toy.hold(HOLD)
    job = toy.start("repro")
    stage = toy.wait_held()
    assert job.pid in toy.locked_by()
    if victim == "group":
        job.kill_group(number)
    else:
        os.kill(stage, number)
    status = job.wait()
    until(lambda: gone(stage), "the stage has ended", toy)
    # DVC outlives the signals that a stage or Ctrl-C gets, and reports; SIGTERM and SIGKILL end it at once.
    assert status == (255 if cleans else -number)
    assert toy.locked_by() == (set() if cleans else {job.pid})
    assert not toy.lock_has("count") and not (toy.path / "data" / "count").exists()
    toy.release()
    done = toy.dvc("repro")
    assert ("Auto removed it from the lock file" in done.stderr) is not cleans
    assert toy.steps() == (ALL if saves else AGAIN_FROM_CHECKPOINT) and len(toy.trainers()) == 2
    assert toy.steps("report") == [0] and toy.lock_has("count", "report")
    # DVC drops only what it stumbles over: entries for reading stay.
    assert mended(toy) == ([] if cleans else ["lock"]) and not toy.locked_by()
    assert (toy.path / "data/report/text").read_text() == f"counted 1 {sum(ALL)}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, None], ids=["sigterm-stage", "no-signal"])
def test_a_reader_that_is_gone_is_no_error(toy: Toy, number: int | None) -> None:
    """`dvc repro 2>&1 | tee log` with tee killed: what the stage says next finds nobody."""
    toy.hold(HOLD)
    job = toy.start("repro", into=subprocess.PIPE)
    stage = toy.wait_held()
    job.process.stdout.close()
    if number is not None:
        os.kill(stage, number)
        until(lambda: gone(stage), "the stage has saved and ended", toy)
    toy.release()
    job.wait()
    until(lambda: gone(stage), "the stage has ended", toy)
    ends = [json.loads(path.read_text())["status"] for path in toy.path.glob(".athanor/runs/count-*/end.json")]
    assert ends == ["FINISHED" if number is None else "KILLED"]
    assert not toy.lock_has("count")  # DVC itself does not outlive it, so the finished work is only written out again
    toy.dvc("repro")
    assert toy.steps() == ALL and toy.lock_has("count", "report")
    assert len(toy.trainers()) == (1 if number is None else 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm-dvc", "sigkill-dvc"])
def test_an_orphan_is_joined(toy: Toy, number: int) -> None:
    """A signal to dvc alone: its stage goes on, and the next repro waits for it and takes its result."""
    toy.hold(HOLD)
    job = toy.start("repro")
    stage = toy.wait_held()
    job.kill(number)
    assert job.wait() == -number and not gone(stage)
    again = toy.start("repro")
    again.wait_text(f"process {stage} is already working on this stage here")
    # Only the lock entries of the killed dvc are left over; all else is in use and stays.
    assert mended(toy) == ["lock"] and toy.locked_by() == {again.pid}
    toy.release()
    assert again.wait() == 0, again.text()
    assert toy.steps() == ALL and toy.trainers() == [stage]
    assert toy.steps("report") == [0] and toy.lock_has("count", "report")
    assert len(list(toy.path.glob(".athanor/runs/count-*"))) == 1  # one piece of work, one run
    until(lambda: gone(stage), "the orphan has ended", toy)
    assert toy.dvc("repro").stdout.count("didn't change, skipping") == 2


def orphaned(toy: Toy, edit: Callable[[], object] = lambda: None) -> str:
    """What dvc repro says that found the second stage at work without its own DVC; `edit` came before."""
    (toy.control / "hold-report").touch()
    job = toy.start("repro")
    until(lambda: toy.steps("report"), "the second stage works", toy)
    job.kill(signal.SIGKILL)
    job.wait()
    edit()
    again = toy.start("repro")
    again.wait_text("is already working on this stage here")
    (toy.control / "hold-report").unlink()
    assert again.wait() == 0, again.text()
    return again.text()


def test_an_orphan_without_a_slot_is_joined(toy: Toy) -> None:
    """Stages that keep no checkpoints once worked twice at a time, and stood twice as FINISHED."""
    assert "that process has done this very work" in orphaned(toy)
    assert toy.steps("report") == [0] and toy.lock_has("count", "report")
    assert len(list(toy.path.glob(".athanor/runs/report-*"))) == 1


def test_an_edit_behind_an_orphan_is_not_joined(toy: Toy) -> None:
    """What the orphan makes is of the code before; the next process waits for it, and does the work itself."""
    path = toy.path / "stages" / "report.py"
    orphaned(toy, lambda: path.write_text(path.read_text().replace('"counted "', '"found "')))
    assert toy.steps("report") == [0, 0] and len(toy.log()) == STEPS + 2
    assert (toy.path / "data/report/text").read_text().startswith("found")


def test_a_second_repro_is_refused_and_the_first_unharmed(toy: Toy) -> None:
    toy.hold(HOLD)
    job = toy.start("repro")
    stage = toy.wait_held()
    second = toy.dvc("repro", check=False)
    assert second.returncode == 255 and "is busy, it is being blocked by" in second.stderr
    assert f"(PID {job.pid})" in second.stderr
    assert toy.doctor() == (0, [])
    toy.release()
    assert job.wait() == 0, job.text()
    assert toy.steps() == ALL and toy.trainers() == [stage] and toy.lock_has("count", "report")


# -- dvc.lock -------------------------------------------------------------------

# DVC truncates the file and dumps into it; this leaves it in a chosen state for long enough to aim at.
SLOW_WRITE = """
import builtins, os, pathlib, time
plain, control = builtins.open, pathlib.Path(os.environ["TOY_CONTROL"])
def slow(path, mode="r", *args, **how):
    plan = control / "tear"
    if not (str(path).endswith("dvc.lock") and "w" in mode and plan.exists()):
        return plain(path, mode, *args, **how)
    before = plain(path).read() if os.path.exists(path) else ""
    file = plain(path, mode, *args, **how)
    file.write(before[: int(plan.read_text())])
    file.flush()
    (control / "torn").touch()
    time.sleep(600)
builtins.open = slow
"""


def watchers(toy: Toy) -> list[psutil.Process]:
    """The processes that wait for the end of a DVC, to mend what it has torn."""
    return [process for process in toy.processes() if "athanor.runtime.dvc_lock" in process.cmdline()]


def tear(toy: Toy, characters: int, *targets: str, watcher: bool = False) -> None:
    """SIGKILL of `dvc repro` and its stage at the moment when dvc.lock holds its first `characters` only.

    With `watcher`, of what would put the file back as well, as a power loss does it.
    """
    (toy.control / "sitecustomize.py").write_text(SLOW_WRITE)
    (toy.control / "tear").write_text(str(characters))
    job = toy.start("repro", *targets)
    until(lambda: (toy.control / "torn").exists(), "DVC is writing dvc.lock", toy)
    until(lambda: len(watchers(toy)) == 1, "one process watches, however many stages ran", toy)
    (mends,) = watchers(toy)
    if watcher:
        mends.kill()
    else:  # the same kill may tear this one
        (toy.path / ".dvc/tmp/rwlock").write_text('{"read": {"x": [{"pid"')
    job.kill_group(signal.SIGKILL)
    job.wait()
    if not watcher:
        until(
            lambda: not [*dvc_lock.torn(toy.path)] and not (toy.path / ".dvc/tmp/rwlock").exists(),
            "the files are whole again",
            toy,
        )
    (toy.control / "tear").unlink()
    (toy.control / "torn").unlink()


WRITTEN = pytest.mark.parametrize("characters", [0, len("schema: '2.0'\nstages:\n  count:\n")], ids=["empty", "torn"])


@WRITTEN
def test_dvc_repro_goes_on_after_a_kill_while_it_wrote_its_lock_file(toy: Toy, characters: int) -> None:
    toy.dvc("repro", "count")
    whole = (toy.path / "dvc.lock").read_bytes()
    tear(toy, characters)
    assert (toy.path / "dvc.lock").read_bytes() == whole
    # This DVC takes the result from its run-cache and runs no stage before it is killed, too.
    tear(toy, characters)
    assert (toy.path / "dvc.lock").read_bytes() == whole
    toy.dvc("repro")
    assert toy.steps() == ALL and toy.steps("report") == [0] and toy.lock_has("count", "report") and kinds(toy) == []


def test_a_dvc_that_ends_by_itself_leaves_nobody_behind(toy: Toy) -> None:
    toy.dvc("repro")
    until(lambda: not toy.processes(), "all have ended", toy)
    assert list((toy.path / dvc_lock.COPIES).glob("dvc-*")) == []


@WRITTEN
def test_all_killed_while_dvc_writes_its_lock_file(toy: Toy, characters: int) -> None:
    toy.dvc("repro", "count")
    whole = (toy.path / "dvc.lock").read_bytes()
    tear(toy, characters, watcher=True)
    assert (toy.path / "dvc.lock").stat().st_size == characters and toy.steps("report") == [0]
    assert toy.dvc("repro", check=False).returncode == 255
    plan = toy.run(sys.executable, "-m", "athanor", "plan", check=False)
    assert plan.returncode == 1 and "Fix: python -m athanor doctor --fix" in plan.stderr
    assert "record" in kinds(toy)
    if characters:
        assert "record" in mended(toy) and (toy.path / "dvc.lock").read_bytes() == whole
        toy.dvc("repro")
    else:
        (toy.path / ".dvc/tmp/rwlock").write_text('{"read": {"x": [{"pid"')  # the same kill may tear this one
        done = toy.run(sys.executable, "-m", "athanor", "repro")
        assert "the copy from before is back" in done.stderr
    assert toy.steps() == ALL and toy.lock_has("count", "report") and kinds(toy) == []
    assert (toy.path / "data/report/text").read_text() == f"counted 1 {sum(ALL)}\n"
    assert toy.dvc("repro").stdout.count("didn't change, skipping") == 2


def test_dvc_killed_while_it_writes_its_first_lock_file(toy: Toy) -> None:
    """No copy of a dvc.lock that never was whole: it goes, and the run-cache has what was done."""
    tear(toy, 0, "count", watcher=True)
    assert "record" in mended(toy) and not (toy.path / "dvc.lock").exists()
    toy.dvc("repro")
    assert toy.steps() == ALL and toy.lock_has("count", "report")


def test_a_lock_file_that_can_be_read_or_merged_is_never_replaced(toy: Toy) -> None:
    toy.dvc("repro")  # a copy is kept at the start of each stage
    lock = toy.path / "dvc.lock"
    for text in ("schema: '2.0'\nstages: {}\n", "schema: '2.0'\n<<<<<<< HEAD\nstages:\n"):
        lock.write_text(text)
        toy.run(sys.executable, "-m", "athanor", "doctor", "--fix", check=False)
        assert dvc_lock.mend(toy.path) == [] and lock.read_text() == text
    assert "record" in kinds(toy)  # a conflict is named, and left
    with pytest.raises(InputError, match="Git conflict"):
        dvc_lock.stages(lock)
    lock.write_text("")
    with try_lock(toy.path / dvc_lock.GUARD):  # DVC is writing
        assert dvc_lock.mend(toy.path) == [] and lock.read_text() == ""
        assert "record" not in kinds(toy)


# -- locks of processes that are no more ----------------------------------------


def test_lock_entries_of_other_processes(toy: Toy) -> None:
    """A pid that came back as something else blocks DVC for ever: PID 1 of a container, or a number used again."""
    toy.dvc("repro", "count")
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=toy.environment())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    lock, command = toy.path / ".dvc/tmp/rwlock", "/usr/bin/dvc repro"
    held = {pid: {"pid": pid, "cmd": command} for pid in (1, stranger.pid, dead.pid)}
    for pid in (1, stranger.pid):
        lock.write_text(json.dumps({"write": {str(toy.path / "data/count"): held[pid]}, "read": {}}))
        refused = toy.dvc("repro", check=False)
        assert refused.returncode == 255 and f"(PID {pid}): {command}" in refused.stderr
    lock.write_text(json.dumps({"write": {}, "read": {str(toy.path / "data/count"): list(held.values())}}))
    status, found = toy.doctor()
    assert status == 1 and [row["kind"] for row in found] == ["lock"] * 3
    told = {pid: next(row["what"] for row in found if f"process {pid}," in row["what"]) for pid in held}
    assert "ended" in told[dead.pid] and "no DVC process" in told[1] and "no DVC process" in told[stranger.pid]
    status, found = toy.doctor("--fix")
    assert status == 0 and all(row["fixed"] for row in found) and not toy.locked_by()
    assert stranger.poll() is None
    toy.dvc("repro")
    assert toy.steps() == ALL and toy.steps("report") == [0]
    until(lambda: not watchers(toy), "nobody is left to mend it", toy)
    lock.write_text('{"write": {')  # power loss: every command fails until the file is gone
    assert "JSON structure is corrupted" in toy.dvc("repro", "-f", "-s", "report", check=False).stderr
    assert kinds(toy, "--fix") == ["lock"]
    toy.dvc("repro", "-f", "-s", "report")


# -- dvc exp run ------------------------------------------------------------------


def test_workspace_experiment_killed(toy: Toy) -> None:
    """HEAD stays detached and the refs stay behind; doctor's Git commands bring the branch back with every edit."""
    (toy.path / "notes").write_text("first\n")
    toy.git("add", "notes")
    toy.git("commit", "-qm", "notes")
    (toy.path / "notes").write_text("my edit\n")
    (toy.path / "new").write_text("not known to Git\n")
    toy.hold(HOLD)
    job = toy.start("exp", "run", "-n", "first", "-S", "sft.seed=7")
    stage = toy.wait_held()
    assert toy.doctor() == (0, [])  # detached, but at work
    job.kill_group(signal.SIGKILL)
    job.wait()
    until(lambda: gone(stage), "the stage has ended", toy)
    assert toy.run("git", "symbolic-ref", "-q", "HEAD", check=False).returncode == 1
    assert "EXEC_BASELINE" in toy.git("for-each-ref")
    assert sorted(kinds(toy)) == ["head", "lock"]
    (row,) = [row for row in toy.doctor("--fix")[1] if not row["fixed"]]
    until(lambda: not watchers(toy), "nobody waits to mend what is mended", toy)
    for command in row["command"].split(" (docs")[0].split(" && "):
        toy.run(*command.split())
    assert toy.git("symbolic-ref", "HEAD") == "refs/heads/main"
    assert not any(name in toy.git("for-each-ref") for name in ("EXEC_BASELINE", "EXEC_MERGE"))
    assert (toy.path / "notes").read_text() == "my edit\n" and (toy.path / "new").is_file()
    assert "seed: 7" in toy.git("diff", "params.yaml") and toy.git("stash", "list") == ""
    toy.release()
    toy.dvc("exp", "run", "-n", "second", "-S", "sft.seed=7")
    assert toy.steps() == AGAIN_FROM_CHECKPOINT and len(toy.trainers()) == 2
    assert toy.git("symbolic-ref", "HEAD") == "refs/heads/main" and (toy.path / "notes").read_text() == "my edit\n"
    assert "second" in toy.dvc("exp", "list", "--name-only").stdout and toy.doctor()[0] == 0


@pytest.mark.parametrize("commits", [False, True])
def test_a_head_that_a_killed_experiment_detached_is_named_after_later_runs(toy: Toy, commits: bool) -> None:
    toy.hold(HOLD)
    job = toy.start("exp", "run", "-n", "first", "-S", "sft.seed=7")
    stage = toy.wait_held()
    job.kill_group(signal.SIGKILL)
    job.wait()
    until(lambda: gone(stage), "the stage has ended", toy)
    toy.release()
    toy.dvc("exp", "run", "-n", "second", "-S", "sft.seed=8")
    until(lambda: not toy.processes(), "nobody waits to mend after a DVC that ended by itself", toy)
    if commits:
        toy.git("commit", "-qam", "mine")
    here, edits = toy.git("rev-parse", "HEAD"), toy.git("diff")
    (row,) = [row for row in toy.doctor("--fix")[1] if row["kind"] == "head"]
    for command in row["command"].split(" (docs")[0].split(" && "):
        toy.run(*command.split())
    assert toy.git("symbolic-ref", "--short", "HEAD") == "main" and toy.git("rev-parse", "HEAD") == here
    assert toy.git("diff") == edits and kinds(toy) == []


def test_experiment_killed_while_it_packs(toy: Toy) -> None:
    """DVC stashes edits before it begins; a kill in that window hides them in Git's stash, with HEAD detached."""
    (toy.path / "notes").write_text("first\n")
    toy.git("add", "notes")
    toy.git("commit", "-qm", "notes")
    (toy.path / "notes").write_text("my edit\n")
    _kill_while_it_packs(toy)
    toy.git("symbolic-ref", "HEAD", "refs/heads/main")  # docs/outages.md
    toy.run("git", "update-ref", "-d", "refs/exps/stash")
    stashed = toy.git("show", "refs/stash:notes") if toy.git("stash", "list") else ""
    assert "my edit" in (stashed, (toy.path / "notes").read_text().strip())
    status, rows = toy.doctor("--fix")
    assert status == 0, rows


def _kill_while_it_packs(toy: Toy) -> None:
    stash, head = toy.path / ".git/refs/stash", toy.path / ".git/HEAD"

    def packing() -> bool:
        return stash.is_file() and not head.read_text().startswith("ref:")

    for _ in range(10):  # the window is short and may be missed
        job = toy.start("exp", "run", "--queue", "-S", "sft.seed=7")
        until(lambda: packing() or job.process.poll() is not None, "DVC packs the experiment", toy, pause=0)
        if job.process.poll() is None:
            job.kill(signal.SIGSTOP)
            if packing():
                job.kill(signal.SIGKILL)
                job.wait()
                return
            job.kill(signal.SIGCONT)
        job.wait()
    raise AssertionError("dvc exp run was never seen packing")


def test_temporary_experiment_killed(toy: Toy) -> None:
    """--temp: the checkout leaks; the slot hangs off the main checkout and serves the next one."""
    toy.hold(HOLD)
    job = toy.start("exp", "run", "--temp", "-n", "first", "-S", "sft.seed=7")
    stage = toy.wait_held()
    assert toy.doctor() == (0, [])
    job.kill(signal.SIGKILL)
    job.wait()
    assert toy.doctor() == (0, [])  # the stage goes on in there
    end(stage)
    leaked = list((toy.path / ".dvc/tmp/exps/standalone").glob("tmp*"))
    assert len(leaked) == 1 and kinds(toy) == ["temp-dir"]
    toy.release()
    toy.dvc("exp", "run", "--temp", "-n", "second", "-S", "sft.seed=7")
    assert toy.steps() == AGAIN_FROM_CHECKPOINT and len(toy.trainers()) == 2
    assert kinds(toy, "--fix") == ["temp-dir"] and not leaked[0].exists()
    assert toy.doctor()[0] == 0 and toy.dvc("exp", "list", "--name-only").stdout.split()[-1] == "second"


# -- the queue --------------------------------------------------------------------


def states(toy: Toy) -> dict[str, str]:
    """Name to state of every task, from dvc queue status."""
    rows = [line.split() for line in toy.dvc("queue", "status").stdout.splitlines()]
    return {row[1]: row[-1] for row in rows if row[-1:] and row[-1] in ("Running", "Queued", "Failed", "Success")}


def queue(toy: Toy, **seeds: int) -> None:
    for name, seed in seeds.items():
        toy.dvc("exp", "run", "--queue", "-n", name, "-S", f"sft.seed={seed}")


def logs(toy: Toy) -> str:
    return "".join(path.read_text() for path in (toy.path / ".dvc/tmp/exps/run").glob("*/*.out"))


def test_queue_of_several_workers(toy: Toy) -> None:
    """Two at once that need the same slot: one works, and when it is killed the other goes on from its checkpoint."""
    toy.hold(HOLD)
    queue(toy, a=11, b=12, c=12)
    toy.dvc("queue", "start", "-j", "3")
    toy.wait_held(2)
    until(lambda: "is already working on this configuration" in logs(toy), "the third waits for the second", toy)
    assert toy.doctor() == (0, [])
    at_work = [row.pid for row in toy.log() if row.seed == 12][-1]
    waiting = next(name for name in "bc" if f"process {at_work} is already" in toy.dvc("queue", "logs", name).stdout)
    working = "b" if waiting == "c" else "c"
    toy.dvc("queue", "kill", working)
    until(lambda: gone(at_work), "the killed stage has saved and ended", toy)
    toy.release()
    until(lambda: states(toy) == {"a": "Success", working: "Failed", waiting: "Success"}, "the queue is done", toy)
    by_seed = {seed: [row.step for row in toy.log() if row.stage == "count" and row.seed == seed] for seed in (11, 12)}
    assert by_seed == {11: ALL, 12: ALL} and len(toy.trainers()) == 3
    assert set(toy.dvc("exp", "list", "--name-only").stdout.split()) >= {"a", waiting}


def test_queue_worker_killed(toy: Toy) -> None:
    """The task is shown as Running until `doctor --fix` makes it Failed, and then removes its checkout."""
    toy.hold(HOLD)
    queue(toy, a=11)
    toy.dvc("queue", "start")
    stage = toy.wait_held()
    for process in toy.processes():
        if process.pid != stage:
            end(process.pid)
    assert states(toy) == {"a": "Running"}
    assert toy.doctor() == (0, [])  # its checkout is in use by the orphan
    end(stage)
    assert kinds(toy, "--fix") == ["task", "temp-dir"] and not list((toy.path / ".dvc/tmp/exps").glob("tmp*"))
    assert states(toy) == {"a": "Failed"} and toy.dvc("exp", "show") and not kinds(toy)
    toy.dvc("queue", "remove", "a")
    toy.release()
    queue(toy, a=11)
    toy.dvc("queue", "start")
    until(lambda: states(toy) == {"a": "Success"}, "the experiment has run", toy)
    assert toy.steps() == AGAIN_FROM_CHECKPOINT and len(toy.trainers()) == 2


def test_a_failed_experiment_in_the_queue(toy: Toy) -> None:
    """DVC's worker sometimes leaves with it, without a word; another start runs those that wait."""
    toy.dvc("exp", "run", "--queue", "-n", "bad", "-S", "sft.lr=5")
    queue(toy, good=12)
    toy.dvc("queue", "start")
    until(lambda: states(toy)["bad"] == "Failed", "the first has failed", toy)
    assert "out of range. Fix: use a value from" in logs(toy) and "brings back what DVC has removed" in logs(toy)
    until(lambda: not toy.processes(), "the worker has left", toy)
    if states(toy)["good"] == "Queued":
        toy.dvc("queue", "start")
    until(lambda: states(toy)["good"] == "Success", "the second has run", toy)
