"""athanor doctor: what it finds, what it repairs, and what it leaves alone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from athanor.base.errors import AthanorError
from athanor.cli.doctor import checks
from tests.runtime.toy_pipeline import Job, Toy, end

NOBODY = 2**22 + 7  # above the largest pid of Linux


def problems(toy: Toy, *words: str) -> dict[str, dict]:
    """Findings that are no notes, by where."""
    return {row["where"]: row for row in toy.doctor(*words)[1] if not row["note"]}


def text(toy: Toy, *words: str) -> subprocess.CompletedProcess[str]:
    return toy.run(sys.executable, "-m", "athanor", "doctor", *words, check=False)


def dead_lock(toy: Toy) -> Path:
    path = toy.path / ".dvc/tmp/rwlock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"write": {str(toy.path / "data/x"): {"pid": NOBODY, "cmd": "dvc repro"}}, "read": {}}))
    return path


def worker(toy: Toy) -> subprocess.Popen[str]:
    """Something that looks like a stage at work in the checkout."""
    code = "print('up', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "stages.count"],
        cwd=toy.path, env=toy.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    return child


def test_healthy_and_one_line_per_finding(toy: Toy, tmp_path: Path) -> None:
    done = text(toy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "healthy\n", "")
    dead_lock(toy)
    done = text(toy)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 2 and done.stdout.endswith("problems: 1\n")
    line = f".dvc/tmp/rwlock: data/x locked by process {NOBODY}, which has ended. Fix: python -m athanor doctor --fix\n"
    assert line in done.stdout
    done = text(toy, "--fix")
    assert done.returncode == 0 and done.stdout.startswith("fixed ") and "Done: " in done.stdout
    assert text(toy).stdout == "healthy\n"
    elsewhere = subprocess.run(
        [sys.executable, "-m", "athanor", "doctor"], cwd=tmp_path, env=toy.environment(), capture_output=True, text=True
    )
    assert elsewhere.returncode == 1 and "no dvc.yaml here. Fix: run it in the checkout" in elsewhere.stderr


def test_a_read_lock_of_an_ended_process_is_no_problem(toy: Toy) -> None:
    path = dead_lock(toy)
    reader = {"pid": NOBODY, "cmd": "dvc repro"}
    path.write_text(json.dumps({"write": {}, "read": {str(toy.path / "data/x"): [reader]}}))
    done = text(toy)
    assert done.returncode == 0 and done.stdout.startswith("note ") and "stops nothing" in done.stdout
    assert "fixed " in text(toy, "--fix").stdout and text(toy).stdout == "healthy\n"


def test_works_when_dvc_does_not(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    for name in ("dvc", "scmrepo", "celery", "kombu"):
        (tmp_path / "broken" / f"{name}.py").write_text("raise ImportError('broken')\n")
    dead_lock(toy)
    (toy.path / "dvc.lock").write_text("stages: [")  # torn
    path = f"{tmp_path / 'broken'}{os.pathsep}{toy.environment()['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "athanor", "doctor", "--fix", "--deep"],
        cwd=toy.path, env={**toy.environment(), "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert "fixed    .dvc/tmp/rwlock" in done.stdout and "fixed    dvc.lock: is torn" in done.stdout
    assert done.returncode == 0 and "could not be checked" not in done.stdout


def test_a_folder_whose_replacement_was_killed_is_put_back(toy: Toy) -> None:
    """`new_dir` puts the old one aside first; killed between its two renames it leaves no other."""
    kill = "import os, signal, athanor.base.artifacts as a; real = os.replace\n"
    kill += "os.replace = lambda s, t: os.kill(os.getpid(), signal.SIGKILL) if str(t) == 'data/x' else real(s, t)\n"
    kill += "with a.new_dir('data/x') as out: (out / 'a').write_text('new')"
    (toy.path / "data/x").mkdir(parents=True)
    (toy.path / "data/x/a").write_text("old")
    assert toy.run(sys.executable, "-c", kill, check=False).returncode == -9
    assert not (toy.path / "data/x").exists()
    _, findings = toy.doctor("--fix")
    assert any("whose replacement was killed" in found["what"] for found in findings)
    assert (toy.path / "data/x/a").read_text() == "old" and os.listdir(toy.path / "data") == ["x"]


def test_leftovers_go_when_nobody_can_own_them(toy: Toy) -> None:
    kept = [toy.path / name for name in ("data/count/sum", "models/base/w.bin", ".athanor/slots/pretrain/ab/step_1/w")]
    scraps = [toy.path / name for name in ("data/.count.abc.tmp", "metrics/.a.json.x.tmp", ".athanor/runs/r/.m.tmp")]
    busy = worker(toy)
    for path in (*kept, *scraps[1:], scraps[0] / "part"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 100)
    try:
        assert problems(toy, "--fix") == {}  # the worker was there when they were made
        assert all(path.exists() for path in scraps)
    finally:
        busy.kill()
        busy.wait()
    time.sleep(2.5)  # the start of a process is known to the second
    later = worker(toy)  # was not there when they were made
    try:
        found = problems(toy, "--fix")
    finally:
        later.kill()
        later.wait()
    assert sorted(found) == sorted(path.relative_to(toy.path).as_posix() for path in scraps)
    assert not any(path.exists() for path in scraps) and all(path.exists() for path in kept)


def test_what_dvc_holds_is_not_missed_by_git(toy: Toy) -> None:
    (toy.path / "stages/own.py").write_text("")
    assert problems(toy)["stages/own.py"]["kind"] == "untracked"
    toy.dvc("add", "stages/own.py")
    assert "stages/own.py" not in problems(toy)


def test_git_lock(toy: Toy) -> None:
    (toy.path / ".git/index.lock").touch()
    assert toy.run("git", "add", "-A", check=False).returncode == 128
    assert [row["kind"] for row in problems(toy, "--fix").values()] == ["lock"]
    toy.git("add", "-A")


def test_the_lock_of_a_living_git_stays(toy: Toy) -> None:
    """A commit keeps it while its editor is open, and fails when it is gone."""
    (toy.path / "params.yaml").write_text("a: 1\n")
    with subprocess.Popen(
        ["git", "commit", "-aqem", "edited"], cwd=toy.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**toy.environment(), "GIT_EDITOR": "echo open; read line; :"},
    ) as commit:  # fmt: skip
        assert commit.stdout is not None and commit.stdout.readline() == "open\n"
        assert (toy.path / ".git/index.lock").is_file() and problems(toy, "--fix") == {}
        commit.communicate("\n")
    assert commit.returncode == 0 and toy.git("log", "-1", "--format=%s").strip() == "edited"


def test_nothing_is_repaired_while_someone_unseen_works(toy: Toy) -> None:
    """A held slot whose process is not in the table: another container shares the checkout."""
    lock = dead_lock(toy)
    scrap = toy.path / "data/.x.tmp"
    slot = toy.path / ".athanor/slots/pretrain/0123456789abcdef/lock"
    for path in (scrap, slot):
        path.parent.mkdir(parents=True)
        path.write_text(f"{NOBODY}\n")
    with open(slot) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        before = lock.read_text()
        status, found = toy.doctor("--fix")
        assert status == 1 and [row["kind"] for row in found] == ["unseen", "lock"]
        assert "rm .dvc/tmp/rwlock" in found[1]["command"]
        assert not any(row["fixed"] for row in found) and scrap.exists() and lock.read_text() == before
    assert sorted(problems(toy, "--fix")) == [".dvc/tmp/rwlock", "data/.x.tmp"] and not scrap.exists()


def test_files_that_an_experiment_would_miss(toy: Toy) -> None:
    graph = toy.path / "dvc.yaml"
    graph.write_text(graph.read_text().replace("deps: [stages/count.py]", "deps: [stages/count.py, corpus]"))
    missed = ["athanor/x/y.py", "corpus/words.txt", "stages/new.py"]
    for name in (*missed, "notes.py", "stages/notes.txt", "data/count/sum"):
        (toy.path / name).parent.mkdir(parents=True, exist_ok=True)
        (toy.path / name).write_text("x")
    found = problems(toy, "--fix")
    assert sorted(found) == missed
    assert not any(row["fixed"] for row in found.values())
    for row in found.values():
        toy.run(*row["command"].split())
    assert problems(toy) == {}


def test_many_files_of_a_folder_are_one_line(toy: Toy) -> None:
    """Found with a folder of sixty, which were sixty lines."""
    for number in range(60):
        (toy.path / f"stages/new{number}.py").write_text("")
    (row,) = problems(toy).values()
    assert row["where"] == "stages/" and row["what"].startswith("60 files of it are not known to Git")
    toy.run(*row["command"].split())
    assert problems(toy) == {}


def test_room_for_the_largest_output(toy: Toy) -> None:
    lock = "schema: '2.0'\nstages:\n  count:\n    cmd: x\n    outs:\n    - path: data/count\n      md5: a\n      size: {}\n"
    (toy.path / "dvc.lock").write_text(lock.format(10))
    assert toy.doctor() == (0, [])
    (toy.path / "dvc.lock").write_text(lock.format(10**17))
    (row,) = problems(toy, "--fix").values()
    assert row["kind"] == "disk" and "need 93132257.46 GiB" in row["what"] and row["fixed"] is None


def test_finished_slots_are_a_note(toy: Toy) -> None:
    slot = toy.path / ".athanor/slots/pretrain/0123456789abcdef"
    slot.mkdir(parents=True)
    (slot / "DONE").touch()
    (slot / "weights").write_bytes(bytes(3 * 2**20))
    status, (row,) = toy.doctor("--fix")
    assert status == 0 and row["note"] and "1 finished slots" in row["what"] and "3.0 MiB" in row["what"]
    assert row["command"] == "python -m athanor slots prune --days 0" and (slot / "weights").is_file()


def test_journals_that_were_not_shipped(toy: Toy) -> None:
    toy.hold(6)
    stage = Job(toy, [sys.executable, "-m", "stages.count"])
    end(toy.wait_held())
    stage.wait()
    (folder,) = (toy.path / ".athanor/runs").iterdir()
    assert toy.doctor() == (0, [])  # tracking is switched off here
    on = {key: value for key, value in toy.environment().items() if key != "ATHANOR_TRACKING"}

    def doctor(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "athanor", "doctor", *words]
        return subprocess.run(command, cwd=toy.path, env={**on, **more}, capture_output=True, text=True)

    done = doctor()
    assert done.returncode == 1 and f"{folder.name}: journal is not in MLflow yet. Fix: " in done.stdout
    done = doctor("--fix")
    assert done.returncode == 0 and "Done: shipped" in done.stdout
    assert (folder / "journal.jsonl").is_file() and doctor().returncode == 0


def test_a_database_that_came_with_a_copy(toy: Toy, tmp_path: Path) -> None:
    """MLflow keeps the absolute place of its files: the copy's shipper would write into the original's folder."""
    toy.hold(6)
    stage = Job(toy, [sys.executable, "-m", "stages.count"])
    end(toy.wait_held())
    stage.wait()
    on = {key: value for key, value in toy.environment().items() if key not in ("ATHANOR_TRACKING", "PWD")}
    copied = tmp_path / "a copy"

    def athanor(*words: str, where: Path) -> str:
        command = [sys.executable, "-m", "athanor", *words]
        return subprocess.run(command, cwd=where, env=on, capture_output=True, text=True).stdout

    assert "Done: shipped" in athanor("doctor", "--fix", where=toy.path)
    assert "copied or moved" not in athanor("doctor", where=toy.path)
    shutil.copytree(toy.path, copied, symlinks=True)
    told = athanor("doctor", where=copied)
    assert f"was copied or moved: MLflow keeps its files in {(toy.path / 'mlartifacts').as_uri()}" in told
    assert f"Fix: mv '{copied / 'mlflow.db'}' '{copied / 'mlflow.db'}'.old && athanor ship --rebuild" in told
    (copied / "mlflow.db").unlink()
    athanor("ship", "--rebuild", where=copied)
    assert (copied / "mlflow.db").is_file() and "copied or moved" not in athanor("doctor", where=copied)


@pytest.mark.parametrize("at_work", [True, False])
def test_a_shipper_at_work_is_waited_for_and_one_that_is_not_is_given_up(
    tmp_path: Path, monkeypatch, at_work: bool
) -> None:
    """It steps back for every other program, so on a full machine it takes its time."""
    (tmp_path / ".athanor").mkdir()
    begun, started = time.monotonic(), []
    monkeypatch.setattr(checks, "SHIP_SECONDS", 0.5)
    monkeypatch.setattr(checks, "_undelivered", lambda root: [root] if time.monotonic() - begun < 1.5 else [])
    monkeypatch.setattr(checks.ship, "start_detached", started.append)
    with open(tmp_path / ".athanor" / "ship.lock", "w") as lock:
        if at_work:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert checks._ship(tmp_path) == "shipped" and not started
        else:
            with pytest.raises(AthanorError, match="1 are left"):
                checks._ship(tmp_path)
            assert started


# -- HEAD ---------------------------------------------------------------------------


def test_a_head_that_the_user_detached_stays(toy: Toy) -> None:
    toy.git("update-ref", "refs/exps/exec/EXEC_HEAD", "HEAD")  # every experiment leaves this one
    toy.git("checkout", "-q", "--detach")
    assert toy.doctor("--fix") == (0, [])
    assert toy.run("git", "symbolic-ref", "-q", "HEAD", check=False).returncode == 1


def test_what_a_killed_experiment_leaves_in_git_is_named_with_the_commands(toy: Toy) -> None:
    """Doctor repairs none of it; its commands keep every edit."""
    params = toy.path / "params.yaml"
    params.write_text(f"{params.read_text()}# edited\n")
    toy.git("update-ref", "refs/exps/exec/EXEC_BASELINE", "HEAD")
    toy.git("update-ref", "refs/exps/exec/EXEC_MERGE", toy.git("stash", "create"))
    toy.git("checkout", "-q", "--detach")
    (row,) = problems(toy, "--fix").values()
    assert row["kind"] == "head" and row["fixed"] is None and "EXEC_MERGE" in toy.git("for-each-ref")
    for command in row["command"].split(" (docs")[0].split(" && "):
        toy.run(*command.split())
    assert toy.git("symbolic-ref", "--short", "HEAD") == "main" and "EXEC" not in toy.git("for-each-ref")
    assert params.read_text().endswith("# edited\n") and toy.doctor() == (0, [])


# -- the cache -----------------------------------------------------------------------


def test_deep_finds_a_cache_object_written_through_a_link(toy: Toy) -> None:
    toy.dvc("config", "cache.type", "hardlink")
    toy.dvc("repro")
    toy.git("add", "-A")
    assert toy.doctor("--deep") == (0, [])
    path = toy.path / "data/count/sum"
    assert path.stat().st_nlink == 2
    path.chmod(0o644)
    with open(path, "a") as file:  # what an editor that writes in place does
        file.write("more\n")
    assert toy.doctor() == (0, [])
    (where, row), *others = problems(toy, "--deep", "--fix").items()
    assert not others and row["fixed"] is None and "data/count/sum is damaged" in row["what"]
    assert os.path.samefile(toy.path / where, path)
    remove, again = row["command"].split(", then ")
    toy.run(*remove.split())
    toy.run(*again.split(" or ")[1].split())
    assert path.read_text() == "1 66\n" and toy.doctor("--deep") == (0, [])


@pytest.mark.parametrize("error", [ImportError("libcuda.so.1: cannot open\nshared object file"), OSError("no driver")])
def test_a_build_of_llama_cpp_that_does_not_load_is_one_line_with_its_fix(monkeypatch, tmp_path, error) -> None:
    class Broken:
        def __getattr__(self, name: str) -> None:
            raise error

    monkeypatch.setattr(checks.cards, "find", lambda: [checks.cards.Card("cuda", "sm_86", "A card", 580)])
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "1.2+cu128")
    monkeypatch.setitem(sys.modules, "xllamacpp", Broken())
    (found,) = checks.llama_cpp(checks.Checkout(tmp_path, (), ()))
    assert "cannot be imported" in found.what and "\n" not in found.what and not found.note
    assert found.command == "pip install xllamacpp==1.2 --no-deps --force-reinstall"
