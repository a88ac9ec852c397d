"""Scores of given continuations, against sums written out id by id."""

from __future__ import annotations

import pytest
import torch

from athanor.base.errors import InputError
from athanor.evaluation import likelihood
from athanor.evaluation.likelihood import Pair
from tests.evaluation.tiny import make_model, write_tiny_tokenizer

CONTEXT = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    tokenizer = write_tiny_tokenizer(tmp_path_factory.mktemp("likelihood") / "tokenizer")
    return make_model(tokenizer, context=CONTEXT), tokenizer


@torch.inference_mode()
def by_hand(model, given, asked) -> float:
    """One forward pass for each id that is asked for, each over the ids before it."""
    ids, total = [*given], 0.0
    for token in asked:
        logits = model(torch.tensor([ids[-CONTEXT:]]))[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        ids.append(token)
    return total


def test_spaces_at_the_end_of_a_context_are_scored_with_the_choice(world):
    _, tokenizer = world
    assert likelihood.choice_pairs(tokenizer, "a b  ", ["c"]) == likelihood.choice_pairs(tokenizer, "a b", ["  c"])
    [pair] = likelihood.choice_pairs(tokenizer, "", ["text"])
    assert pair == Pair([tokenizer.bos], tokenizer.encode("text"))


def test_ids_as_context_are_taken_as_they_are(world):
    model, tokenizer = world
    prompt = [tokenizer.bos, tokenizer.user, *tokenizer.encode("Hello"), tokenizer.stop, tokenizer.assistant]
    [score] = likelihood.choice_scores(model, tokenizer, prompt, ["Yes"])
    assert score == pytest.approx(by_hand(model, prompt, tokenizer.encode("Yes")), abs=1e-4)


def test_a_long_context_loses_its_beginning(world):
    model, tokenizer = world
    ids = tokenizer.encode("for name in names: print(name) " * 9)
    assert len(ids) > 2 * CONTEXT
    whole = likelihood.logprobs(model, [Pair(ids[:-2], ids[-2:])])
    short = likelihood.logprobs(model, [Pair(ids[-CONTEXT - 1 : -2], ids[-2:])])
    assert whole == short and whole == pytest.approx([by_hand(model, ids[-CONTEXT - 1 : -2], ids[-2:])], abs=1e-4)


@pytest.mark.parametrize("pair", [Pair([], [5]), Pair([5], []), Pair([5], [6] * (CONTEXT + 1))])
def test_what_cannot_be_scored_is_one_clear_error(world, pair):
    with pytest.raises(InputError, match="pair 1"):
        likelihood.logprobs(world[0], [Pair([5], [6]), pair])
    assert len(likelihood.logprobs(world[0], [])) == 0


@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * CONTEXT, 2 * CONTEXT + 5])
def test_rolling_windows_score_every_id_once_with_a_full_context(length):
    ids = list(range(100, 100 + length))
    pairs = likelihood.rolling_pairs(ids, 2, CONTEXT)
    assert [token for pair in pairs for token in pair.continuation] == ids
    assert pairs[0].context == [2]
    for pair in pairs[1:]:
        assert len(pair.context) + len(pair.continuation) == CONTEXT + 1
        assert pair.context[-1] == pair.continuation[0] - 1


def test_rolling_text_in_bits_per_byte(world):
    model, tokenizer = world
    text = "while queue:\n\tnode = queue.pop()\n" * 3 + "caf\u00e9"
    logprob, size = likelihood.rolling_logprob(model, tokenizer, text)
    pairs = likelihood.rolling_pairs(tokenizer.encode(text), tokenizer.bos, CONTEXT)
    assert len(pairs) > 1 and size == len(text) + 1
    assert logprob == pytest.approx(sum(by_hand(model, *pair) for pair in pairs), abs=1e-3)
