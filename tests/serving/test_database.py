"""The file of the chats: what was deleted is gone from the disk, and where other machines share it no WAL is used."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from athanor.base.errors import InputError
from athanor.decoding import sampling
from athanor.serving import database
from athanor.serving.backends.base import MIN_TEMPERATURE, settings
from athanor.serving.database import on_network
from athanor.serving.store import Store

WORD = "quetzalcoatlus"


def on_disk(folder) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def test_a_deleted_chat_is_gone_from_every_file(tmp_path):
    store = Store(tmp_path / "chat.sqlite3")
    kept, gone = store.create(title="kept")["id"], store.create(title=f"{WORD} title", system=f"{WORD} system")["id"]
    store.answer(kept, (None, "kept question"), "kept answer", model="m", stats={})
    for number in range(20):
        store.answer(gone, (None, f"{WORD} {number} " + "x" * 5000), f"answer {WORD}", model="m", stats={})
    assert WORD.encode() in on_disk(tmp_path)
    store.delete(gone)
    assert WORD.encode() not in on_disk(tmp_path)
    assert b"kept answer" in on_disk(tmp_path)
    store.close()
    assert WORD.encode() not in on_disk(tmp_path)


def test_deleting_does_not_wait_for_the_log_while_another_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    store = Store(tmp_path / "chat.sqlite3")
    chat = store.create(title=WORD)["id"]
    other = sqlite3.connect(tmp_path / "chat.sqlite3", isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT * FROM chats").fetchall()
    store.delete(chat)
    assert store.chats("") == []
    other.close()


MOUNTED = {"/": "ext4", "/home": "nfs4", "/home/me/fast": "xfs", "/mnt/a b": "fuse.sshfs", "/mnt/x": "cifs",
           "/mnt/x/": "tmpfs", "/mnt/fuse": "fuse.ntfs-3g"}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "shared"),
    [("/tmp/c", False), ("/home/you/c", True), ("/homely/c", False), ("/home/me/fast/c", False), ("/mnt/a b/c", True),
     ("/mnt/x/c", False), ("/mnt/fuse/c", False)],
)  # fmt: skip
def test_file_systems_of_other_machines_are_known(monkeypatch, path, shared):
    table = [SimpleNamespace(mountpoint=where, fstype=kind) for where, kind in MOUNTED.items()]
    monkeypatch.setattr(database.psutil, "disk_partitions", lambda all: table)
    assert on_network(Path(path)) is shared
    monkeypatch.setattr(database.psutil, "disk_partitions", Mock(side_effect=FileNotFoundError))
    assert on_network(Path(path)) is False


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_on_another_machine_s_disk_has_no_wal(tmp_path, monkeypatch, shared):
    Store(tmp_path / "chat.sqlite3").close()  # made on a local disk
    monkeypatch.setattr(database, "on_network", lambda path: shared)
    store = Store(tmp_path / "chat.sqlite3")
    chat = store.create(title="kept")["id"]
    mode = sqlite3.connect(tmp_path / "chat.sqlite3").execute("PRAGMA journal_mode").fetchone()[0]
    assert mode == ("delete" if shared else "wal")
    assert (tmp_path / "chat.sqlite3-wal").exists() is not shared
    store.delete(chat)
    store.close()


def test_every_backend_has_the_bounds_of_sampling():
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert MIN_TEMPERATURE == sampling.MIN_TEMPERATURE
    for heat, right in ((0, True), (sampling.MIN_TEMPERATURE, True), (1e-300, False), (9e-7, False), (-1e-9, False)):
        for check in (
            lambda heat=heat: settings({"temperature": heat}, defaults),
            lambda heat=heat: sampling.Sampling(heat),
        ):
            if right:
                check()
            else:
                with pytest.raises(InputError):
                    check()
    for penalty in (1 / sampling.MAX_PENALTY, sampling.MAX_PENALTY):
        settings({"repetition_penalty": penalty}, defaults)
    for penalty in (0, 0.9 / sampling.MAX_PENALTY, 1.1 * sampling.MAX_PENALTY):
        with pytest.raises(InputError):
            settings({"repetition_penalty": penalty}, defaults)
