"""First weights from counts: what they know, what they leave alone, and that they repeat."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from athanor.base.errors import ParamsError
from athanor.training.bigrams import first_model, know_pairs
from tests.training import micro

GROUPS, UNSEEN = 6, 60  # ids from there on come in no text


def chain(count=200_000):
    """Ids after which any id of the next of six groups of ten comes: ln 10 nats a pair."""
    within = np.random.default_rng(0).integers(0, UNSEEN // GROUPS, count)
    return np.arange(count) % GROUPS * 10 + within


def knowing(ids_N, threads=1):
    torch.set_num_threads(threads)
    model = micro.make_model(tied_embeddings=False)
    know_pairs(model, ids_N[:-1], ids_N[1:], 0)
    return model


def test_the_first_loss_is_the_entropy_of_pairs():
    ids_BT = torch.from_numpy(chain(1600)).view(100, 16)
    with torch.no_grad():
        logits_BTV = knowing(chain())(ids_BT)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    assert math.log(10) <= loss < math.log(10) + 0.6


def test_what_has_no_part_keeps_its_weights():
    before, after = micro.make_model(tied_embeddings=False).state_dict(), knowing(chain()).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    heads = {f"model.layers.{n}.self_attn.{name}_proj.weight" for n in (0, 1) for name in "qkvo"}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"} | heads
    rows_V = (before["model.embed_tokens.weight"] != after["model.embed_tokens.weight"]).all(1)
    assert torch.equal(rows_V, torch.arange(64) < UNSEEN)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(before[query][4:], after[query][4:])


def test_an_untrained_model_says_again_what_it_has_read():
    """Ids without any pattern, twice: nothing but the two heads can know the second half."""
    draw = torch.Generator().manual_seed(0)
    model = micro.make_model(tied_embeddings=False, vocab_size=512, dim=96, head_dim=32, context_tokens=128)
    ids_N = torch.randint(512, (200_000,), generator=draw).numpy()
    know_pairs(model, ids_N[:-1], ids_N[1:], 0)
    ids_BT = torch.stack([torch.randperm(512, generator=draw)[:64] for _ in range(20)]).repeat(1, 2)
    with torch.no_grad():
        logits_BVT = model(ids_BT)[:, :-1].transpose(1, 2)
    losses_T = F.cross_entropy(logits_BVT, ids_BT[:, 1:], reduction="none").mean(0)
    assert losses_T[64:].mean() < losses_T[:63].mean() - 0.1


def test_repeats_to_the_bit_with_more_threads():
    state = torch.get_rng_state()
    one, other = (knowing(chain(), threads).state_dict() for threads in (1, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tied_output_matrix_is_refused(tmp_path):
    with pytest.raises(ParamsError, match=r"pretrain\.bigram_tokens"):
        first_model(micro.CONFIG, 0, tmp_path, 1000)
