"""Two checkouts with one Git remote and one DVC remote: what travels, what runs, what the garbage collector keeps."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest

from athanor.base.strict import read_yaml
from tests.e2e.clone import Clone, commit

KEEP = ("--workspace", "--all-branches", "--all-tags", "--all-experiments", "--force")
IN_OPEN, IN_ISDIR = 0x20, 0x40000000


def copy(micro: Clone, path: Path) -> Clone:
    """The built checkout once more, with a cache of its own."""
    micro.run("git", "checkout", "-q", "--force", "main")
    ignored = shutil.ignore_patterns(".athanor", "mlflow.db*", "mlartifacts", "dvc_plots", "tmp")
    shutil.copytree(micro.path, path, symlinks=True, ignore=ignored)
    clone = Clone(path)
    clone.dvc("checkout", "-q", "--force")
    return clone


@pytest.fixture(scope="module")
def shared(micro: Clone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the first checkout, and everything it has pushed to `git` and `store`."""
    home = tmp_path_factory.mktemp("shared")
    first = copy(micro, home / "first")
    first.run("git", "init", "-q", "--bare", "-b", "main", str(home / "git"))
    first.run("git", "remote", "add", "origin", "../git")
    first.dvc("remote", "add", "-q", "-d", "store", "../store")
    commit(first, "remote")
    first.dvc("push", "-q", "--run-cache")
    first.run("git", "push", "-q", "origin", "main")
    return home


def second(shared: Path, name: str) -> Clone:
    clone = Clone(shared / name)
    clone.path.mkdir()
    clone.run("git", "clone", "-q", str(shared / "git"), ".")
    return clone


def evaluate(clone: Clone, new_tokens: int) -> set[str]:
    """Pull what eval needs and evaluate; returns the stages that ran."""
    params = clone.path / "params.yaml"
    params.write_text(re.sub(r"max_new_tokens: \d+", f"max_new_tokens: {new_tokens}", params.read_text()))
    return ran(clone.dvc("repro", "--pull", "--allow-missing", "eval", ATHANOR_TRACKING="off").stdout)


def ran(text: str) -> set[str]:
    return set(re.findall(r"Running stage '([\w-]+)'", text))


def pulled_bytes(clone: Clone, store: Path) -> int:
    """Bytes in the clone's cache that the remote has, lists of directories and the run-cache included."""
    cache = clone.path / ".dvc" / "cache"
    files = [path for path in cache.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if (store / path.relative_to(cache)).is_file())


def opened(clone: Clone, module: str) -> set[Path]:
    """Data files that a stage opens, as the kernel sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    folders: dict[int, Path] = {}
    handle = libc.inotify_init1(os.O_NONBLOCK)
    assert handle >= 0
    try:
        for top in ("data", "models"):
            for folder in [clone.path / top, *(path for path in (clone.path / top).rglob("*") if path.is_dir())]:
                watch = libc.inotify_add_watch(handle, os.fsencode(folder), IN_OPEN)
                assert watch >= 0, folder
                folders[watch] = folder
        clone.run(sys.executable, "-m", module, ATHANOR_TRACKING="off")
        found = set()
        while True:
            try:
                events = os.read(handle, 1 << 20)
            except BlockingIOError:
                return found
            while events:
                watch, mask, _, size = struct.unpack_from("iIII", events)
                name, events = events[16 : 16 + size].rstrip(b"\0"), events[16 + size :]
                if watch in folders and not mask & IN_ISDIR:
                    found.add(folders[watch] / os.fsdecode(name))
    finally:
        os.close(handle)


def test_a_second_clone_evaluates_with_nothing_but_what_eval_reads(shared):
    clone = second(shared, "evaluates")
    assert evaluate(clone, 24) == {"eval"}
    pulled = pulled_bytes(clone, shared / "store")
    outputs = [clone.path / str(out) for out in read_yaml(clone.path / "dvc.yaml")["stages"]["eval"]["outs"]]
    read = {path for path in opened(clone, "stages.evaluate") if not any(path.is_relative_to(out) for out in outputs)}
    needed = sum(path.stat().st_size for path in read)
    assert needed > 2_000_000  # two models
    assert pulled <= 1.05 * needed, f"{pulled} bytes pulled, {needed} needed: {pulled / needed:.3f}"
    # Half of an output on disk would look like a changed input to the stages before eval.
    assert evaluate(clone, 25) == {"eval"}
    assert not (clone.path / ".athanor" / "slots").exists()
    # With all data there, only what comes after eval is left to do.
    clone.dvc("pull", "-q")
    assert ran(clone.dvc("repro", "--dry").stdout) == {"export"}


def test_a_second_clone_gets_everything_and_runs_nothing(shared):
    clone = second(shared, "pulls")
    clone.dvc("pull", "-q")
    assert "up to date" in clone.dvc("status").stdout
    assert ran(clone.dvc("repro", ATHANOR_TRACKING="off").stdout) == set()
    assert clone.run("git", "status", "--porcelain").stdout == ""


def another_result(clone: Clone, text: str) -> Path:
    """Give data/eval other content, as a run would; returns its object in the cache."""
    path = clone.path / "data" / "eval" / "samples.md"
    path.unlink()
    path.write_text(text)
    clone.dvc("commit", "-q", "--force", "eval")
    digest = hashlib.md5(text.encode()).hexdigest()  # DVC's name for it
    stored = clone.path / ".dvc" / "cache" / "files" / "md5" / digest[:2] / digest[2:]
    assert stored.is_file()
    return stored


def test_gc_keeps_what_branches_tags_and_experiments_use(micro, tmp_path):
    clone = copy(micro, tmp_path / "gc")
    clone.run("git", "config", "user.name", "t")
    clone.run("git", "config", "user.email", "t@localhost")
    in_experiment = another_result(clone, "in an experiment")
    clone.dvc("exp", "save", "-q", "-n", "kept")
    garbage = another_result(clone, "in nothing")
    in_branch = another_result(clone, "in a branch")
    clone.run("git", "switch", "-q", "-c", "other")
    commit(clone, "a branch")
    in_tag = another_result(clone, "in a tag")
    clone.run("git", "switch", "-q", "--detach")
    commit(clone, "a tag")
    clone.run("git", "tag", "v1")
    back(clone, "main")

    clone.dvc("gc", *KEEP)
    assert not garbage.exists()
    assert in_experiment.is_file() and in_branch.is_file() and in_tag.is_file()
    for revision in ("other", "v1", "main"):
        shutil.rmtree(clone.path / "data" / "eval")
        back(clone, revision)
        assert (clone.path / "data" / "eval" / "samples.md").is_file()
        # Not export, which another data/eval concerns.
        assert clone.dvc("status", "-q", "sft", "eval", check=False).returncode == 0, revision
    clone.dvc("exp", "apply", "kept")
    assert (clone.path / "data" / "eval" / "samples.md").read_text() == "in an experiment"

    # The documented difference: --workspace alone takes what only experiments use.
    back(clone, "main")
    clone.dvc("gc", "--workspace", "--force")
    assert not in_experiment.exists() and not in_branch.exists()
    assert "up to date" in clone.dvc("status").stdout


def back(clone: Clone, revision: str) -> None:
    clone.run("git", "checkout", "-q", "--force", revision)
    clone.dvc("checkout", "-q", "--force")
