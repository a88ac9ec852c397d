"""The forward pass: against an independent implementation, isolation, initialisation, cache."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from athanor.decoding.cache import KVCache
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer

CONFIG = ModelConfig(96, 3, 32, 4, 2, 8, 48, 32, 1e4, 1e-6, False)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(seed=0, **changes):
    model = Transformer(dataclasses.replace(CONFIG, **changes))
    model.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():  # trained weights are not as tame as fresh ones
        for weight in model.parameters():
            weight.mul_(3.0) if weight.dim() > 1 else weight.add_(torch.linspace(-0.3, 0.3, len(weight)))
    return model.eval()


def some_ids(rows=2, width=24, seed=1):
    return torch.randint(0, CONFIG.vocab_size, (rows, width), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_equals_transformers(qk_norm, tied):
    transformers = pytest.importorskip("transformers")
    model = make(qk_norm=qk_norm, tied_embeddings=tied)
    c = model.config
    kind = "Qwen3" if qk_norm else "Llama"
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context_tokens, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    report = theirs.load_state_dict(dict(model.named_parameters()), strict=False)
    assert report.missing_keys == ["lm_head.weight"] * tied and not report.unexpected_keys
    theirs.tie_weights()
    assert torch.allclose(model(some_ids()), theirs(some_ids()).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_later_ids_change_nothing():
    model, ids = make(), some_ids()
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % CONFIG.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :10], after[:, :10]) and not torch.equal(before[:, 10:], after[:, 10:])


@torch.no_grad()
def test_documents_of_a_row_are_isolated_bit_for_bit():
    model, ids = make(), some_ids()
    document = torch.tensor([0] * 7 + [1] * 9 + [2] * 8).expand(2, -1)
    before = model(ids, document_BT=document)
    for number in range(3):
        inside = document[0] == number
        changed = ids.clone()
        changed[:, inside] = (changed[:, inside] + 5) % CONFIG.vocab_size
        after = model(changed, document_BT=document)
        assert torch.equal(before[:, ~inside], after[:, ~inside])
        assert not torch.equal(before[:, inside], after[:, inside])
    # The defect the mask prevents is real: without it the neighbours do change.
    changed = ids.clone()
    changed[:, :7] = (changed[:, :7] + 5) % CONFIG.vocab_size
    assert not torch.equal(model(ids)[:, 7:], model(changed)[:, 7:])


@torch.no_grad()
def test_a_document_in_a_row_equals_the_document_alone():
    model, ids = make(), some_ids()
    document = torch.tensor([3] * 7 + [4] * 17).expand(2, -1)
    assert torch.allclose(model(ids, document_BT=document)[:, 7:], model(ids[:, 7:]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_initial_loss_is_ln_v(tied):
    for seed, width in ((0, 64), (1, 64), (2, 1024), (3, 1536)):
        config = dataclasses.replace(CONFIG, vocab_size=2048, dim=width, tied_embeddings=tied)
        model = Transformer.fresh(config, seed)
        ids = torch.randint(0, 2048, (4, 33), generator=torch.Generator().manual_seed(seed))
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        assert abs(float(loss) - math.log(2048)) < 0.1


def test_initialisation_depends_on_the_seed_alone():
    torch.manual_seed(1)
    first = Transformer.fresh(CONFIG, 7)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = Transformer.fresh(CONFIG, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(first(some_ids()), second(some_ids()))
    assert not torch.equal(first.head_weight, Transformer.fresh(CONFIG, 8).head_weight)


@torch.no_grad()
def test_an_output_matrix_of_its_own_is_drawn_last():
    tied, untied = (Transformer.fresh(dataclasses.replace(CONFIG, tied_embeddings=value), 7) for value in (True, False))
    names = [name for name, _ in untied.named_parameters()]
    assert names == [*(name for name, _ in tied.named_parameters()), "lm_head.weight"]
    assert math.isclose(float(untied.head_weight.std()), 0.001, rel_tol=0.05)
    assert math.isclose(float(untied.model.embed_tokens.weight.std()), 0.2, rel_tol=0.05)
    for ours, theirs in zip(tied.model.layers.parameters(), untied.model.layers.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_residual_projections_start_damped():
    model = Transformer(dataclasses.replace(CONFIG, layers=8, dim=128, heads=16))
    model.initialise(torch.Generator().manual_seed(0))
    layer = model.model.layers[0]
    assert math.isclose(float(layer.mlp.up_proj.weight.std()), 0.02, rel_tol=0.05)
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        assert math.isclose(float(weight.std()), 0.02 / 4, rel_tol=0.05)


@torch.no_grad()
def test_cache_in_pieces_equals_one_pass():
    model, ids = make(), some_ids()
    whole = model(ids)
    for cuts in ([24], [1] * 24, [5, 1, 1, 10, 7]):
        cache, parts, at = KVCache(CONFIG, 2, 24), [], 0
        for width in cuts:
            parts.append(model(ids[:, at : at + width], cache=cache))
            at += width
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_head_of_a_cache_takes_another_continuation():
    model, ids, other = make(), some_ids(rows=1), some_ids(rows=1, seed=9)
    cache = KVCache(CONFIG, 1, 24)
    model(ids, cache=cache)
    cache = cache.first_rows(1, 10)
    joined = torch.cat((ids[:, :10], other[:, :6]), 1)
    assert torch.allclose(model(other[:, :6], cache=cache), model(joined)[:, 10:], atol=1e-5, rtol=0)
    for rows, length in ((2, 10), (0, 10), (1, 25)):
        with pytest.raises(ValueError, match="rows of"):
            cache.first_rows(rows, length)


@torch.no_grad()
def test_limits_are_errors():
    model, ids = make(), some_ids(width=33)
    with pytest.raises(ValueError, match="exceed the context"):
        model(ids)
    with pytest.raises(ValueError, match="cache length"):
        KVCache(CONFIG, 1, 33)
    cache = KVCache(CONFIG, 2, 8)
    model(ids[:, :8], cache=cache)
    with pytest.raises(ValueError, match="do not fit"):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="one document per row"):
        model(ids[:, :4], document_BT=ids[:, :4], cache=KVCache(CONFIG, 2, 8))
    with pytest.raises(ValueError, match="needs a cache"):
        model(ids[:, :4], positions_BT=ids[:, :4])
