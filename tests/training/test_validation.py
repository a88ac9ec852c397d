"""Bits per byte and conversation loss: every target once, with context, with an honest error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from athanor.base.errors import InputError
from athanor.model import validation
from athanor.model.kernels import attention_by_torch
from athanor.model.validation import (
    BitsPerByte,
    bits_per_byte,
    conversation_loss,
    pooled,
    ratio_and_error,
    sequence_nats,
    spans,
)
from tests.training import micro

BYTES = np.array([0, 0, *[i % 4 + 1 for i in range(62)]], dtype=np.int32)


def documents(lengths, seed=0):
    draw = np.random.Generator(np.random.PCG64(seed))
    return [np.array([0, *draw.integers(2, 64, n), 1], dtype=np.int64) for n in lengths]


@torch.no_grad()
def nats_of(model, ids):
    ids = torch.from_numpy(ids)
    return F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none").double().numpy()


@pytest.mark.parametrize("batch_tokens", [16, 64, 4096])
def test_documents_that_fit_are_scored_whole(batch_tokens):
    model = micro.make_model(3)
    texts = documents([3, 14, 1, 8, 8, 2])
    score = bits_per_byte(model, texts, BYTES, 16, batch_tokens=batch_tokens)
    bits = sum(nats_of(model, ids).sum() for ids in texts) / math.log(2)
    size = sum(int(BYTES[ids].sum()) for ids in texts)
    assert score.bits == pytest.approx(bits, rel=1e-6) and score.bytes == size
    assert score.bpb == pytest.approx(bits / size, rel=1e-6)
    assert (score.documents, score.tokens) == (6, sum(len(ids) - 1 for ids in texts))


def test_order_and_threads_change_nothing():
    torch.set_num_threads(1)
    model, texts = micro.make_model(3), documents([40, 3, 14, 1, 8, 60])
    one = bits_per_byte(model, texts, BYTES, 16, batch_tokens=32)
    assert bits_per_byte(model, texts, BYTES, 16, batch_tokens=32, threads=3) == one
    turned = bits_per_byte(model, texts[::-1], BYTES, 16, batch_tokens=32)
    assert turned.bpb == pytest.approx(one.bpb, rel=1e-9) and turned.stderr == pytest.approx(one.stderr, rel=1e-9)


@pytest.mark.parametrize("inputs", [1, 15, 16, 17, 24, 25, 100])
@pytest.mark.parametrize("context", [1, 2, 7, 16])
def test_windows_score_every_target_once_with_context(inputs, context):
    seen = []
    for start, end, first in spans(inputs, context):
        assert 0 <= start <= first < end <= inputs and end - start <= context
        assert first == 0 or first - start >= context // 2  # what has been read before the first scored target
        seen += range(first, end)
    assert seen == list(range(inputs))


def test_on_an_accelerator_shapes_are_few(monkeypatch):
    """Eight sources of 1 MB, one after the other: for each shape cuDNN makes a plan."""
    draw, real, shapes = np.random.Generator(np.random.PCG64(0)), validation.grouped, {1: set(), 128: set()}
    for lengths in draw.lognormal(6, 1.2, (8, 400)).astype(int) + 2:
        for step, seen in shapes.items():
            seen |= {(len(group), width) for width, group in real(lengths, 1024, 4096, step)}
    assert len(shapes[128]) < 30 < 200 < len(shapes[1])
    model, texts = micro.make_model(3), documents([40, 3, 14, 1, 8, 60])
    whole = sequence_nats(model, texts, None, 15)
    monkeypatch.setattr(validation, "grouped", lambda *words: real(*words[:3], 4))
    padded = sequence_nats(model, texts, None, 15)
    assert padded[0] == pytest.approx(whole[0], rel=1e-6) and (padded[1] == whole[1]).all()


def test_bits_per_byte_in_bf16_are_within_the_tolerance_of_the_docs(tmp_path):
    model, _ = micro.run(tmp_path)
    texts = [np.arange(start, start + 15) % 64 for start in range(64)]  # as it has learnt them
    exact = bits_per_byte(model, texts, BYTES, 16).bpb
    with attention_by_torch(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert 0 < abs(bits_per_byte(model, texts, BYTES, 16).bpb / exact - 1) < 0.002


def test_long_documents_slide():
    model, (ids,) = micro.make_model(3), documents([50])
    nats, counts = sequence_nats(model, [ids], None, 16)
    expected = 0.0
    for start, end, first in spans(len(ids) - 1, 16):
        expected += nats_of(model, ids[start : end + 1])[first - start :].sum()
    assert nats[0] == pytest.approx(expected, rel=1e-6) and counts[0] == len(ids) - 1


def test_conversations_count_supervised_targets_only():
    model = micro.make_model(3)
    ids = documents([9, 6, 4])
    masks = [np.array([0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1]), np.array([0] * 7 + [1]), np.array([0] * 6)]
    score = conversation_loss(model, list(zip(ids, masks, strict=True)), 16, int(ids[0][-1]))
    losses = [nats_of(model, i)[m[1:] == 1] for i, m in zip(ids, masks, strict=True)]
    assert score.tokens == 5 and score.loss == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)
    with pytest.raises(InputError, match="supervised"):
        conversation_loss(model, [(ids[2], masks[2])], 16, 3)


def test_standard_error_matches_resampling():
    draw = np.random.Generator(np.random.PCG64(1))
    sizes = draw.integers(20, 400, 300).astype(float)
    parts = sizes * draw.normal(2.0, 0.3, 300) + draw.normal(0, 20, 300)
    ratio, stderr = ratio_and_error(parts, sizes)
    picks = draw.integers(0, 300, (4000, 300))
    resampled = parts[picks].sum(1) / sizes[picks].sum(1)
    assert ratio == pytest.approx(parts.sum() / sizes.sum())
    assert stderr == pytest.approx(resampled.std(), rel=0.1)
    assert ratio_and_error(parts[:1], sizes[:1])[1] is None


def test_pooled_sources():
    a, b = BitsPerByte(100.0, 50, 3, 30, 2.0, 0.3), BitsPerByte(450.0, 150, 4, 90, 3.0, 0.1)
    both = pooled({"a": a, "b": b})
    assert (both.bpb, both.bytes, both.documents, both.tokens) == (2.75, 200, 7, 120)
    assert both.stderr == pytest.approx(math.hypot(0.3 * 50, 0.1 * 150) / 200)
    assert pooled({"a": a, "c": BitsPerByte(1.0, 1, 1, 1, 1.0, None)}).stderr is None


def test_no_text_is_an_error():
    with pytest.raises(InputError, match="no held-out text"):
        bits_per_byte(micro.make_model(), [np.array([0, 1])], BYTES, 16)


def test_the_stop_rate_counts_answers_that_the_model_would_have_ended():
    model = micro.make_model(3)
    prompts = [(start * 5 + np.arange(7)) % 60 for start in range(8)]
    with torch.no_grad():
        likeliest = [int(model(torch.from_numpy(ids[None]))[0, -1].argmax()) for ids in prompts]
    mask = np.array([0] * 7 + [1])
    for stop in (likeliest[0], likeliest[5], 63):
        talks = [(np.append(ids, stop), mask) for ids in prompts]
        score = conversation_loss(model, talks, 16, stop)
        assert score.answers == 8 and score.stop_rate == likeliest.count(stop) / 8
    # An answer that does not end where it is cut has no end to find; a supervised id inside is no end either.
    several = [*talks, (np.append(prompts[1], 1), np.array([0] * 5 + [1] * 3))]
    assert conversation_loss(model, several, 16, 63).answers == 8
    with pytest.raises(InputError, match="supervised answer"):
        conversation_loss(model, several[-1:], 16, 63)
