"""Artifacts: atomic, canonical, honest about their content."""

from __future__ import annotations

import os

import pytest

from athanor.base.artifacts import (
    canonical_json,
    link,
    new_dir,
    read_json,
    read_manifest,
    rounded,
    verify_files,
    write_bytes,
    write_manifest,
)
from athanor.base.errors import InputError


def test_a_second_name_is_a_link_and_never_written_through(tmp_path):
    first, cache, out = (tmp_path / name for name in ("first", "cache", "out"))
    first.write_text("new")
    cache.write_text("old")
    link(first, tmp_path / "second")
    assert (tmp_path / "second").samefile(first)
    os.link(cache, out)
    with pytest.raises(FileExistsError):
        link(first, out)
    assert cache.read_text() == "old"


def test_write_replaces_the_inode_so_a_hard_linked_cache_is_safe(tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.write_bytes(b"cached")
    os.link(cache, out)
    write_bytes(out, b"new")
    assert cache.read_bytes() == b"cached" and out.read_bytes() == b"new"


def test_the_bytes_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    """Otherwise a loss of power may leave the name without the bytes."""
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        opened = os.fstat(handle)
        [path] = [path for path in (tmp_path, *tmp_path.iterdir()) if os.path.samestat(path.stat(), opened)]
        calls.append("folder" if path == tmp_path else path.read_bytes())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("renamed"), replace(*names)))
    write_bytes(tmp_path / "a.json", b"new")
    assert calls == [b"new", "renamed", "folder"]


def test_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.json"]


def test_new_dir_publishes_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with new_dir(out) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(RuntimeError), new_dir(out) as folder:
        (folder / "a").write_text("2")
        raise RuntimeError
    assert (out / "a").read_text() == "1" and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_new_dir_that_cannot_be_published_leaves_the_old_folder(tmp_path, monkeypatch, fails_at):
    """The old one was deleted first: an error of the rename behind it, or a kill, lost both."""
    out, real, calls = tmp_path / "out", os.replace, []
    with new_dir(out) as folder:
        (folder / "a").write_text("old")

    def replace(source, target):
        calls.append(source)
        if len(calls) == fails_at:
            raise OSError(5, "no")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError), new_dir(out) as folder:
        (folder / "a").write_text("new")
    assert (out / "a").read_text() == "old" and os.listdir(tmp_path) == ["out"]


def test_canonical_json_refuses_nan_and_ignores_key_order():
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1})
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})


def test_rounded_keeps_six_digits_and_turns_nonfinite_into_none():
    assert rounded({"a": [1.23456789, True, 3], "b": float("inf")}) == {"a": [1.23457, True, 3], "b": None}
    with pytest.raises(TypeError):
        rounded({"a": object()})


def test_manifest_lists_hashes_and_refuses_another_kind(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"123")
    write_manifest(tmp_path, kind="thing", version=1, counts={"rows": 3})
    assert read_manifest(tmp_path, "thing", 1)["files"]["x.bin"]["bytes"] == 3
    with pytest.raises(InputError, match="expected a thing artifact of version 2"):
        read_manifest(tmp_path, "thing", 2)


def test_flipped_byte_is_found(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"123")
    write_manifest(tmp_path, kind="thing", version=1, counts={})
    verify_files(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"133")
    with pytest.raises(InputError, match="x.bin"):
        verify_files(tmp_path)


def test_broken_json_names_the_file(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InputError, match="a.json"):
        read_json(tmp_path / "a.json")
