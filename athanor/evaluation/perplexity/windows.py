"""What perplexity is measured on: windows of ids with marked targets, cut as llama-perplexity cuts a text.

Its rules (llama.cpp, tools/perplexity/perplexity.cpp): the text loses one
newline at its end and is encoded without control symbols, with BOS in front
if the model wants one. The ids are cut into chunks of a context each and the
rest is dropped; the first id of every chunk becomes BOS. Targets are the
second half of a chunk. The figure is exp(mean nats) over all targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from athanor.errors import GateError, InputError


@dataclass(frozen=True)
class Window:
    """ids: int64 [T]. targets: int64, the positions (1 or later) whose id is predicted from all ids before it."""

    ids: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Measured:
    """loss: nats per target. stderr: of the perplexity, targets taken as independent, as llama-perplexity prints it.

    bits_per_byte: over the bytes that the targets stand for; None where nobody can tell these.
    """

    loss: float
    perplexity: float
    stderr: float | None
    tokens: int
    windows: int
    bits_per_byte: float | None = None


def plain(text: str) -> str:
    """The text as llama-perplexity takes it from a file: without one newline at its end."""
    return text.removesuffix("\n")


def first_scored(context_tokens: int) -> int:
    """Position of the first target of a chunk."""
    return context_tokens // 2 + 1


def chunk_windows(
    ids: Sequence[int] | np.ndarray, context_tokens: int, bos: int | None, chunks: int | None = None
) -> list[Window]:
    """The chunks of a text's ids; `bos` is None for a model without one. `chunks` limits their number.

    InputError below two contexts, where llama-perplexity gives no figure.
    """
    if context_tokens < 4:
        raise InputError(f"a context of {context_tokens} tokens leaves nothing to score", where="context", fix="use 4 or more")
    array = np.asarray(ids, dtype=np.int64)
    if len(array) < 2 * context_tokens:
        raise too_short(len(array), context_tokens)
    count = len(array) // context_tokens
    rows = array[: count * context_tokens].reshape(count, context_tokens).copy()
    if bos is not None:
        rows[:, 0] = bos
    targets = np.arange(first_scored(context_tokens), context_tokens)
    return [Window(row, targets) for row in rows[:chunks]]


def too_short(tokens: int, context_tokens: int) -> InputError:
    return InputError(
        f"{tokens} tokens, and two contexts of {context_tokens} are needed",
        where="evaluation set",
        fix="score a longer text, or use a smaller context",
    )


def scored_bytes(windows: Sequence[Window], token_bytes: np.ndarray) -> int:
    """UTF-8 bytes that the targets stand for: those of the scored halves, which the text's average does not give."""
    return sum(int(token_bytes[window.ids[window.targets]].sum()) for window in windows)


def summary(nats: Sequence[np.ndarray], windows: int, size: int | None) -> Measured:
    """From the nats of every target, by window; `size` are the bytes they stand for. GateError if one is no number."""
    all_N = np.concatenate([np.asarray(part, dtype=np.float64) for part in nats])
    if not len(all_N):
        raise InputError("no target to score", where="evaluation set", fix="give it more text")
    if not np.isfinite(all_N).all():
        raise GateError("perplexity", f"{int((~np.isfinite(all_N)).sum())} of {len(all_N)} targets have no finite loss")
    loss = math.fsum(all_N) / len(all_N)
    spread = math.fsum(all_N**2) / len(all_N) - loss**2
    error = math.sqrt(max(0.0, spread) / (len(all_N) - 1)) if len(all_N) > 1 else None
    return from_loss(loss, error, len(all_N), windows, size)


def from_loss(loss: float, error: float | None, tokens: int, windows: int, size: int | None) -> Measured:
    """`error` is the standard error of the loss."""
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if not math.isfinite(perplexity):
        raise GateError("perplexity", f"a loss of {loss:.6g} nats per token has no finite perplexity")
    bits = loss * tokens / math.log(2) / size if size else None
    return Measured(loss, perplexity, None if error is None else error * perplexity, tokens, windows, bits)
