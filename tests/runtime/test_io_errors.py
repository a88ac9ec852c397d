"""A small sample of `python -m tools.io_errors`: one call of the C library fails, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.base.artifacts import read_json, sha256_file
from athanor.base.strict import read_yaml
from athanor.cli import cli, slots
from athanor.runtime.terminal import in_words
from tests.e2e.clone import ROOT, environment
from tests.runtime.shippers import Checkout
from tests.runtime.toy_pipeline import place_stages
from tools.io_errors.__main__ import sample

compiled = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and shutil.which("cc")), reason="needs Linux and a C compiler"
)


def tool(tmp_path: Path, *words: str) -> tuple[int, str]:
    """Injections without a problem, and what was said."""
    command = [sys.executable, "-m", "tools.io_errors", "--operations", *words]
    env = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert "0 hand repairs, 0 problems" in last
    return int(last.split(" injections")[0]), done.stdout


@compiled
def test_a_sample_of_failed_calls_in_store_and_journal(tmp_path: Path) -> None:
    assert tool(tmp_path, "store,journal", "--most", "3")[0] >= 30


@compiled
def test_a_sample_of_failed_calls_in_the_shipper_is_told_in_sentences(tmp_path: Path) -> None:
    """MLflow logged each error of its database with a traceback; a record that could not be read came out as another."""
    inputs = Checkout(tmp_path / "inputs")
    inputs.closed("clean-1", "clean", steps=5)
    inputs.closed("pretrain-1", steps=20)
    injections, said = tool(tmp_path, "ship", "--most", "1", "--inputs", str(inputs.path))
    assert injections >= 7 and "mlflow.db" in said and "ship.json" in said


def test_a_sample_meets_every_kind_of_file_before_it_meets_one_twice() -> None:
    files = ["journal"] * 90 + ["state", "weights", "weights", "end"]
    assert sample(files, 0, 0) == sample(files, 94, 5) == [(number, "") for number in range(1, 95)]
    assert sample(files, 4, 0) == [(1, "journal"), (1, "state"), (1, "weights"), (1, "end")]
    assert sample(files, 2, 1) == [(1, "weights"), (1, "end")]  # goes on where the fault before it ended


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_bad_disk_is_told_in_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run(args: object) -> int:
        raise OSError(number, os.strerror(number), "data/x")

    monkeypatch.setattr("athanor.cli.slots.run", run)
    monkeypatch.setattr(sys, "argv", ["athanor", "slots"])
    assert cli.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("data/x: ") and "Fix: " in said and len(said.splitlines()) == 1
    assert in_words(ConnectionError(errno.ECONNRESET, "no", "x")) is None


def test_the_disks_error_names_the_file_that_was_meant(tmp_path: Path) -> None:
    """A failed read named the working directory, and a failed rename the file of the moment."""
    for words, error in (
        ("data/x: the disk is full", OSError(errno.ENOSPC, "full", "data/.x.ab12.tmp", None, "data/x")),
        (f"a file that the system does not name, perhaps below {Path.cwd()}: the disk", OSError(errno.EIO, "bad")),
    ):
        assert (told := in_words(error)) is not None and told.startswith(words)
    for read in (read_json, read_yaml, sha256_file):
        with pytest.raises(OSError) as caught:
            read("/proc/self/mem")  # opens, and its first page cannot be read
        assert caught.value.errno == errno.EIO and caught.value.filename == "/proc/self/mem"


def test_a_stage_tells_an_input_output_error_without_a_traceback(tmp_path: Path) -> None:
    code = "\n".join(
        [
            "import errno",
            "from athanor.runtime.process import stage_main",
            "def run(run): raise OSError(errno.EIO, 'Input/output error', 'data/x')",
            "if __name__ == '__main__': stage_main('toy', run)",
        ]
    )
    place_stages(tmp_path, toy=code)
    env = environment(PYTHONPATH=str(ROOT), ATHANOR_TRACKING="off")
    done = subprocess.run([sys.executable, "-m", "stages.toy"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "data/x: the disk cannot be read or written here" in done.stderr and "Fix: see dmesg" in done.stderr


def test_prune_that_cannot_rename_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of a temporary name stayed, and no later prune took it."""
    slot = tmp_path / ".athanor" / "slots" / "pretrain" / "ab12"
    slot.mkdir(parents=True)
    (slot / "DONE").touch()
    (slot / "facts.json").write_text("{}")
    (slot / "lock").touch()  # as in every slot; made later, it would be a sign of work in the meantime
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    (found,) = slots.find(tmp_path)

    def rename(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(OSError):
            slots.remove(found)
    assert [path.name for path in slot.parent.iterdir()] == ["ab12"]
    assert slots.remove(found) and list(slot.parent.iterdir()) == []


def test_a_command_whose_reader_has_left_does_not_say_that_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """`athanor slots prune | head -1` ended with 0 and had left slots."""

    def run(args: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("athanor.cli.slots.run", run)
    monkeypatch.setattr(sys, "argv", ["athanor", "slots"])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, open(os.devnull, "w"))
    assert cli.main() == 1
