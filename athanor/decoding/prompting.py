"""The inputs of an answer: a history that fits, the ids that end it, and those that no penalty may touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from athanor.base.errors import InputError
from athanor.text.conversations import Message
from athanor.tokenizer.tokenizer import Tokenizer

TOO_LONG = "this model's maximum context length is"  # the words that clients of OpenAI's protocol look for


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer: <|stop|> as trained, and every control id that can only start something else."""
    return tuple(sorted(tokenizer.control_ids.values()))


def exempt_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids no repetition penalty may touch: control ids, and those without a letter (digits, punctuation, space).

    A byte of a character of several bytes is one letter in the making, so it is not exempt.
    """
    free = set(tokenizer.control_ids.values())
    for i in range(tokenizer.vocab_size):
        text = tokenizer.decode_bytes([i])
        if text and all(byte < 128 and not chr(byte).isalpha() for byte in text):
            free.add(i)
    return frozenset(free)


def fit(
    messages: Sequence[Message], size: Callable[[list[Message]], int], *, context_tokens: int, reserve_tokens: int
) -> tuple[list[Message], int]:
    """Drop the oldest user and assistant pairs until the prompt and an answer of `reserve_tokens` fit.

    `size` tells how many tokens the prompt for some messages has. The system
    message stays and so does the last user message; when those two leave less
    than the reserve, the answer gets what is left. Returns the messages and
    the number of pairs dropped. InputError if nothing is left.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    turns = list(messages[len(system) :])

    def without_oldest(pairs: int) -> list[Message]:
        return [*system, *turns[2 * pairs :]]

    # From the newest on, in growing steps and then by halves: what is far too long costs no more than what fits.
    fitting, too_long, stride = max(0, len(turns) - 1) // 2, -1, 1
    tokens = size(without_oldest(fitting))
    if tokens >= context_tokens:
        raise InputError(
            f"{TOO_LONG} {context_tokens} tokens, and a prompt of {tokens} does not fit",
            fix="shorten the message or the system message",
        )
    if tokens + reserve_tokens > context_tokens:
        return without_oldest(fitting), fitting
    while fitting - too_long > 1:
        candidate = max(too_long + 1, fitting - stride) if too_long < 0 else (fitting + too_long) // 2
        if size(without_oldest(candidate)) + reserve_tokens <= context_tokens:
            fitting, stride = candidate, 2 * stride
        else:
            too_long = candidate
    return without_oldest(fitting), fitting
