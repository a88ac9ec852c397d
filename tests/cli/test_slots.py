"""Listing and pruning checkpoint slots."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.cli import slots
from athanor.runtime.slots import Slot

DAY = 86400


@pytest.fixture
def root(tmp_path):
    """Four slots of pretrain, a day apart: done, done and current, trunk, unfinished."""
    folder = tmp_path / ".athanor" / "slots" / "pretrain"

    def make(lr, age_days, *, tokens=100, part=None, done=False, pinned=False):
        params = {"lr": lr} if part else {"lr": lr, "tokens": tokens}
        facts = {"params": {"pretrain": params}, "inputs": {"shards": "a" * 64}, **({"part": part} if part else {})}
        with Slot(folder, facts, pinned=pinned) as slot:
            (slot.path / f"step_{int(age_days * 10):08d}").mkdir()
            (slot.path / f"step_{int(age_days * 10):08d}" / "tensors.safetensors").write_bytes(bytes(1000))
            if done:
                slot.mark_done()
        for path in slot.path.rglob("*"):
            os.utime(path, times=(time.time() - age_days * DAY,) * 2)
        return slot

    made = {
        "old": make(0.1, 9, done=True),
        "new": make(0.2, 8, done=True),
        "trunk": make(0.2, 20, part="trunk", pinned=True),
        "unfinished": make(0.3, 10),
    }
    write_json(tmp_path / "metrics" / "runs" / "pretrain.json", {"facts": {"slot": made["new"].fingerprint}})
    return tmp_path, made


def names(root, made, **how):
    by_path = {slot.path: name for name, slot in made.items()}
    how = {"days": None, "max_bytes": None, "unfinished": False, **how}
    return [by_path[slot.path] for slot in slots.prunable(slots.find(root), time.time(), **how)]


def test_the_list_says_state_step_and_what_tells_slots_apart(root):
    root, made = root
    found = {slot.path: slot for slot in slots.find(root)}
    states = {name: found[slot.path].state for name, slot in made.items()}
    assert states == {"old": "done", "new": "done", "trunk": "trunk", "unfinished": "unfinished"}
    assert found[made["old"].path].step == 90 and 1000 < found[made["old"].path].bytes < 2000
    assert [name for name, slot in made.items() if found[slot.path].current] == ["new"]
    text = slots.table(list(found.values()))
    assert "pretrain.lr 0.3" in text and "pinned" in text and "shards" not in text and "tokens" not in text


def test_prune_takes_by_age_and_by_size_and_never_the_pinned(root):
    assert names(*root, days=7) == ["old", "new"]
    assert names(*root, days=7, unfinished=True) == ["unfinished", "old", "new"]
    assert names(*root, days=8.5) == ["old"]
    total = sum(slot.bytes for slot in slots.find(root[0]))
    assert names(*root, max_bytes=total) == []
    assert names(*root, max_bytes=total - 500) == ["old"]
    assert names(*root, max_bytes=0, unfinished=True) == ["unfinished", "old", "new"]


def test_a_slot_at_work_stays(root):
    root, made = root
    with Slot(made["old"].path.parent, made["old"].facts):
        assert names(root, made, days=7) == ["new"]
        (old,) = [slot for slot in slots.find(root) if slot.path == made["old"].path]
        assert old.state == "working" and not slots.remove(old) and old.path.is_dir()


def command(root, *words):
    done = subprocess.run(
        [sys.executable, "-m", "athanor", "slots", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "DVC_ROOT": str(root)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_lists_pins_and_prunes(root):
    root, made = root
    code, text = command(root)
    assert code == 0 and "4 slots" in text
    assert command(root, "pin", made["old"].fingerprint[:6])[0] == 0
    code, text = command(root, "prune", "--dry-run")
    assert code == 0 and "would remove" in text and made["new"].path.is_dir()
    code, text = command(root, "prune")
    assert code == 0 and not made["new"].path.exists() and made["old"].path.is_dir() and made["trunk"].path.is_dir()
    assert command(root, "unpin", made["old"].fingerprint)[0] == 0
    assert command(root, "unpin", made["trunk"].fingerprint)[0] == 0
    code, text = command(root, "prune", "--max-gib", "0")
    assert code == 1 and "unfinished" in text
    assert [slot.state for slot in slots.find(root)] == ["unfinished"]


def test_an_unknown_or_ambiguous_id_is_refused(root):
    found = slots.find(root[0])
    with pytest.raises(InputError, match="0 slots begin with 'zz'"):
        slots.choose(found, "zz")
    with pytest.raises(InputError):
        slots.choose(found, "")
