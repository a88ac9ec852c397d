"""Checkpoints: whole or ignored, kept or dropped, untouched by a full disk."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from athanor.base.errors import InputError
from athanor.training import checkpoint

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "rng": torch.arange(9, dtype=torch.uint8)}


def saved(folder, *steps, pinned=()):
    for step in steps:
        tensors = {**TENSORS, "a": TENSORS["a"] + step}
        checkpoint.save(folder, step, tensors, {"step": step, "curve": [1.5, None]}, pinned=step in pinned)


def newest(folder):
    notes = []
    found = checkpoint.latest(folder, notes.append)
    return (found.step if found else None), notes


def test_round_trip(tmp_path):
    saved(tmp_path, 7)
    found = checkpoint.latest(tmp_path, print)
    assert found.step == 7 and found.state == {"step": 7, "curve": [1.5, None]}
    assert torch.equal(found.tensors["a"], TENSORS["a"] + 7) and found.tensors["rng"].dtype == torch.uint8


def test_two_newest_and_the_pinned_stay(tmp_path):
    saved(tmp_path, 1, 2, 3, 10, 12, pinned=(2,))
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_00000012", "step_00000010", "step_00000002"]


def truncate(folder):
    path = folder / checkpoint.TENSORS
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / checkpoint.TENSORS
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


def edit_state(folder):
    path = folder / checkpoint.STATE
    path.write_text(path.read_text().replace('"step": 5', '"step": 6'))


def cut_state(folder):
    path = folder / checkpoint.STATE
    path.write_text(path.read_text()[:-10])


DAMAGES = {
    "truncated": truncate,
    "flipped bit": flip,
    "no tensors": lambda folder: (folder / checkpoint.TENSORS).unlink(),
    "no state": lambda folder: (folder / checkpoint.STATE).unlink(),
    "edited state": edit_state,
    "cut state": cut_state,
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_passed_over(tmp_path, damage):
    saved(tmp_path, 4, 5)
    assert newest(tmp_path) == (5, [])
    DAMAGES[damage](tmp_path / "step_00000005")
    step, notes = newest(tmp_path)
    assert step == 4 and len(notes) == 1 and "step_00000005" in notes[0]
    DAMAGES[damage](tmp_path / "step_00000004") if damage != "edited state" else truncate(tmp_path / "step_00000004")
    assert newest(tmp_path)[0] is None
    saved(tmp_path, 5)  # the same step again takes the damaged one's place
    assert newest(tmp_path)[0] == 5


@pytest.mark.parametrize("number", sorted(set(checkpoint.UNREADABLE)))
@pytest.mark.parametrize("file", [checkpoint.TENSORS, checkpoint.STATE])
def test_one_that_the_disk_does_not_give_back_is_passed_over(tmp_path, monkeypatch, number, file):
    """A bad sector under the newest checkpoint once ended every start, though the one before it was whole."""
    saved(tmp_path, 4, 5)
    real = Path.read_text, checkpoint.sha256_file
    bad = str(tmp_path / "step_00000005" / file)

    def failing(read):
        def reading(path, *words, **more):
            if str(path) == bad:
                raise OSError(number, "no", bad)
            return read(path, *words, **more)

        return reading

    monkeypatch.setattr(Path, "read_text", failing(real[0]))
    monkeypatch.setattr(checkpoint, "sha256_file", failing(real[1]))
    step, notes = newest(tmp_path)
    assert step == 4 and len(notes) == 1 and "cannot be read" in notes[0]


def test_a_damaged_one_does_not_count_as_one_of_the_two_that_are_kept(tmp_path):
    saved(tmp_path, 4, 5)
    truncate(tmp_path / "step_00000005")
    assert newest(tmp_path)[0] == 4
    saved(tmp_path, 6)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step_00000006", "step_00000004"]


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path):
    saved(tmp_path, 4)
    scrap = tmp_path / ".step_00000005.abc.tmp"
    shutil.copytree(tmp_path / "step_00000004", scrap)
    assert newest(tmp_path) == (4, []) and not scrap.exists()


def test_a_full_disk_leaves_the_earlier_ones(tmp_path, monkeypatch):
    saved(tmp_path, 4, 5)

    def full(path, tensors, metadata=None):
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        saved(tmp_path, 6)
    assert newest(tmp_path) == (5, []) and len(list(tmp_path.iterdir())) == 2


def test_load_names_the_damaged_file(tmp_path):
    saved(tmp_path, 4)
    truncate(tmp_path / "step_00000004")
    with pytest.raises(InputError, match="tensors.safetensors"):
        checkpoint.load(tmp_path / "step_00000004")
