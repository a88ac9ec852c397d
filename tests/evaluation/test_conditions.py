"""Ways to decode: which items, the paired cost, and the finding that a penalty hides what a model knows."""

from __future__ import annotations

from dataclasses import replace

from athanor.decoding.sampling import Sampling
from athanor.evaluation.battery import Output, ask, score_outputs
from athanor.evaluation.report import (
    ALL,
    GREEDY_NAME,
    battery_facts,
    by_difficulty,
    comparison,
    condition_rows,
    development_sample,
    findings,
    health,
    truncation,
)
from tests.evaluation.tiny import all_kinds, always_says, make_model, silence


def said(items, right):
    """Answers to `items`, those in `right` with the accepted text."""
    outputs = [Output(text=item.accepted[0] if item.id in right else "nonsense") for item in items]
    return score_outputs("sft", items, outputs, workers=1)


def spoken():
    return [replace(item, split="development") for item in all_kinds() if item.kind not in ("likelihood", "code")]


def test_items_are_for_development_and_answered_in_words():
    items = all_kinds()
    assert {item.split for item in items} == {"development", "test"}
    found = development_sample(items, 99, 1)
    assert found and all(item.split == "development" and item.kind != "likelihood" for item in found)
    assert len(development_sample(spoken(), 3, 1)) == 3 and development_sample(spoken(), 3, 1) == development_sample(
        spoken()[::-1], 3, 1
    )
    assert len({tuple(item.id for item in development_sample(spoken(), 3, seed)) for seed in range(9)}) > 3


def test_a_penalty_that_hurts_is_told_and_one_that_does_not_is_not():
    items = spoken()
    all_right, ids = said(items, {item.id for item in items}), [item.id for item in items]
    tried = {
        GREEDY_NAME: all_right,
        "bad": said(items, set(ids[:1])),
        "mild": said(items, set(ids[:-1])),
        "warm": said(items, set()),
    }
    rows = condition_rows(items, tried, 1)
    assert (
        rows["bad"]["minus_greedy"]["losses"] == len(items) - 1 and rows[GREEDY_NAME]["minus_greedy"]["difference"] == 0
    )
    told = findings(rows, {"bad": 1.3, "mild": 1.1, "warm": 1.0})
    assert len(told) == 1 and "condition bad" in told[0] and "1.3" in told[0]


def test_the_sampler_is_reached_by_the_condition(tokenizer):
    (letter,) = tokenizer.encode("e")
    items, model = spoken(), always_says(tokenizer, letter)
    how = {"max_new_tokens": 8, "batch_rows": 4, "workers": 1, "gold": False}
    stuck = ask("sft", model, tokenizer, items, **how)
    freed = ask("sft", model, tokenizer, items, **how, sampling=Sampling(repetition_penalty=50.0))
    assert health(stuck)["repetition"]["rate"] == 1 and {a.text for a in stuck} == {"e" * 8}
    assert all(not a.text.startswith("eee") for a in freed) and {a.gold_bytes for a in freed} == {0}


def test_habits_are_counted(tokenizer):
    items = spoken()
    texts = ["I am ChatGPT, made by OpenAI.", "I'm not sure what you mean.", "I am Athanor.", ""]
    outputs = [Output(text=text, stopped=text != "", ended=text != "") for text in texts]
    answers = score_outputs("sft", items[:4], outputs, workers=1)
    rates = health(answers)
    assert rates["identity_leak"]["count"] == 1 and rates["hedge"]["count"] == 1
    assert (rates["empty"]["count"], rates["truncated"]["count"], rates["stop"]["count"]) == (1, 1, 3)
    assert sum(row["count"] for row in truncation(answers).values()) == 1
    choices = [item for item in all_kinds() if item.choices]
    compared = score_outputs(
        "sft", choices, [Output(log_likelihoods=(-1.0,) * len(item.choices)) for item in choices], workers=1
    )
    assert health([*answers, *compared]) == rates  # nothing was said, so nothing is counted


def test_all_figures_are_of_the_test_split(tokenizer):
    items = all_kinds()
    model = silence(make_model(tokenizer), tokenizer)
    base = ask("base", model, tokenizer, items, max_new_tokens=6, batch_rows=4, workers=1)
    flip = {item.id for item in items if item.split == "development"}
    sft = [replace(answer, model="sft", correct=answer.item in flip) for answer in base]
    facts = battery_facts(items, {"base": base, "sft": sft}, 1, {items[0].id: 2}, None, {})
    assert facts["battery"]["sft"][ALL]["correct"] == 0 and facts["development"]["sft"]["score"] == 1.0
    assert facts["battery"]["sft"][ALL]["n"] == sum(item.split == "test" for item in items)
    assert facts["paired"]["sft_minus_base"][ALL]["n"] == facts["battery"]["sft"][ALL]["n"]
    assert facts["contamination"]["documents_dropped"] == 2 and facts["contamination"]["conversations_dropped"] is None
    assert facts["contamination"]["items_touched"] == 1 and set(facts["difficulty"]["sft"]) == {"medium"}
    assert comparison(base, base, 1)[ALL]["p"] == 1.0 and by_difficulty(items, base, 1)["medium"]["n"] == len(items)
