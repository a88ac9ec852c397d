"""Compiled and checkpointed blocks against plain ones; every attention kernel against the math one.

About 60 s on one free core, nearly all of it the C++ compiler on an empty cache.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from athanor.model.loss import Targets, targets, token_losses
from athanor.model.transformer import Block, Transformer
from athanor.training import compiling
from athanor.training.attention import attention
from athanor.training.compiling import (
    Shapes,
    TunedBlock,
    checkpoint_blocks,
    compile_block,
    compile_blocks,
    tune_blocks,
    untune,
)
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.loop import Hooks, train
from athanor.training.memory import StepFootprint
from athanor.training.setup import Choices, tuned
from tests.training import micro

CPU = torch.device("cpu")
ROWS, TOKENS = 2, 16
# Compiled code adds the same numbers in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")


def batches(count: int = 3, rows: int = ROWS) -> list[Targets]:
    """Micro-batches with several documents in a row, and one without."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        ids = torch.randint(0, 64, (rows, TOKENS), generator=draw)
        documents = torch.randint(0, 3, (rows, TOKENS), generator=draw).sort(1).values if number else None
        made.append(Targets(ids, documents, torch.arange(rows * TOKENS), ids.roll(-1, 1).flatten()))
    return made


def loss_of(model: Transformer, batch: Targets) -> Tensor:
    loss = token_losses(model, batch).mean()
    loss.backward()
    return loss.detach()


def step(model: Transformer) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a step by replicas, as training takes it."""
    with CpuReplicas(model, 2) as replicas:
        loss = replicas.backward(batches(), loss_of)
    return loss, [weight.grad.clone() for weight in model.parameters()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A folder for compiled code that only this module uses."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            patch.setenv(name, "")
            patch.delenv(name)  # and back to what it was when the module is done
        yield tmp_path_factory.mktemp("compiled")


@needs_compiler
def test_compiled_is_eager(cache: Path):
    model, notes = micro.make_model(), []
    names, truth = list(model.state_dict()), step(model)
    shapes = Shapes.of(ROWS, TOKENS, 4 * ROWS * TOKENS, documents=True)
    state = torch.get_rng_state()
    how = {"precision": "fp32", "cache": cache, "one_thread": True, "note": notes.append}
    assert compile_blocks([model], shapes, **how), notes
    assert torch.equal(torch.get_rng_state(), state) and "compiled in" in notes[0]
    assert list(model.state_dict()) == names and (cache / "inductor").is_dir()
    made = compiling.graphs()
    loss, gradients = step(model)
    torch.testing.assert_close(loss, truth[0], **CLOSE)
    for found, expected in zip(gradients, truth[1], strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert not all(torch.equal(a, b) for a, b in zip(gradients, truth[1], strict=True))  # it was other code
    # CpuReplicas, several documents and one: all served by what was compiled beforehand.
    assert compiling.graphs() == made
    # Another shape, or no gradient, is not compiled for.
    loss_of(model, batches(1, rows=1)[0])
    with torch.no_grad():
        model(batches(1)[0].ids_BT)
    assert compiling.graphs() == made
    checkpoint_blocks([model])
    both = step(model)
    torch.testing.assert_close(both[0], truth[0], **CLOSE)
    # A second run finds that it worked here and does not try it apart.
    assert len(list((cache / "passed").iterdir())) == 1
    assert compile_blocks([copy.deepcopy(model)], shapes, **{**how, "limit_seconds": 0.0})


@needs_compiler
@pytest.mark.parametrize("kernel", ["default", "varlen"])
def test_tied_and_untied_blocks_compile_once_for_fifty_steps_of_documents(cache: Path, kernel: str):
    shapes = Shapes.of(ROWS, TOKENS, ROWS * TOKENS, documents=True)
    draw = np.random.Generator(np.random.PCG64(0))
    with attention(kernel, CPU):
        made = []
        for tied in (True, False):
            model, plain, notes = micro.make_model(tied_embeddings=tied), micro.make_model(tied_embeddings=tied), []
            how = {"precision": "fp32", "cache": cache, "one_thread": True, "note": notes.append}
            how |= {"kernel": kernel} if kernel != "default" else {}
            assert compile_blocks([model], shapes, **how), notes
            made.append(compiling.graphs())
            for number in range(50):
                if number == 25:
                    checkpoint_blocks([model])
                document_BS = np.sort(draw.integers(0, 1 + number % 5, (ROWS, TOKENS + 1)), axis=1)
                tokens_BS = draw.integers(0, 64, document_BS.shape)
                batch = targets(tokens_BS, document_BS, None, document_mask=True)
                assert (batch.starts_M is not None) == (kernel == "varlen")
                loss, truth = (loss_of(which, batch) for which in (model, plain))
                torch.testing.assert_close(loss, truth, **CLOSE)
            for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad, msg=name, rtol=1e-4, atol=1e-4)
            assert compiling.graphs() == made[-1]
        assert made[0] == made[1]  # one block's code serves both


@needs_compiler
def test_attention_decides_what_is_compiled(cache: Path):
    """Which of torch's kernels is in the graph, and not which one is named outside of it."""
    found, shapes = {}, Shapes.of(ROWS, TOKENS, ROWS * TOKENS, documents=False)
    for kernel in ("flash", "math", "flash"):
        names: set[str] = set()

        class Spy(CustomGraphPass):
            def __call__(self, graph: torch.fx.Graph, names: set[str] = names) -> None:
                names.update(str(node.target) for node in graph.nodes)

            def uuid(self) -> None:
                return None  # such a graph is not taken from the cache

        with attention(kernel, CPU), torch._inductor.config.patch(post_grad_custom_post_pass=Spy()):
            compile_block([micro.make_model()], shapes, "fp32", 1, kernel)
        assert names and found.setdefault(kernel, names) == names
    assert any("flash_attention" in name for name in found["flash"])
    assert not any("flash_attention" in name for name in found["math"])


def test_a_block_is_compiled_as_a_plain_one_whatever_class_it_has():
    """FSDP gives each block a class of its own, and an OOM fewer rows: both go through the same compiled code."""
    model, served = micro.make_model(), []

    def compiled(block: Block, x_BTD: Tensor, *rest: object) -> Tensor:
        served.append((type(block), len(x_BTD)))
        return Block.forward(block, x_BTD, *rest)

    tune_blocks([model], compiled=compiled, rows_tokens=frozenset({(ROWS, TOKENS)}))
    for block in model.model.layers:
        block.__class__ = type("FSDP", (type(block),), {})
    loss_of(model, batches(1)[0])
    loss_of(model, batches(1, rows=1)[0])
    assert served == [(Block, ROWS)] * model.config.layers
    compiling.admit_rows([model], 1)
    loss_of(model, batches(1, rows=1)[0])
    assert served[model.config.layers :] == [(Block, 1)] * model.config.layers


def test_a_hanging_compiler_costs_a_bounded_time(cache: Path):
    model, notes = micro.make_model(), []
    shapes = Shapes.of(1, TOKENS, TOKENS, documents=False)
    how = {"precision": "fp32", "cache": cache, "one_thread": True, "note": notes.append}
    assert not compile_blocks([model], shapes, **how, limit_seconds=0.5)
    assert not compile_blocks([model], shapes, **how, should_stop=lambda: True)
    assert "longer than" in notes[0] and "asked to stop" in notes[1] and "goes on without" in notes[0]
    assert type(model.model.layers[0]) is Block


def test_a_compiler_that_fails_is_told(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, notes = micro.make_model(), []
    shapes = Shapes.of(1, TOKENS, TOKENS, documents=False)
    assert not compile_blocks([model], shapes, precision="fp32", cache=cache, one_thread=True, note=notes.append)
    assert "not compiled" in notes[0] and len(notes[0]) < 400
    assert type(model.model.layers[0]) is Block


def test_checkpointed_is_plain_to_the_bit():
    model = micro.make_model()
    truth = step(model)
    checkpoint_blocks([model])
    assert all(type(block) is TunedBlock for block in model.model.layers)
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        token_losses(model, batches(1)[0])
    again = sum(kept)
    loss, gradients = step(model)
    assert torch.equal(loss, truth[0]) and all(torch.equal(a, b) for a, b in zip(gradients, truth[1], strict=True))
    untune([model])
    assert all(type(block) is Block and not hasattr(block, "how") for block in model.model.layers)
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        token_losses(model, batches(1)[0])
    assert again < sum(kept)  # what it is for


def test_training_as_chosen_ends_with_the_same_bytes(tmp_path: Path):
    """Activations computed again, through the whole loop; and blocks are plain before and after."""
    truth = micro.outcome(*micro.run(tmp_path / "plain"))
    torch.set_flush_denormal(True)
    model, load = micro.make_model(), StepFootprint(micro.SETTINGS.micro_batch_rows, TOKENS, "fp32")
    hooks = Hooks(validate=micro.validate)
    with tuned(model, Choices("fp32", checkpointing=True), load, micro.SETTINGS, hooks, tmp_path / "cache"):
        assert type(model.model.layers[0]) is TunedBlock
        how = (micro.CountingSampler(), micro.ADAMW, micro.SCHEDULE, micro.SETTINGS, tmp_path / "again", hooks)
        result = train(model, *how)
    assert type(model.model.layers[0]) is Block
    assert micro.outcome(model, result) == truth
    with tuned(model, Choices("fp32", compile=True), load, micro.SETTINGS, hooks, tmp_path / "cache", active=False):
        assert type(model.model.layers[0]) is Block and not (tmp_path / "cache").exists()


def test_a_cache_is_served_by_the_plain_block():
    from athanor.decoding.cache import KVCache

    model = micro.make_model()
    ids = batches(1)[0].ids_BT
    with torch.no_grad():
        truth = model(ids, cache=KVCache(micro.CONFIG, ROWS, TOKENS))
        checkpoint_blocks([model])
        assert torch.equal(model(ids, cache=KVCache(micro.CONFIG, ROWS, TOKENS)), truth)


@pytest.mark.parametrize("kernel", ["default", "flash", "math"])
def test_every_attention_kernel_is_the_math_one(kernel, monkeypatch):
    model, calls = micro.make_model(), []
    with attention("math", CPU):
        truth = step(model)
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **how):
        calls.append(1)
        return real(*args, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    with attention(kernel, CPU):
        choice = torch._fused_sdp_choice(*(torch.ones(1, 1, 8, 8) for _ in range(3)), None, 0.0, True)
        found = step(model)
    # Rows so short are worked by hand on a CPU, unless a kernel is named: then that is what works.
    assert len(calls) == (0 if kernel == "default" else 3 * model.config.layers)
    assert choice == (0 if kernel == "math" else 1)
    torch.testing.assert_close(found[0], truth[0], **CLOSE)
    for ours, expected in zip(found[1], truth[1], strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


def test_shapes_of_a_batch():
    assert Shapes.of(4, 16, 160, True).rows_tokens == {(4, 16), (2, 16)}
    assert Shapes.of(4, 16, 128, True).rows_tokens == {(4, 16)}
    assert Shapes.of(16, 16, 128, True).rows_tokens == {(8, 16)}
    assert Shapes.of(4, 16, 160, True, processes=3).rows_tokens == {(3, 16), (4, 16)}
