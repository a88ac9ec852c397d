"""Log-likelihoods against the plain sum over the network's own probabilities; choices as lm-evaluation-harness takes them."""

from __future__ import annotations

import math

import pytest
import torch

from athanor.evaluation import battery
from athanor.evaluation.battery import ask
from athanor.evaluation.likelihood import choice_log_likelihoods, gold_bits, item_pairs
from athanor.evaluation.report import ALL, gold_table
from athanor.evaluation.scoring import choose
from athanor.text.conversations import Item, Message
from athanor.tokenizer.chat import prompt_ids
from tests.evaluation.tiny import all_kinds, always_says, make_model


@torch.no_grad()
def plain(model, ids: list[int], first: int) -> float:
    """Sum of log-probabilities of ids[first:], one forward pass, float64."""
    logits = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    return sum(float(logits[place - 1, ids[place]]) for place in range(first, len(ids)))


def choice_item(context: str, *choices: str) -> Item:
    rest = tuple(choices[1:])
    return Item("c", (Message("user", context),), "likelihood", choices[0], choices[:1], rest, choices=choices)


def test_choices_are_scored_after_their_context(tokenizer):
    model = make_model(tokenizer)
    items = [
        choice_item("The value of", "the node", "a string value"),
        choice_item("x = 3\n", "return x", "x return y"),
    ]
    found = choice_log_likelihoods(model, tokenizer, items)
    for item, between, values in zip(items, (" ", "\n"), found, strict=True):
        bare = item.prompt[0].content.rstrip()
        for choice, value in zip(item.choices, values, strict=True):
            whole = tokenizer.encode(bare + between + choice)
            context = tokenizer.encode(bare)
            assert (
                whole[: len(context)] == context
            )  # a tokenizer that joined the two would be scored from the same place
            assert value == pytest.approx(plain(model, [tokenizer.bos, *whole], 1 + len(context)), abs=2e-3)
    assert choice_log_likelihoods(model, tokenizer, []) == []


def test_a_choice_is_what_follows_the_ids_of_the_bare_context(tokenizer):
    (pair,) = item_pairs(tokenizer, choice_item("The value", "of"), ["of"])
    assert pair.context == [tokenizer.bos, *tokenizer.encode("The value")] and pair.continuation
    assert tokenizer.decode([*pair.context[1:], *pair.continuation]) == "The value of"
    (pair,) = item_pairs(tokenizer, choice_item("x = 3\n", "return x"), ["return x"])
    assert tokenizer.decode([*pair.context[1:], *pair.continuation]) == "x = 3\nreturn x"


def test_acc_and_acc_norm_differ_as_they_should():
    values, choices = (-10.0, -12.0, -12.0), ("ab", "a choice of words", "another choice 17")
    assert choose(values, choices, normalised=False) == 0
    assert choose(values, choices, normalised=True) == 1  # 12 nats over 17 characters, the first of two equals
    assert choose((-1.0, -1.0), ("aa", "bb"), normalised=False) == 0
    values, choices = (-4.0, -3.0, -3.0, -5.0), ("abcd", "a", "abc", "abcde")
    assert (choose(values, choices, normalised=False), choose(values, choices, normalised=True)) == (1, 0)


def test_the_whole_path_takes_the_likeliest(tokenizer, monkeypatch):
    items = [item for item in all_kinds() if item.kind == "likelihood"]
    wanted = {item.id: tuple(-1.0 if choice == item.answer else -9.0 for choice in item.choices) for item in items}
    monkeypatch.setattr(
        battery, "choice_log_likelihoods", lambda model, tokenizer, items, threads: [wanted[item.id] for item in items]
    )
    said = ask("m", make_model(tokenizer), tokenizer, items, max_new_tokens=4, batch_rows=2, workers=1)
    assert all(answer.correct and answer.correct_norm and not answer.spoken for answer in said)
    monkeypatch.undo()
    said = ask("m", make_model(tokenizer), tokenizer, items, max_new_tokens=4, batch_rows=2, workers=1)
    assert {answer.text for answer in said} <= {choice for item in items for choice in item.choices}


def test_gold_bits_are_those_of_the_accepted_answer_after_the_prompt(tokenizer):
    model, items = make_model(tokenizer), all_kinds()
    bits, sizes = gold_bits(model, tokenizer, items)
    for item, found, size in zip(items, bits, sizes, strict=True):
        answer = item.accepted[0]
        if item.kind == "likelihood":
            context = tokenizer.encode(item.prompt[-1].content)
            ids, first = [tokenizer.bos, *tokenizer.encode(f"{item.prompt[-1].content} {answer}")], 1 + len(context)
        else:
            prompt = prompt_ids(tokenizer, item.prompt)
            ids, first = [*prompt, *tokenizer.encode(answer)], len(prompt)
        assert found == pytest.approx(-plain(model, ids, first) / math.log(2), rel=1e-4) and size == len(
            answer.encode()
        )


def test_gold_falls_before_an_answer_is_right(tokenizer):
    """A model that leans to the right letter scores no item, but its bits per byte tell it from one that does not."""
    (e,), (o,) = tokenizer.encode("e"), tokenizer.encode("o")
    item = Item("c", (Message("user", "Say it"),), "exact", "eeee", ("eeee",), ("e", "x"))
    costs = []
    for letter in (e, o):
        said = ask("m", always_says(tokenizer, letter), tokenizer, [item], max_new_tokens=9, batch_rows=1, workers=1)
        assert not said[0].correct
        costs.append(gold_table(said)[ALL]["bpb"])
    assert costs[0] < 0.5 * costs[1]
