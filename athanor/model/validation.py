"""Scores of held-out text: bits per byte of documents, loss of conversations, with standard errors.

Every sequence is scored on its own from its first id. One longer than the
context is read in overlapping windows; each target counts once, in the first
window that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from athanor.base.errors import InputError
from athanor.model.loss import Targets, losses_and_stops, token_losses
from athanor.model.precision import autocast
from athanor.model.transformer import Transformer

BATCH_TOKENS = 4096  # fixed, because the grouping of rows decides the last bits of a sum
# Widths of batches on an accelerator are multiples of this: cuDNN plans attention for each new shape, half a second each.
WIDTH_STEP = 128
Window = tuple[int, int, int, int]  # number of the sequence, start, end, first target


class Processes(Protocol):
    """Processes that share the work: which one this is, and a sum over all of them, in place."""

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class BitsPerByte:
    """`bpb` = bits / bytes over all documents; `stderr` treats documents as the sample (None if there is one).

    `each`: bits of every document, where they were counted: two models' pair up.
    """

    bits: float
    bytes: int
    documents: int
    tokens: int
    bpb: float
    stderr: float | None
    each: Sequence[float] = ()


@dataclass(frozen=True)
class MeanLoss:
    """Nats per supervised target over all conversations; `stderr` and `each` (nats) as in BitsPerByte.

    `stop_rate`: of the `answers`, the share after which the stop is the likeliest id, given the answer.
    """

    loss: float
    stderr: float | None
    conversations: int
    tokens: int
    answers: int
    stop_rate: float
    each: list[float]


def bits_per_byte(
    model: Transformer,
    documents: Sequence[np.ndarray],
    token_bytes: np.ndarray,
    context_tokens: int,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
    threads: int = 1,
    world: Processes | None = None,
) -> BitsPerByte:
    """Score documents (ids with `<|bos|>` and `<|eos|>`).

    Bits count every target, the end included; bytes are those of the text
    (`token_bytes` is 0 for control ids). InputError when there is no text.
    """
    nats_D, counts_D = sequence_nats(model, documents, None, context_tokens, batch_tokens, precision, threads, world)
    bytes_D = np.array([int(token_bytes[document].sum()) for document in documents], dtype=np.float64)
    if not bytes_D.sum() > 0:
        raise InputError("no held-out text to score", where="validation", fix="raise the validation share or add text")
    ratio, stderr = ratio_and_error(nats_D / math.log(2), bytes_D)
    bits, each = float(nats_D.sum() / math.log(2)), (nats_D / math.log(2)).tolist()
    return BitsPerByte(bits, int(bytes_D.sum()), len(documents), int(counts_D.sum()), ratio, stderr, each)


def pooled(scores: Mapping[str, BitsPerByte]) -> BitsPerByte:
    """All sources together, each with its own bytes; their errors are independent."""
    bits, size = sum(score.bits for score in scores.values()), sum(score.bytes for score in scores.values())
    errors = [None if score.stderr is None else score.stderr * score.bytes for score in scores.values()]
    error = None if None in errors else math.hypot(*errors) / size
    documents, tokens = (sum(getattr(score, name) for score in scores.values()) for name in ("documents", "tokens"))
    each = [bits for score in scores.values() for bits in score.each]
    return BitsPerByte(bits, size, documents, tokens, bits / size, error, each)


def conversation_loss(
    model: Transformer,
    conversations: Sequence[tuple[np.ndarray, np.ndarray]],
    context_tokens: int,
    stop: int,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
    threads: int = 1,
    world: Processes | None = None,
) -> MeanLoss:
    """Score the supervised targets of conversations, each an (ids, mask) pair; `stop` is the id that ends an answer."""
    ids, masks = [ids for ids, _ in conversations], [mask for _, mask in conversations]

    def measure(model: Transformer, batch: Targets) -> Tensor:
        return losses_and_stops(model, batch, stop)

    sums_D3, counts_D = sequence_sums(
        model, ids, masks, measure, 3, context_tokens, batch_tokens, precision, threads, world
    )
    nats_D, (ends, predicted_stops) = sums_D3[:, 0], sums_D3[:, 1:].sum(0)
    if not counts_D.sum() or not ends:
        raise InputError("no held-out supervised answer to score", where="validation", fix="add conversations")
    ratio, stderr = ratio_and_error(nats_D, counts_D.astype(np.float64))
    stop_rate = float(predicted_stops / ends)
    return MeanLoss(ratio, stderr, len(ids), int(counts_D.sum()), int(ends), stop_rate, nats_D.tolist())


def ratio_and_error(values: np.ndarray, sizes: np.ndarray) -> tuple[float, float | None]:
    """sum(parts) / sum(sizes) and its standard error over the samples, by linearisation (delta method).

    None for a single sample: it says nothing about spread, and 0 would claim certainty.
    """
    n, total = len(values), float(sizes.sum())
    ratio = float(values.sum()) / total
    if n < 2:
        return ratio, None
    residual = values - ratio * sizes
    return ratio, math.sqrt(n / (n - 1) * float((residual**2).sum())) / total


def sequence_nats(
    model: Transformer,
    sequences: Sequence[np.ndarray],
    masks: Sequence[np.ndarray] | None,
    context_tokens: int,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
    threads: int = 1,
    world: Processes | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Summed cross-entropy (float64, nats) and number of counted targets (int64) of each sequence.

    `masks` (1 = supervised as a target) limits which targets count.
    """

    def measure(model: Transformer, batch: Targets) -> Tensor:
        return token_losses(model, batch)[:, None]

    sums_D1, counts_D = sequence_sums(
        model, sequences, masks, measure, 1, context_tokens, batch_tokens, precision, threads, world
    )
    return sums_D1[:, 0], counts_D


def sequence_sums(
    model: Transformer,
    sequences: Sequence[np.ndarray],
    masks: Sequence[np.ndarray] | None,
    measure: Callable[[Transformer, Targets], Tensor],
    columns: int,
    context_tokens: int,
    batch_tokens: int,
    precision: str,
    threads: int,
    world: Processes | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over each sequence's counted targets of what `measure` says of a batch's, float64 [sequences, columns].

    Windows of similar length share a batch of at most `batch_tokens`, padded on the right, where a causal model
    cannot see. The processes of a `world`, in which all have to call this, take every n-th batch.
    """
    device = model.head_weight.device
    sums_DC = np.zeros((len(sequences), columns))
    counts_D = np.zeros(len(sequences), dtype=np.int64)
    width_step = 1 if device.type == "cpu" else WIDTH_STEP
    groups = grouped([len(ids) for ids in sequences], context_tokens, batch_tokens, width_step)
    if world is not None:
        groups = groups[world.rank :: world.size]

    def score(group: tuple[int, list[Window]]) -> tuple[np.ndarray, np.ndarray]:
        owner_N, batch = _padded(*group, sequences, masks)
        if not len(owner_N):
            return owner_N, np.zeros((0, columns))
        with torch.no_grad(), autocast(precision, device):
            return owner_N, measure(model, batch.to(device)).cpu().double().numpy()  # MPS has no fp64

    # Side by side where torch keeps to one thread per operation; added up in order either way.
    workers = threads if device.type == "cpu" and torch.get_num_threads() == 1 else 1
    with ThreadPoolExecutor(workers, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        for owner_N, values_NC in pool.map(score, groups) if workers > 1 else map(score, groups):
            np.add.at(sums_DC, owner_N, values_NC)
            np.add.at(counts_D, owner_N, 1)
    if world is not None:
        for array in (sums_DC, counts_D):
            world.sum_(torch.from_numpy(array))
    return sums_DC, counts_D


def grouped(
    lengths: Sequence[int], context_tokens: int, batch_tokens: int, width_step: int
) -> list[tuple[int, list[Window]]]:
    """Batches of windows over sequences of these lengths, each with its width: a multiple of `width_step`, or the context."""
    windows = [
        (number, start, end, first)
        for number, length in enumerate(lengths)
        for start, end, first in spans(length - 1, context_tokens)
    ]
    windows.sort(key=lambda window: window[1] - window[2])
    groups: list[tuple[int, list[Window]]] = []
    index = 0
    while index < len(windows):
        longest = windows[index][2] - windows[index][1]
        width = min(-(-longest // width_step) * width_step, context_tokens)
        groups.append((width, windows[index : index + max(1, batch_tokens // width)]))
        index += len(groups[-1][1])
    return groups


def _padded(
    width: int, group: list[Window], sequences: Sequence[np.ndarray], masks: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, Targets]:
    """A batch of windows padded on the right to `width`, and the sequence number of each of its targets."""
    ids_BT = np.zeros((len(group), width), dtype=np.int64)
    flat_positions, following, owner = [], [], []
    for row, (number, start, end, first) in enumerate(group):
        ids = sequences[number]
        ids_BT[row, : end - start] = ids[start:end]
        positions = np.arange(first, end)  # of the id that predicts
        if masks is not None:
            positions = positions[masks[number][positions + 1] != 0]
        flat_positions.append(row * width + positions - start)
        following.append(ids[positions + 1].astype(np.int64))
        owner.append(np.full(len(positions), number))
    tensors = (torch.from_numpy(np.concatenate(pieces)) for pieces in (flat_positions, following))
    return np.concatenate(owner), Targets(torch.from_numpy(ids_BT), None, *tensors)


def spans(inputs: int, context_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Windows (start, end, first) over `inputs` positions: reads start..end, scores the targets of first..end.

    Each window after the first starts half a context later, the last one as
    late as it can, so every target after the first window has at least half a
    context before it.
    """
    start, first = 0, 0
    while first < inputs:
        end = min(start + context_tokens, inputs)
        yield start, end, first
        first = end
        start = min(start + max(1, context_tokens // 2), max(0, inputs - context_tokens))
