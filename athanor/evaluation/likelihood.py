"""Log-likelihoods of given continuations: multiple choice and rolling text, with lm-evaluation-harness' meaning.

A context and each continuation are encoded as one text and cut where the
context's own ids end; spaces at the end of a context count as part of the
continuation. What does not fit loses its beginning. `scoring.choose` takes one
of the choices. (EleutherAI lm-evaluation-harness 0.4.13, `models/huggingface.py`
and `api/task.py`; `athanor lm-eval --check` compares item for item.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from athanor.base.errors import InputError
from athanor.model.transformer import Transformer
from athanor.model.validation import sequence_nats
from athanor.text.conversations import Item
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer


class Pair(NamedTuple):
    """Ids that are given (at least one), and ids whose probability is asked for (at least one)."""

    context: list[int]
    continuation: list[int]


def logprobs(model: Transformer, pairs: Sequence[Pair], *, threads: int = 1) -> np.ndarray:
    """Summed log-probability in nats (float64) of each continuation after its context, at the model's context."""
    max_ids = model.config.context_tokens + 1  # the last id is only predicted
    sequences, masks = [], []
    for number, pair in enumerate(pairs):
        if not pair.context or not pair.continuation or len(pair.continuation) >= max_ids:
            raise InputError(
                f"{len(pair.context)} ids of context and {len(pair.continuation)} to score",
                where=f"pair {number}",
                fix=f"give at least one of each, and fewer than {max_ids} to score",
            )
        ids = [*pair.context, *pair.continuation][-max_ids:]
        sequences.append(np.array(ids, dtype=np.int64))
        masks.append(np.arange(len(ids)) >= len(ids) - len(pair.continuation))
    if not sequences:
        return np.zeros(0)
    return -sequence_nats(model, sequences, masks, model.config.context_tokens, threads=threads)[0]


def choice_pairs(
    tokenizer: Tokenizer, context: str | Sequence[int], choices: Sequence[str], delimiter: str = ""
) -> list[Pair]:
    """One pair for each choice. A text context gets `<|bos|>` in front; ids (a chat prompt) are taken as they are.

    `delimiter` stands between a text context and each choice.
    """
    if not isinstance(context, str):
        return [Pair(list(context), ids) for ids in tokenizer.encode_batch([delimiter + choice for choice in choices])]
    stripped = context.rstrip()
    separator = context[len(stripped) :] + delimiter
    context_ids, *joined = tokenizer.encode_batch([stripped, *(stripped + separator + choice for choice in choices)])
    # Where joining swallows a whole choice, its last id is what is left of it.
    cuts = [min(len(context_ids), len(ids) - 1) for ids in joined]
    return [Pair([tokenizer.bos, *ids[:cut]], ids[cut:]) for ids, cut in zip(joined, cuts, strict=True)]


def choice_scores(
    model: Transformer,
    tokenizer: Tokenizer,
    context: str | Sequence[int],
    choices: Sequence[str],
    delimiter: str = "",
    *,
    threads: int = 1,
) -> list[float]:
    """The sum of the log-probabilities of each choice's ids after the context, in nats."""
    return logprobs(model, choice_pairs(tokenizer, context, choices, delimiter), threads=threads).tolist()


def rolling_pairs(ids: Sequence[int], start: int, context_tokens: int) -> list[Pair]:
    """Every id of a text once, in windows of a whole context; the first begins with the id `start`.

    Windows do not overlap in what they score; a last one that is not full
    reads what went before it, so that it too holds a whole context.
    """
    pairs, done = [], 0
    while done < len(ids):
        end = min(done + context_tokens, len(ids))
        begin = end - context_tokens - 1
        context_ids = [start, *ids[:done]] if begin < 0 else list(ids[begin:done])
        pairs.append(Pair(context_ids, list(ids[done:end])))
        done = end
    return pairs


def rolling_logprob(model: Transformer, tokenizer: Tokenizer, text: str, *, threads: int = 1) -> tuple[float, int]:
    """Log-probability of a whole text in nats, `<|bos|>` in front and no end token, and its UTF-8 bytes."""
    pairs = rolling_pairs(tokenizer.encode(text), tokenizer.bos, model.config.context_tokens)
    return float(logprobs(model, pairs, threads=threads).sum()), len(text.encode())


DIGITS = 4  # kept of a log-likelihood in nats: more would show how a machine adds up


def item_pairs(tokenizer: Tokenizer, item: Item, choices: Sequence[str]) -> list[Pair]:
    """Ids of an item's text and of each choice after it; a space joins the two unless the text ends in white space."""
    context = item.prompt[-1].content
    return choice_pairs(tokenizer, context, choices, "" if context[-1:].isspace() else " ")


def choice_log_likelihoods(
    model: Transformer, tokenizer: Tokenizer, items: Sequence[Item], threads: int = 1
) -> list[tuple[float, ...]]:
    """For every item the log-likelihood (nats, summed over ids) of each of its choices."""
    pairs = [pair for item in items for pair in item_pairs(tokenizer, item, item.choices)]
    values = iter(logprobs(model, pairs, threads=threads).tolist())
    return [tuple(round(next(values), DIGITS) for _ in item.choices) for item in items]


def gold_bits(
    model: Transformer, tokenizer: Tokenizer, items: Sequence[Item], threads: int = 1
) -> tuple[list[float], list[int]]:
    """Bits of every item's first accepted answer after its prompt, and the answer's UTF-8 bytes.

    The stop that ends an answer does not count: a model that never saw a
    conversation has no idea of it, and the rate of stopping is reported elsewhere.
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
