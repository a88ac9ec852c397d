"""What DPO learns from: packed pairs of answers, with the reference's log probability of every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from athanor.data.rows import PackedRows
from athanor.data.sampler import NO_DOCUMENT, SftSampler
from athanor.model.loss import supervised, token_losses
from athanor.model.precision import autocast
from athanor.model.transformer import Transformer
from athanor.policy.objectives import Dpo
from athanor.training.step import micro_batches

SCORED_ROWS = 8  # in one pass


class PairBatch(NamedTuple):
    """As SftBatch, each answer a document of its own; values_BSK: see objectives.Dpo. Its `pairs` are numbered from 0."""

    tokens_BS: np.ndarray
    mask_BS: np.ndarray
    document_BS: np.ndarray
    values_BSK: np.ndarray
    pairs: int


class PairSampler:
    """Rows of whole pairs, each once per epoch: entry 2k is the chosen answer of pair k, entry 2k + 1 the other one.

    `reference` scores each row when it is first asked for; a row's scores are a function of its ids.
    """

    def __init__(
        self, folder: str | Path, reference: Transformer, precision: str, seed: int, split: str = "train"
    ) -> None:
        self.order = SftSampler(folder, reference.config.context_tokens, seed, split)
        self.rows = PackedRows(folder, split)
        self.reference, self.precision = reference, precision
        self._scores: dict[int, np.ndarray] = {}

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> PairBatch:
        return self.batch_of(self.order.sample_numbers(position_tokens + skipped_tokens, batch_tokens))

    def document_name(self, position_tokens: int, skipped_tokens: int, document: int) -> str:
        return self.order.document_name(position_tokens, skipped_tokens, document)

    def batch_of(self, numbers: list[int]) -> PairBatch:
        """The rows of these numbers as a batch."""
        shape = (len(numbers), self.rows.context_tokens + 1)
        tokens_BS, mask_BS = np.full(shape, self.rows.pad, dtype=np.int64), np.zeros(shape, dtype=np.uint8)
        document_BS, values_BSK = np.full(shape, NO_DOCUMENT, dtype=np.int64), np.zeros((*shape, 4), dtype=np.float32)
        pair_numbers: dict[tuple[int, int], int] = {}
        for row, number in enumerate(numbers):
            start = 0
            for document, entry in enumerate(self.rows.numbers(number)):
                ids, mask = self.rows.conversation(entry)
                here = slice(start, start + len(ids))
                tokens_BS[row, here], mask_BS[row, here], document_BS[row, here] = ids, mask, document
                pair = pair_numbers.setdefault((row, entry // 2), len(pair_numbers))
                values_BSK[row, here, :3] = pair, 1 - 2 * (entry % 2), 1 / max(1, int(mask[1:].sum()))
                start += len(ids)
        batch = PairBatch(tokens_BS, mask_BS, document_BS, values_BSK, len(pair_numbers))
        self._score(numbers, batch)
        for row, number in enumerate(numbers):
            values_BSK[row, :, 3] = self._scores[number]
        return batch

    def _score(self, numbers: list[int], batch: PairBatch) -> None:
        missing = [row for row, number in enumerate(numbers) if number not in self._scores]
        device = self.reference.head_weight.device
        for start in range(0, len(missing), SCORED_ROWS):
            rows = missing[start : start + SCORED_ROWS]
            tokens_BS, mask_BS, document_BS, values_BSK = (array[rows] for array in batch[:4])
            part = PairBatch(tokens_BS, mask_BS, document_BS, values_BSK, batch.pairs)
            (inputs,) = micro_batches(part, len(rows), True)
            with torch.no_grad(), autocast(self.precision, device):
                logp_N = -token_losses(self.reference, inputs.to(device)).cpu().numpy()
            scores_RS = np.zeros((len(rows), self.rows.context_tokens + 1), dtype=np.float32)
            scores_RS[:, 1:][supervised(part.document_BS, part.mask_BS)] = logp_N
            self._scores |= {numbers[row]: scores for row, scores in zip(rows, scores_RS, strict=True)}


def validate(model: Transformer, held_out: PairSampler, objective: Dpo, precision: str) -> dict[str, Any]:
    """Loss and the objective's readings on all held-out pairs."""
    device, total, pairs = model.head_weight.device, 0.0, 0
    sums_K = torch.zeros(len(objective.names), device=device)
    for start in range(0, len(held_out.rows), SCORED_ROWS):
        batch = held_out.batch_of(list(range(start, min(start + SCORED_ROWS, len(held_out.rows)))))
        (inputs,) = micro_batches(batch, SCORED_ROWS, True)
        with torch.no_grad(), autocast(precision, device):
            total += float(objective.loss(model, inputs.to(device), batch.pairs, sums_K)) * batch.pairs
        pairs += batch.pairs
    means = (sums_K / pairs).tolist()
    names = (name.removeprefix("policy.") for name in objective.names)
    return {"loss": total / pairs, "pairs": pairs, **dict(zip(names, means, strict=True))}
