"""The journal survives kills and never doubles a point."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from athanor.base.artifacts import write_json
from athanor.runtime.journal import Journal, alive, live
from tests.runtime.view import ROOT, environment


def rows(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_torn_last_line_is_cut_at_the_next_open(tmp_path):
    journal = Journal(tmp_path)
    journal.scalars(0, {"loss": 2.0})
    journal.scalars(1, {"loss": 1.0})
    journal.close("KILLED")
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"t": 1, "s": 2, "m": {"lo')
    again = Journal(tmp_path)
    again.scalars(2, {"loss": 0.5})
    again.close("FINISHED")
    assert [row["s"] for row in rows(tmp_path)] == [0, 1, 2]


def test_resumed_steps_are_logged_once(tmp_path):
    first = Journal(tmp_path)
    for step in range(5):
        first.scalars(step, {"loss": float(step)})
    first.close("KILLED")
    again = Journal(tmp_path)
    for step in range(3, 8):  # resumed from the checkpoint at step 3
        again.scalars(step, {"loss": float(step)})
        if step == 6:
            again.scalars(step, {"val": 1.0})
    again.close("FINISHED")
    assert [row["s"] for row in rows(tmp_path) if "loss" in row["m"]] == list(range(8))
    assert [row["s"] for row in rows(tmp_path) if "val" in row["m"]] == [6]


def test_after_a_way_back_steps_are_logged_again_and_the_new_ones_count(tmp_path):
    first = Journal(tmp_path)
    for step in range(1, 7):
        first.scalars(step, {"loss": float(step)})
    first.event("note", text="stays")
    first.rewind(3, reason="a spike")
    first.scalars(3, {"loss": -3.0})  # the step it went back to is as it was
    first.scalars(4, {"loss": 40.0})
    first.close("KILLED")
    again = Journal(tmp_path)
    for step in range(2, 6):  # resumed after the way back: step 5 is the first that the new way has not logged
        again.scalars(step, {"loss": 10.0 * step})
    again.close("FINISHED")
    written = rows(tmp_path)
    assert [(row["s"], row["m"]["loss"]) for row in written if "m" in row][6:] == [(4, 40.0), (5, 50.0)]
    assert [row["m"]["loss"] for row in live(written) if "m" in row] == [1, 2, 3, 40, 50]
    assert [row["event"] for row in live(written) if "event" in row] == ["note", "rollback"]


def test_non_finite_values_stay_valid_json(tmp_path):
    journal = Journal(tmp_path)
    journal.scalars(0, {"loss": float("nan"), "norm": float("inf")})
    journal.close("FINISHED")
    assert rows(tmp_path)[0]["m"] == {"loss": "nan", "norm": "inf"}
    assert float("nan") != float(rows(tmp_path)[0]["m"]["loss"])


def test_a_line_that_is_no_json_is_passed_over(tmp_path):
    """A power loss can leave a block of zeros; the run has to be resumable all the same."""
    journal = Journal(tmp_path)
    journal.scalars(0, {"loss": 2.0})
    journal.close("KILLED")
    with open(tmp_path / "journal.jsonl", "ab") as file:
        file.write(b"\0" * 100 + b"\n")
    again = Journal(tmp_path)
    again.scalars(0, {"loss": 2.0})
    again.scalars(1, {"loss": 1.0})
    assert (tmp_path / "journal.jsonl").read_bytes().count(b'"s": ') == 2


def test_alive_is_told_by_the_lock_of_the_writer(tmp_path):
    """A process id alone is not enough: after a reboot it is another process's."""
    write_json(tmp_path / "meta.json", {"pid": os.getpid()})
    assert not alive(tmp_path)
    code = "import sys, time; from pathlib import Path; from athanor.runtime.journal import Journal\n"
    code += "journal = Journal(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "open\n"
    write_json(tmp_path / "meta.json", {"pid": writer.pid})
    assert alive(tmp_path)
    writer.kill()
    writer.wait()
    assert not alive(tmp_path)
    write_json(tmp_path / "meta.json", {"pid": os.getpid()})
    assert not alive(tmp_path)
    journal = Journal(tmp_path)
    assert alive(tmp_path)
    journal.close("FINISHED")
    assert not alive(tmp_path)


@pytest.mark.parametrize("where", ["event", "end"])
def test_texts_are_written_without_secrets_and_scalars_as_they_are(tmp_path, where):
    journal = Journal(tmp_path)
    journal.scalars(3, {"loss": 0.1})
    if where == "event":
        journal.event("note", text="see http://me:secret@host", n=1.5)
    else:
        journal.close("FAILED", error="see http://me:secret@host", metrics={"a": 1.5})
    text = "".join(file.read_text() for file in tmp_path.iterdir() if file.is_file())
    assert "see http://***@host" in text and "secret" not in text and "1.5" in text and '"m": {"loss": 0.1}' in text
