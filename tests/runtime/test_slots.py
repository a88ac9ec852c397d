"""Slots: one configuration, one directory, one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from athanor.base.errors import InputError
from athanor.runtime.locks import try_lock
from athanor.runtime.slots import Code, Slot

HOLD = """
import sys, time
from pathlib import Path
from athanor.runtime.slots import Slot
with Slot(Path(sys.argv[1]), {"lr": 1}) as slot:
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
    slot.mark_done()
"""


def test_other_facts_are_another_slot(tmp_path):
    with Slot(tmp_path, {"lr": 1}) as one, Slot(tmp_path, {"lr": 2}) as two:
        assert one.path != two.path
        one.mark_done()
    with Slot(tmp_path, {"lr": 1}) as again, Slot(tmp_path, {"lr": 2}) as other:
        assert again.done and not other.done


def test_second_process_waits_for_the_holder_and_finds_its_work_done(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "1.5"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    started = time.monotonic()
    with Slot(tmp_path, {"lr": 1}) as slot:
        assert slot.done and time.monotonic() - started > 0.8
    child.wait()


def test_lock_dies_with_its_process(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "60"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.wait()
    started = time.monotonic()
    with Slot(tmp_path, {"lr": 1}) as slot:
        assert not slot.done and time.monotonic() - started < 5


OLD, NEW = Code("m", {"a.py": "1", "b.py": "1"}), Code("m", {"a.py": "1", "b.py": "2", "c.py": "1"})
FACTS = {"params": {"pretrain": {"lr": 1, "batch_tokens": 64}}}


def worked(folder, seconds, *, done=False, **kind):
    """A slot in which OLD trained 30 steps in so many seconds."""
    with Slot(folder, FACTS, code=OLD, **kind) as slot:
        (slot.path / "step_00000030").mkdir()
        (slot.path / "step_00000030" / "state.json").write_text("{}")
        if done:
            slot.mark_done()
    (slot.path / "seconds").write_text(str(seconds))
    return slot.path


@pytest.mark.parametrize(
    "kind", [{}, {"shared": True}, {"shared": True, "done": True}, {"shared": True, "pinned": True}]
)
def test_other_code_asks_before_it_touches_ten_minutes_of_work(tmp_path, kind):
    """A bug fix once began a training of weeks at step 0, because the code was a part of the slot's name."""
    path = worked(tmp_path, 7260, **kind)
    kind.pop("done", None)
    with pytest.raises(InputError) as error, Slot(tmp_path, FACTS, code=NEW, **kind):
        pass
    for text in ("b.py, c.py", "30 steps (1,920 tokens)", "2 h 01 min", "athanor slots adopt", "athanor slots drop"):
        assert text in str(error.value)
    assert str(error.value).startswith(str(path)) and (path / "step_00000030" / "state.json").is_file()
    with Slot(tmp_path, FACTS, code=OLD, **kind) as slot:  # the change undone
        assert slot.path == path and slot.digests == (OLD.digest,)


@pytest.mark.parametrize(("seconds", "done"), [(599, False), (7260, True)])
def test_little_or_finished_work_of_other_code_is_done_anew_and_that_is_said(tmp_path, seconds, done):
    path, notes = worked(tmp_path, seconds, done=done), []
    with Slot(tmp_path, FACTS, code=NEW, note=notes.append) as slot:
        assert slot.path == path and not slot.done and not list(path.glob("step_*")) and slot.digests == (NEW.digest,)
    assert len(notes) == 1 and "begins anew" in notes[0] and "b.py, c.py" in notes[0]


def test_a_finished_slot_that_somebody_pinned_is_not_done_anew_without_a_question(tmp_path):
    path = worked(tmp_path, 7260, done=True)
    (path / "PINNED").touch()
    with pytest.raises(InputError, match="30 steps"), Slot(tmp_path, FACTS, code=NEW):
        pass


def test_a_slot_without_work_is_taken_over_without_a_word(tmp_path):
    with Slot(tmp_path, FACTS, code=OLD) as slot:
        (slot.path / "choices.json").write_text("{}")
    (slot.path / "seconds").write_text("9999")
    notes = []
    with Slot(tmp_path, FACTS, code=NEW, note=notes.append):
        assert not notes and (slot.path / "choices.json").is_file()


def test_work_of_an_unknown_time_is_not_little(tmp_path):
    (worked(tmp_path, 1) / "seconds").write_bytes(b"\0" * 9)  # what a power loss may leave
    with pytest.raises(InputError, match="an unknown time"), Slot(tmp_path, FACTS, code=NEW):
        pass


def test_time_at_work_adds_up_and_time_between_does_not_count(tmp_path):
    for begin in (0, 100):
        with Slot(tmp_path, FACTS, code=OLD) as slot:
            slot.tick(time.monotonic() + 100)
        assert begin + 100 <= float((slot.path / "seconds").read_text()) < begin + 105


def test_a_slot_that_was_begun_half_is_begun_once_more(tmp_path):
    path = worked(tmp_path, 7260)
    (path / "facts.json").unlink()  # as a kill leaves it that comes while the slot begins anew
    with Slot(tmp_path, FACTS, code=NEW) as slot:
        assert not list(path.glob("step_*")) and slot.digests == (NEW.digest,)


def test_a_slot_removed_while_one_waits_for_it_is_no_lock(tmp_path):
    """The lock of an unlinked file once let two processes into one slot."""
    with Slot(tmp_path, FACTS) as first:
        other = Slot(tmp_path, FACTS)
        thread = threading.Thread(target=other.__enter__)
        thread.start()
        time.sleep(0.3)  # until it waits
        os.rename(first.path, first.path.with_name(".gone"))
    thread.join(10)
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(first.path / "lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert (first.path / "facts.json").is_file()
    other.release()


def test_the_lock_of_a_file_removed_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """Two would have it otherwise: the next one locks the new file of that name."""
    real, path = os.open, tmp_path / "lock"

    def opened(name, *words, **more):
        handle = real(name, *words, **more)
        os.unlink(name)
        return handle

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opened)
        with try_lock(path) as free:
            assert not free
    with try_lock(path) as free:
        assert free


def test_prune_beside_a_starting_stage(tmp_path, monkeypatch):
    """It died of a raw FileNotFoundError when the folder went between its mkdir and its open."""
    real, removed = os.open, []

    def opened(path, *words, **more):
        if str(path).endswith("/lock") and len(removed) < 3:
            removed.append(path)
            shutil.rmtree(Path(path).parent)
        return real(path, *words, **more)

    monkeypatch.setattr(os, "open", opened)
    with Slot(tmp_path, FACTS) as slot:
        assert len(removed) == 3 and (slot.path / "facts.json").is_file()
