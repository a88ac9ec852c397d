"""Batches of answers for the tests of objectives, packed as training packs them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from athanor.data.rows import pack
from athanor.data.sampler import NO_DOCUMENT
from athanor.model.loss import supervised, targets, token_losses
from athanor.training.step import micro_batches


def answers(model, count, prompt_tokens, seed=0):
    """Prompts of one length and answers of several, as ids."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(10, model.config.vocab_size, (count, prompt_tokens + 12))
    lengths = rng.integers(2, 12, count)
    prompts = [row[:prompt_tokens].tolist() for row in ids]
    return prompts, [row[prompt_tokens : prompt_tokens + n].tolist() for row, n in zip(ids, lengths, strict=True)]


def rows_of(prompts, completions, values, context_tokens=96, **facts):
    """Answers packed behind their prompts; `values`: of each answer, float [tokens, K]."""
    sequences = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    numbers_R = pack([len(each) for each in sequences], context_tokens + 1, 0)
    shape = (len(numbers_R), context_tokens + 1)
    tokens_BS, mask_BS = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.uint8)
    document_BS = np.full(shape, NO_DOCUMENT, dtype=np.int64)
    values_BSK = np.zeros((*shape, values[0].shape[1]), dtype=np.float32)
    for row, numbers in enumerate(numbers_R):
        start = 0
        for document, number in enumerate(numbers):
            end = start + len(sequences[number])
            begin = start + len(prompts[number])
            tokens_BS[row, start:end], document_BS[row, start:end] = sequences[number], document
            mask_BS[row, begin:end], values_BSK[row, begin:end] = 1, values[number]
            start = end
    parts = {"tokens_BS": tokens_BS, "mask_BS": mask_BS, "document_BS": document_BS, "values_BSK": values_BSK}
    return SimpleNamespace(**parts, **facts)


def reference_log_probs(model, prompts, completions):
    """Of each answer's tokens, one answer at a time: float32 [tokens]."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = np.array([[*prompt, *completion]])
        mask = np.array([[0] * len(prompt) + [1] * len(completion)])
        with torch.no_grad():
            found.append(-token_losses(model, targets(ids, np.zeros_like(ids), mask, document_mask=True)).numpy())
    return found


def loss_and_gradient(model, objective, rows, micro_batch_rows=2):
    """Loss of the whole batch over micro-batches, and the gradient of the embedding."""
    model.zero_grad(set_to_none=True)
    divisor, counts, _ = objective.readings(rows, supervised(rows.document_BS, rows.mask_BS))
    sums_K, total = torch.zeros(len(counts)), 0.0
    for batch in micro_batches(rows, micro_batch_rows, True):
        loss = objective.loss(model, batch, divisor, sums_K)
        loss.backward()
        total += loss.item()
    return total, model.model.embed_tokens.weight.grad.clone()
