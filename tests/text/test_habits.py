"""The habit rules against labelled answers: their precision and recall are facts that the docs state."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from athanor.text import habits

FOLDER = Path(__file__).parent / "habits"
NAMES = ("identity_leak", "hedge_opening", "refusal_opening", "truncated")
DOCS = Path(__file__).parents[2] / "docs/training.md"
# Of all answers, and of the half that was labelled before the rules were tuned and not looked at since.
MINIMA = {"all": (0.97, 0.95), "held_out": (0.94, 0.90)}


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def figures(name: str, part: str) -> tuple[float, float]:
    """(precision, recall) of a rule."""
    judge = getattr(habits, name)
    mine = [row for row in rows(name) if part in ("all", row["part"])]
    found = [row for row in mine if judge(row["text"])]
    right = sum(row["label"] for row in found)
    return right / len(found), right / sum(row["label"] for row in mine)


@pytest.mark.parametrize("name", NAMES)
def test_the_labelled_set_is_large_and_divided_in_halves(name):
    labelled = rows(name)
    texts = [row["text"] for row in labelled]
    assert len(texts) == len(set(texts))
    for label in (True, False):
        parts = [row["part"] for row in labelled if row["label"] is label]
        assert len(parts) >= 60 and abs(parts.count("held_out") - parts.count("tuning")) <= 1


@pytest.mark.parametrize("part", MINIMA)
@pytest.mark.parametrize("name", NAMES)
def test_precision_and_recall(name, part):
    precision, recall = figures(name, part)
    assert (precision, recall) >= MINIMA[part] and recall >= MINIMA[part][1], (precision, recall)


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_state_these_figures(name):
    cells = [f"{value:.3f}" for part in ("all", "held_out") for value in figures(name, part)]
    assert f"| `{name}` | {' | '.join(cells)} |" in DOCS.read_text(encoding="utf-8")


def test_a_substring_search_would_not_pass():
    facts = [row for row in rows("identity_leak") if "openai" in row["text"].lower()]
    assert sum(not row["label"] for row in facts) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_any_content_are_judged_and_quickly(name):
    judge = getattr(habits, name)
    started = time.process_time()
    short = ("", " ", "\n\n", "*", "```", "\u2581\x00")
    for text in (*short, "a" * 100_000, "I am " * 20_000, "as ChatGPT " * 20_000, '"' * 9_999, "(" * 9_999):
        assert judge(text) in (True, False)
    assert time.process_time() - started < 20  # under 2 s on a free core; quadratic time was minutes


@pytest.mark.parametrize(
    "answer",
    [
        *('def has_buffer(items):\n    return "buffer" in items', "303 See Other", "(-15, '')", "b'\\x00\\x01\\t'"),
        *("คนทำขนมปังเปิดประตูและผู้หญิงนับปลาใส่ตะกร้าที่ตลาดริมทะเล", "पुराना शहर समुद्र के किनारे धीरे से जागता है और नावें चलती हैं।"),
        "старый город у моря просыпается медленно и лодки стучат о причал",
    ],
)
def test_whole_answers_that_once_counted_as_cut(answer):
    assert not habits.truncated(answer)
