"""The one loop on foreign models: what learns, what stays, and that interruptions and processes change nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from athanor.adapters import foreign, lora
from athanor.adapters.foreign import load_foreign, preflight, shape
from athanor.adapters.lora import LoraSettings
from athanor.base.errors import GateError, InputError
from athanor.model.cross_entropy import plain_summed_cross_entropy, summed_cross_entropy
from athanor.model.flops import run_flops
from athanor.model.tensorfile import read_tensors
from athanor.training import checkpoint
from athanor.training.cpu_replicas import replica_count
from athanor.training.memory import StepFootprint, state_bytes, training_bytes
from athanor.training.step import Stepper, probe_batch
from tests.adapters import lora_run, tiny
from tests.training import micro

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("qwen2", "qwen3", "llama")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def base(request, bases):
    return bases[request.param]


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return (*lora_run.run(base, folder), folder)


def frozen_bytes(model):
    return {name: weight.detach().numpy().tobytes() for name, weight in model.frozen_parameters()}


def test_the_loss_falls_and_only_a_and_b_change(base, trained):
    model, result, _, _ = trained
    losses = [row["loss"] for row in result.curve]
    assert np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
    fresh = load_foreign(base, lora_run.LORA, lora_run.CONTEXT, 1)
    assert frozen_bytes(model) == frozen_bytes(fresh)
    assert all(weight.grad is None and not weight.requires_grad for _, weight in model.frozen_parameters())
    for (name, now), (_, before) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert not torch.equal(now, before), name
    assert len(list(model.parameters())) == 2 * 7 * 2  # A and B of seven matrices in two blocks


def test_a_checkpoint_holds_the_adapter_and_its_optimiser_alone(trained):
    model, _, _, folder = trained
    path = checkpoint.steps(folder)[0] / checkpoint.TENSORS
    stored = read_tensors(path)
    names = {name for name, _ in model.named_parameters()}
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == names
    optimizer = {name.removeprefix("optimizer.").rpartition(".")[0] for name in stored if name.startswith("optimizer.")}
    assert optimizer == names


def test_conversations_of_a_row_do_not_see_each_other(base):
    """Another first conversation leaves every bit of the second one's logits, and without the mask it does not."""
    model = load_foreign(base, lora_run.LORA, 16, 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05)
        ids = torch.arange(16)[None] + 3
        other = ids.clone()
        other[0, :7] = torch.arange(7) + 100
        documents = (torch.arange(16) >= 7).long()[None]
        one, two = (model(row, document_BT=documents)[0, 7:] for row in (ids, other))
        assert torch.equal(one, two)
        assert not torch.equal(model(ids)[0, 7:], model(other)[0, 7:])
        alone = model(ids[:, 7:])[0]  # rotary attention sees differences only
        assert (alone - one).abs().max() < 1e-4


def test_a_killed_run_goes_on_to_the_same_bits(bases, tmp_path):
    """With dropout on, and killed between checkpoints' steps."""
    base, words = bases["qwen2"], [sys.executable, str(ROOT / "tests/adapters/lora_run.py"), str(bases["qwen2"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = lora_run.run(base, tmp_path / "whole")
    words += [str(tmp_path / "cut"), str(tmp_path / "told.json")]
    killed = subprocess.run([*words, "4"], env=environment, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    again = lora_run.run(base, tmp_path / "cut")
    assert again[1].trained_tokens < whole[1].trained_tokens
    assert lora_run.weights(again[0]) == lora_run.weights(whole[0])
    assert (again[1].curve, again[1].validations) == (whole[1].curve, whole[1].validations)


def test_two_processes_are_one(bases, tmp_path):
    """Real gloo; dropout is the same for a row wherever it is worked on, and would be far off otherwise."""
    base = bases["qwen2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(ROOT / "tests/adapters/lora_run.py"), str(base), str(tmp_path / "two")]
    both = [
        subprocess.Popen(
            [*command, str(tmp_path / "told")],
            env={**environment, "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    one = lora_run.weights(lora_run.run(base, tmp_path / "one")[0])
    for rank in range(2):
        told = json.loads((tmp_path / f"told.{rank}").read_text())["weights"]
        assert max(np.abs(np.subtract(told[name], one[name])).max() for name in one) < 1e-5
    dry = dataclasses.replace(lora_run.LORA, dropout=0.0)
    other = lora_run.weights(lora_run.run(base, tmp_path / "dry", settings=dry)[0])
    assert max(np.abs(np.subtract(other[name], one[name])).max() for name in one) > 1e-3


def test_activations_computed_again_change_no_bit(bases, tmp_path):
    base = bases["llama"]
    plain, again = (lora_run.run(base, tmp_path / str(on), checkpointing=on)[0] for on in (False, True))
    assert lora_run.weights(plain) == lora_run.weights(again)
    assert not again.training and not any(layer.gradient_checkpointing for layer in again.model.layers)


def test_activations_are_really_computed_again(bases):
    calls = []
    model = load_foreign(bases["llama"], lora_run.LORA, 16, 1)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = probe_batch(lora_run.Sampler().batch(0, 64), True)
    for on, wanted in ((False, 1), (True, 2)):
        calls.clear()
        with foreign.tuned(model, foreign.Choices("fp32", checkpointing=on), StepFootprint(1, 16, "fp32")):
            foreign.token_losses(model, batch).sum().backward()
        assert len(calls) == wanted


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_learn_too(bases, tmp_path, precision):
    model, result, _ = lora_run.run(bases["qwen2"], tmp_path, precision=precision)
    losses = [row["loss"] for row in result.curve]
    assert losses[-1] < 0.9 * losses[0] and np.isfinite(losses).all()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    # bf16 on a CPU means fp32 tensors; what is stored in 16 bits is what the estimate of memory was told.
    kinds = [weight for name, weight in model.causal.named_parameters() if weight.dtype != torch.float32]
    assert sum(weight.numel() for weight in kinds) == model.config.half_count == (0 if precision == "bf16" else 18432)


def test_a_bf16_checkpoint_trains_in_fp32(tmp_path):
    base = tiny.make_base(tmp_path / "base", "qwen2", dtype="bfloat16")
    model = load_foreign(base, lora_run.LORA, 16, 1)
    assert {weight.dtype for weight in model.causal.parameters()} == {torch.float32}


def test_dropout_is_of_the_step_the_row_and_the_layer():
    seeds = lora.DropoutSeeds()
    first, second = (lora.RowDropout(0.5, layer, seeds) for layer in (0, 1))
    x = torch.ones(2, 8, 64)
    seeds.set_rows(torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(first(x), x)  # before the first step: preflight
    torch.manual_seed(0)
    seeds.begin_step()
    out = first(x)
    assert torch.equal(out, first(x)) and not torch.equal(out, second(x)) and not torch.equal(out[0], out[1])
    assert set(out.unique().tolist()) == {0.0, 2.0} and 0.4 < float((out > 0).float().mean()) < 0.6
    seeds.set_rows(torch.tensor([[3, 4]]))
    assert torch.equal(first(x[:1])[0], out[1])  # the same row, elsewhere
    seeds.begin_step()
    assert not torch.equal(first(x[:1])[0], out[1])
    with torch.no_grad():
        assert torch.equal(first(x), x)


def test_adapters_begin_at_nothing_and_depend_on_the_seed_alone(bases):
    one = load_foreign(bases["qwen2"], lora_run.LORA, 16, 1)
    torch.manual_seed(99)
    two, three = (load_foreign(bases["qwen2"], lora_run.LORA, 16, seed) for seed in (1, 2))
    assert lora_run.weights(one) == lora_run.weights(two) != lora_run.weights(three)
    ids = torch.arange(16)[None]
    with torch.no_grad(), one.without_adapters():
        base = one(ids)
    with torch.no_grad():
        assert torch.equal(base, one(ids))
    assert all(weight.requires_grad for weight in one.parameters())


# -- checks before the first step ------------------------------------------------------------------------------------


def probe():
    return probe_batch(lora_run.Sampler().batch(0, 64), True)


def test_preflight_passes_and_leaves_no_trace(base):
    model = load_foreign(base, lora_run.LORA, 16, 1)
    before = lora_run.weights(model)
    state = torch.get_rng_state()
    assert preflight(model, probe(), "fp32")["initial_loss"] > 0
    assert lora_run.weights(model) == before and torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in model.causal.parameters())


def test_a_base_that_is_not_frozen_is_refused(bases):
    model = load_foreign(bases["qwen2"], lora_run.LORA, 16, 1)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(GateError, match="norm.weight of the base"):
        preflight(model, probe(), "fp32")


def test_a_lost_document_mask_is_found(bases, monkeypatch):
    model = load_foreign(bases["qwen2"], lora_run.LORA, 16, 1)
    monkeypatch.setattr(foreign, "block_mask", lambda document_BT: None)
    with pytest.raises(GateError, match="document"):
        preflight(model, probe(), "fp32")


def test_an_adapter_that_reaches_nothing_is_found(bases):
    model = load_foreign(bases["qwen2"], lora_run.LORA, 16, 1)
    layer = next(iter(lora.layers(model.causal).values()))
    layer.scaling[lora.ADAPTER] = 0.0
    with pytest.raises(GateError, match=r"q_proj.lora_A.weight gets none"):
        preflight(model, probe(), "fp32")


def test_forensics_name_the_place_and_the_conversation(bases):
    """What the recovery asks when a step was skipped, on a model whose modules give tuples and outputs of other kinds."""
    from athanor.training import forensics
    from athanor.training.cpu_replicas import CpuReplicas

    model, rows = load_foreign(bases["qwen2"], lora_run.LORA, 16, 1), lora_run.Sampler().batch(0, 64)
    with CpuReplicas(model, 1) as replicas:
        stepper = Stepper(replicas, micro.ADAMW, lora_run.SETTINGS)
        assert forensics.examine(stepper, rows).kind == "not reproduced"
        assert len(forensics.suspects(stepper, rows)) == 8
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.base_layer.weight[0, 0] = torch.nan
        found = forensics.examine(stepper, rows)
        assert (found.kind, found.where) == ("forward", "causal.model.layers.1.mlp.up_proj.base_layer")
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan
        assert forensics.examine(stepper, rows).kind == "weight"


# -- what can be asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"max_position_embeddings": 8}, "rows of 16 tokens, the model was made for 8"),
        ({"hidden_size": 64}, "do not fit config.json: mismatched"),
    ],
)
def test_a_base_that_cannot_be_trained_is_refused(bases, tmp_path, change, match):
    folder = shutil.copytree(bases["qwen2"], tmp_path / "base")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(InputError, match=match):
        load_foreign(folder, lora_run.LORA, 16, 1)


def test_a_missing_weight_is_not_made_up(bases, tmp_path):
    folder = shutil.copytree(bases["qwen2"], tmp_path / "base")
    tensors = read_tensors(folder / "model.safetensors")
    lora.write_tensors(
        folder / "model.safetensors", {n: t for n, t in tensors.items() if "layers.1.mlp.up" not in n}, {"format": "pt"}
    )
    with pytest.raises(InputError, match="missing keys, first model.layers.1.mlp.up_proj.weight"):
        load_foreign(folder, lora_run.LORA, 16, 1)
    with pytest.raises(InputError, match="no Hugging Face model"):
        load_foreign(tmp_path, lora_run.LORA, 16, 1)


def test_the_shape_is_counted_without_weights(base):
    config = shape(base, LoraSettings(8, 16.0, 0.0, "attention"), 16)
    model = load_foreign(base, LoraSettings(8, 16.0, 0.0, "attention"), 16, 1)
    assert config == model.config
    assert config.tied_embeddings == (model.head_weight is model.model.embed_tokens.weight)
    assert config.parameter_count() == sum(weight.numel() for _, weight in model.frozen_parameters())
    assert config.trained_count() == sum(weight.numel() for weight in model.parameters())
    assert replica_count(config, CPU) == 1
    load = StepFootprint(1, 16, "fp32")
    assert state_bytes(config, load) == 4 * (config.base_count + 4 * config.adapters)
    whole = dataclasses.replace(config, adapters=0)
    assert training_bytes(config, load, CPU) < training_bytes(whole, load, CPU) - 3 * 4 * (
        config.base_count - 4 * config.adapters
    )
    assert run_flops(config, 100, 0, 10) < 0.9 * run_flops(whole, 100, 0, 10)


def test_the_loss_by_hand_makes_no_gradient_for_a_head_that_stays():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(9, 8, generator=generator, requires_grad=True)
    head, following = torch.randn(30, 8, generator=generator), torch.arange(9)
    ours, _ = summed_cross_entropy(h, head, following, 9, 0.0)
    (mine,) = torch.autograd.grad(ours, h)
    (plain,) = torch.autograd.grad(plain_summed_cross_entropy(h, head, following, 9, 0.0)[0], h)
    assert torch.allclose(mine, plain, atol=1e-6)
    both = torch.autograd.grad(summed_cross_entropy(h, head.requires_grad_(True), following, 9, 0.0)[0], (h, head))
    assert torch.equal(both[0], mine) and bool(both[1].any())


def test_nothing_foreign_is_loaded_for_a_model_of_our_own():
    code = "import sys, stages.pretrain, stages.sft, athanor.adapters.foreign, athanor.adapters.tokenizer;"
    code += "print([m for m in ('transformers', 'peft', 'tokenizers', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
    from athanor.runtime.closure import closure

    for stage in ("pretrain", "sft", "evaluate"):
        assert not [path for path in closure(ROOT, f"stages.{stage}") if "foreign" in path or "lora" in path]
