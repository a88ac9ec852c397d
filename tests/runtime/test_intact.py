"""Bytes damaged in place, with time, size and inode kept: no stage starts on them, and they come back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from athanor.base.artifacts import MANIFEST, write_manifest
from athanor.base.errors import InputError
from athanor.runtime import intact, presets
from athanor.runtime.closure import stage_module
from athanor.runtime.facts import Graph
from athanor.runtime.run import Run
from tests.e2e.clone import ROOT
from tests.runtime.toy_pipeline import Toy

GRAPH = Graph(ROOT)
# What a stage reads of another one's output; manifests and metrics have no manifest that lists them.
READ = [
    (stage, dep)
    for stage in GRAPH.stages
    for dep in GRAPH.dependencies(stage)
    if GRAPH.maker(Path(dep)) and not dep.endswith(".json")
]


def flip(path: Path, at: int = -1) -> None:
    """One bit, as a bad disk does it: nothing that DVC looks at changes."""
    before = path.stat()
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(bytes([byte ^ 1]))
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (before.st_size, before.st_ino, before.st_mtime_ns)


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which every output with a manifest lies, a few bytes each."""
    for name in ("dvc.yaml", "stages", "athanor"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "params.yaml").write_text(presets.complete(ROOT / "presets" / "micro.yaml"))
    folders = set()
    for _, dep in READ:
        inside = Path(dep).parts[:2]
        folders.add(Path(*inside))
        file = tmp_path / dep if "." in Path(dep).name else tmp_path / dep / "part" / "00000.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"bytes of " + dep.encode())
    for folder in folders:
        write_manifest(tmp_path / folder, kind="x", version=1, counts={})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATHANOR_TRACKING", "off")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


@pytest.fixture
def begin(artifacts: Path) -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.report("FAILED", "the test is over", 1)


@pytest.mark.parametrize(("stage", "dep"), READ, ids=[f"{stage}-{dep}" for stage, dep in READ])
def test_no_stage_begins_on_damaged_bytes(artifacts: Path, begin: list[Run], stage: str, dep: str) -> None:
    module = stage_module(GRAPH.stages[stage]["cmd"])
    assert module
    (file, *_) = [path for path in sorted((artifacts / dep).rglob("*.bin"))] or [artifacts / dep]
    begin.append(Run(stage, module))
    flip(file)
    with pytest.raises(InputError) as caught:
        begin[0].begin()
    assert caught.value.where == str(file.relative_to(artifacts))
    assert (
        f"written by stage {GRAPH.maker(Path(dep))}" in caught.value.what and "doctor --deep --fix" in caught.value.fix
    )
    flip(file)
    begin.append(Run(stage, module))
    begin[1].begin()


def test_a_file_cut_short_or_away_is_named(artifacts: Path) -> None:
    file = artifacts / "data/raw/part/00000.bin"
    file.write_bytes(b"less")
    with pytest.raises(InputError, match="has 4 bytes, 17 were written by stage download"):
        intact.check(GRAPH, "clean", print)
    file.unlink()
    with pytest.raises(InputError, match="cannot be read .No such file"):
        intact.check(GRAPH, "clean", print)


def test_of_very_large_inputs_a_share_is_read_and_that_is_said(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for number in range(20):
        (artifacts / f"data/raw/part/{number:05d}.bin").write_bytes(bytes(100))
    (artifacts / "data/raw" / MANIFEST).unlink()
    write_manifest(artifacts / "data/raw", kind="x", version=1, counts={})
    monkeypatch.setattr(intact, "MAX_BYTES", 300)
    read = intact.check(GRAPH, "train-classifiers", said.append)
    assert read["inputs_checked_bytes"] == 300 and "doctor --deep compares all" in said[0]
    flip(artifacts / "data/raw/part/00007.bin")
    with pytest.raises(InputError, match="00007"):  # each start draws other files
        for _ in range(1000):
            intact.check(GRAPH, "train-classifiers", said.append)


@pytest.mark.parametrize("link", [None, "copy"])
def test_the_command_in_the_message_brings_the_bytes_back(toy: Toy, link: str | None) -> None:
    """With hard links, the repository's setting, the cache's object is the damaged file itself: results lie on the disk once."""
    if link:
        toy.dvc("config", "cache.type", link)
    toy.dvc("repro")
    file = toy.path / "data/count/sum"
    assert (file.stat().st_nlink == 2) is (link is None)
    flip(file, 0)
    assert "up to date" in toy.dvc("status").stdout
    with open(toy.path / "stages/report.py", "a") as code:
        code.write("# so that it runs again\n")
    failed = toy.dvc("repro", check=False)
    assert (
        failed.returncode
        and "data/count/sum: its bytes are not those that were written by stage count" in failed.stderr
    )
    assert toy.steps("report") == [0]
    status, found = toy.doctor("--deep", "--fix")
    assert status == 0 and [row["kind"] for row in found if row["fixed"]] == ["cache"]
    toy.dvc("repro")
    assert toy.steps("report") == [0, 0] and (toy.path / "data/report/text").read_text() == "counted 1 66\n"
    assert file.read_text() == "1 66\n" and toy.doctor("--deep") == (0, [])


def test_deep_makes_a_damaged_cache_object_again_from_the_workspace(toy: Toy) -> None:
    toy.dvc("config", "cache.type", "copy")
    toy.dvc("repro")
    (cached,) = [path for path in (toy.path / ".dvc/cache/files/md5").glob("*/*") if path.read_bytes() == b"1 66\n"]
    flip(cached)
    status, found = toy.doctor("--deep", "--fix")
    assert status == 0 and "made again from the workspace" in found[0]["fixed"]
    assert cached.read_bytes() == b"1 66\n" and toy.doctor("--deep") == (0, [])


def test_deep_leaves_another_version_of_an_output_alone(toy: Toy) -> None:
    toy.dvc("repro")
    folder = toy.path / "data/count"
    (folder / "sum").unlink()
    (folder / "sum").write_text("2 66\n")
    write_manifest(folder, kind="count", version=1, counts={})
    assert [row for row in toy.doctor("--deep")[1] if not row["note"]] == []
