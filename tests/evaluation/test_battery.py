"""The battery: every item counts once, wrong endings are seen, scores stand beside floors, two processes agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from athanor.base.errors import GateError, InputError
from athanor.evaluation.battery import ask
from athanor.evaluation.pages import samples_markdown
from athanor.evaluation.report import answer_rows, health, repeats, score_table, table_rows
from athanor.text.conversations import Item, Message
from tests.evaluation.tiny import always_says, items, make_model, silence

ROOT = Path(__file__).resolve().parents[2]


def answers(model, tokenizer, name="sft", max_new_tokens=12):
    return ask(name, model, tokenizer, items(), max_new_tokens=max_new_tokens, batch_rows=3, workers=1)


def test_a_model_that_stops_at_once_gives_empty_wrong_answers(tokenizer):
    said = answers(always_says(tokenizer, tokenizer.stop), tokenizer)
    assert [a.text for a in said] == [""] * 8 and not any(a.correct for a in said)
    rates = health(said)
    assert (rates["stop"]["rate"], rates["empty"]["rate"], rates["fake_turn"]["rate"]) == (1, 1, 0)
    table = score_table(items(), said, 1)
    assert table["all"]["n"] == 8 and table["all"]["score"] == 0


@pytest.mark.parametrize("role", ["user", "system", "assistant", "bos"])
def test_a_turn_made_up_by_the_model_is_seen_and_is_not_a_stop(tokenizer, role):
    said = answers(always_says(tokenizer, getattr(tokenizer, role)), tokenizer)
    rates = health(said)
    assert (rates["fake_turn"]["rate"], rates["stop"]["rate"]) == (1, 0)


def test_the_end_of_a_document_is_no_stop_either(tokenizer):
    rates = health(answers(always_says(tokenizer, tokenizer.eos), tokenizer))
    assert (rates["fake_turn"]["rate"], rates["stop"]["rate"]) == (0, 0)


def test_a_model_that_repeats_itself_is_cut_and_seen(tokenizer):
    (letter,) = tokenizer.encode("e")
    said = answers(always_says(tokenizer, letter), tokenizer)
    assert {a.text for a in said} == {"e" * 12} and {a.tokens for a in said} == {12}
    rates = health(said)
    assert (rates["repetition"]["rate"], rates["stop"]["rate"]) == (1, 0)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], False),
        ([5, 5, 5], False),
        ([5, 5, 5, 5], True),
        ([1, 2, 1, 2, 1, 2], False),
        ([9, 1, 2, 1, 2, 1, 2, 1, 2], True),
        ([1, 2, 1, 2, 1, 2, 1], False),
        (list(range(8)) * 4, True),
        (list(range(8)) * 4 + [1], True),
        (list(range(9)) * 4, False),  # longer than the longest n-gram looked for
        ([1, 1, 1, 2] * 3 + [1], False),
        ([3, 1, 3, 1, 3, 2, 3, 1, 3, 1], False),
    ],
)
def test_repeats(ids, found):
    assert repeats(ids) is found


def test_a_prompt_longer_than_the_context_names_its_item(tokenizer):
    long = Item("sum", (Message("user", "word " * 200),), "numeric", "1", ("1",), ("2", "3"))
    with pytest.raises(InputError, match=f"sum/{long.id}"):
        ask("sft", make_model(tokenizer), tokenizer, [long], max_new_tokens=5, batch_rows=4, workers=1)


def test_scores_stand_beside_floor_and_error(tokenizer):
    said = answers(silence(make_model(tokenizer), tokenizer), tokenizer)
    right = {item.id: item.category in ("sum", "copy") for item in items()}
    said = [replace(answer, correct=right[answer.item]) for answer in said]
    table = score_table(items(), said, 1)
    assert list(table) == ["code", "copy", "list", "sum", "all"]
    assert (table["sum"]["n"], table["sum"]["correct"], table["sum"]["score"]) == (2, 2, 1.0)
    # "Repeat: cat" is answered by what stands behind its colon, so that category proves nothing.
    assert table["copy"]["floor"] == 1.0 and table["copy"]["floor_answer"] == "second piece cut at ':'"
    assert table["copy"]["margin_stderrs"] == 0
    # "6" answers one of the two sums; name and number of the question, put into one template, make both functions.
    assert table["sum"]["floor"] == 0.5 and table["code"]["floor"] == 1.0
    assert table["code"]["floor_answer"].startswith(r"'def _(x):\n    return x + _' with ")
    assert all(row["stderr"] > 0 for row in table.values())  # 2 of 2 is not certainty
    assert table["all"]["floor"] == 7 / 8 and table["all"]["score"] == 0.5
    rows = table_rows({"sft": table})
    assert len(rows) == 5 and all(list(row) == list(rows[0]) for row in rows)
    # Two categories all right and two all wrong: no chance within them, and yet two items each prove little.
    assert 0.2 < rows[0]["sft_low"] < 0.45 and 0.55 < rows[0]["sft_high"] < 0.8
    assert table["sum"]["low"] < 0.2 and table["sum"]["high"] == 1.0
    assert [row["category"] for row in rows] == sorted(table) and rows[0]["sft"] == 0.5  # "all"


def test_every_item_has_to_be_scored_exactly_once(tokenizer):
    said = answers(always_says(tokenizer, tokenizer.stop), tokenizer)
    for wrong in (said[:-1], [*said, said[0]], [*said[:-1], said[0]], [*said[:-1], replace(said[-1], item="other")]):
        with pytest.raises(GateError, match="battery"):
            score_table(items(), wrong, 1)


def test_samples_quote_whatever_a_model_writes(tokenizer):
    said = answers(always_says(tokenizer, tokenizer.stop), tokenizer)
    nasty = [replace(answer, text="# heading\n<script>\n\n```", stopped=False) for answer in said]
    page = samples_markdown(items(), nasty, 1)
    assert page.count("    # heading") == 4 and "\n# heading" not in page and "\n<script>" not in page
    assert page.count("did not stop by itself") == 4
    assert "    (nothing)" in samples_markdown(items(), said, 2)
    blank = [replace(answer, text="\n" * 30) for answer in said]
    page = samples_markdown(items(), blank, 1)
    assert page.count("    (30 white-space characters)") == 4 and "\n\n\n" not in page
    long = [replace(answer, text="x" * 9000 + "\ny" * 50) for answer in said]
    page = samples_markdown(items(), long, 1)
    assert page.count("    (31 more lines)") == 4 and max(map(len, page.splitlines())) < 400


def test_rows_are_sorted_and_complete(tokenizer):
    said = answers(always_says(tokenizer, tokenizer.stop), tokenizer, "sft")
    base = answers(always_says(tokenizer, tokenizer.stop), tokenizer, "base")
    rows = answer_rows(items(), [*said, *base])
    assert rows == answer_rows(items(), [*base[::-1], *said])
    assert [(r["category"], r["item"], r["model"]) for r in rows] == sorted(
        (r["category"], r["item"], r["model"]) for r in rows
    )
    assert rows[0]["prompt"][-1]["role"] == "user" and rows[0]["expected"]
    assert rows[0]["documents_dropped"] is None
    counted = answer_rows(items(), [*said, *base], {rows[0]["item"]: 3}, {})
    assert [row["documents_dropped"] for row in counted[:3]] == [3, 3, 0]
    assert {row["conversations_dropped"] for row in counted} == {0}
