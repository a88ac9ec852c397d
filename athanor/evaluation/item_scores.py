"""Log-likelihoods of what battery items hold: their choices, and the answers that they accept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from athanor.corpus.conversations import Item
from athanor.evaluation.likelihood import Pair, choice_pairs, logprobs
from athanor.model.transformer import Transformer
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer

DIGITS = 4  # kept of a log-likelihood in nats: more would show how a machine adds up


def item_pairs(tokenizer: Tokenizer, item: Item, choices: Sequence[str]) -> list[Pair]:
    """Ids of an item's text and of each choice after it; a space joins the two unless the text ends in white space."""
    context = item.prompt[-1].content
    return choice_pairs(tokenizer, context, choices, "" if context[-1:].isspace() else " ")


def choice_log_likelihoods(
    model: Transformer, tokenizer: Tokenizer, items: Sequence[Item], threads: int = 1
) -> list[tuple[float, ...]]:
    """Of every item the log-likelihood (nats, summed over its ids) of each of its choices."""
    pairs = [pair for item in items for pair in item_pairs(tokenizer, item, item.choices)]
    values = iter(logprobs(model, pairs, threads=threads).tolist())
    return [tuple(round(next(values), DIGITS) for _ in item.choices) for item in items]


def gold_bits(
    model: Transformer, tokenizer: Tokenizer, items: Sequence[Item], threads: int = 1
) -> tuple[list[float], list[int]]:
    """Bits of every item's first accepted answer after its prompt, and the answer's UTF-8 bytes.

    The stop that ends an answer does not count: a model that never saw a
    conversation has no idea of it, and the rate of stopping is told elsewhere.
    """
    pairs = []
    for item in items:
        if item.kind == "likelihood":
            pairs += item_pairs(tokenizer, item, item.accepted[:1])
        else:
            pairs.append(Pair(prompt_ids(tokenizer, item.prompt), tokenizer.encode(item.accepted[0])))
    nats_D = -logprobs(model, pairs, threads=threads)
    bits = [round(float(nats) / math.log(2), DIGITS) for nats in nats_D]
    return bits, [len(item.accepted[0].encode()) for item in items]
