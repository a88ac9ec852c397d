"""The file of feedback: what was acknowledged is there afterwards, whatever fails or is killed in between."""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import Mock

import pytest

from athanor.base.errors import InputError
from athanor.serving.feedback import Feedback, Unknown, Unusable
from tests.serving.judging import again, asked, judge
from tests.serving.live import environment


@pytest.fixture
def feedback(tmp_path):
    feedback = Feedback(tmp_path / "new/feedback.jsonl")
    yield feedback
    assert feedback.path.stat().st_mode & 0o777 == 0o600


def test_the_last_row_of_a_message_counts_and_keeps_its_number(feedback):
    answer = asked("What is 3 + 4?", "8")
    first = feedback.record({**answer, "verdict": "down", "correction": "\ud800 7\u2028"})
    assert (first["id"], first["status"]) == (1, "candidate")
    assert judge(feedback, again(answer, "7"), "up") == 2
    kept = feedback.settle(1, "accepted")["correction"]
    for correction, status in ((kept, "accepted"), ("seven", "candidate")):  # the same again changes nothing
        assert judge(feedback, answer, "down", correction) == 1 and feedback.correction(1)["status"] == status
    assert judge(feedback, answer, None) == 1 and feedback.corrections() == []
    assert [row["verdict"] for row in feedback.rows()] == [None, "up"]


def test_what_does_not_fit_is_refused_and_nothing_is_written(feedback):
    for change, why in (
        ({"verdict": "up", "correction": "7"}, "goes with a thumb down"),
        ({"verdict": "down", "correction": " 8 "}, "is the answer itself"),
    ):
        with pytest.raises(InputError, match=why):
            feedback.record({**asked("What is 3 + 4?", "8"), **change})
    with pytest.raises(Unknown, match="there is no correction"):
        feedback.settle(9, "accepted")
    assert feedback.rows() == []


def test_a_deleted_chat_leaves_its_numbers_alone(feedback):
    kept, gone = asked("Stay?", "Yes"), asked("Secret?", "No")
    assert [judge(feedback, answer, "up") for answer in (kept, gone, again(gone, "Never"))] == [1, 2, 3]
    feedback.forget(gone["chat"])
    assert [row["id"] for row in feedback.rows()] == [1] and b"Secret" not in feedback.path.read_bytes()
    assert judge(feedback, gone, "down") == 4


def test_a_torn_line_is_passed_over_and_closed(feedback):
    judge(feedback, asked("Hello?", "Hi"), "up")
    whole = feedback.path.read_bytes()
    for torn in (whole[:-9], b'\n{"id": 7, "chat": "\xff', b"\n" + b"[" * 100_000, b"\nnull", b'\n{"id": "x"}'):
        feedback.path.write_bytes(whole + torn)
        assert judge(feedback, asked("And?", "No"), "up") == 2 and len(feedback.rows()) == 2
        assert feedback.path.read_bytes().startswith(whole + torn + b"\n")
    feedback.forget(feedback.rows()[0]["chat"])  # the torn one may be of that chat
    assert torn not in feedback.path.read_bytes() and len(feedback.rows()) == 1


def test_a_failed_write_is_reported_and_harms_no_row(feedback, monkeypatch):
    judge(feedback, asked("Hello?", "Hi"), "up")
    with monkeypatch.context() as patch, pytest.raises(Unusable, match="No space left on device"):
        patch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
        judge(feedback, asked("And?", "No"), "up")
    assert judge(feedback, asked("Well?", "No"), "up") >= 2 and feedback.rows()[0]["answer"] == "Hi"


WRITER = """
import itertools, sys
from athanor.serving.feedback import Feedback
from tests.serving.judging import asked, judge
feedback = Feedback(sys.argv[1])
for number in itertools.count():
    answer = asked("Well?", "a word " * 2000) | {"message": f"{sys.argv[2]} {number}"}
    print(judge(feedback, answer, "up"), flush=True)
"""


def test_writers_side_by_side_that_are_killed_lose_nothing_acknowledged(feedback):
    command = [sys.executable, "-c", WRITER, feedback.path]
    writers = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, env=environment(), text=True) for name in "ab"
    ]
    lines = [next(writer.stdout) for _ in range(20) for writer in writers]
    for writer in writers:
        writer.kill()
        lines += writer.communicate()[0].splitlines(keepends=True)
    numbers = [int(line) for line in lines if line.endswith("\n")]
    assert len(numbers) == len(set(numbers)) and set(numbers) <= {row["id"] for row in feedback.rows()}
