"""The policy on a table of machines, with measured ratios as input. 2 s."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from athanor.base.errors import InputError
from athanor.hardware import policy
from athanor.hardware.policy import Requested, needed_bytes, resolve
from athanor.model.config import ModelConfig
from athanor.model.gpu_family import BOTH, HALF, MPS, Architecture, amd, cpu, identify, nvidia
from athanor.training.setup import Choices

CONFIG = ModelConfig(4096, 8, 256, 8, 2, 32, 704, 256, 1e4, 1e-6, False)
AUTO = Requested("auto", "auto", "auto", "auto", 0, 16384, 1000)
STABLE, SHAKY = {"fp16": True}, {"fp16": False}


def gflops(bf16: float = 0.0, fp16: float = 0.0) -> dict[str, float]:
    return {"fp32": 100.0, "bf16": 100 * bf16, "fp16": 100 * fp16}


# What the chip is, products of bf16 and fp16 against fp32, step in bf16 against fp32, fp16 stable -> format.
MACHINES = [
    ("plain CPU", cpu(()), gflops(0.3, 0.1), 0.4, STABLE, "fp32"),
    ("plain CPU whose bf16 is quick all the same", cpu({"avx2"}), gflops(3, 1), 2.0, STABLE, "fp32"),
    ("AVX512-BF16, steps no faster", cpu({"avx512_bf16"}), gflops(2, 0.1), 1.1, STABLE, "fp32"),
    ("AMX: quick products, slow steps", cpu({"amx_bf16", "avx512_bf16"}), gflops(8, 0.2), 0.9, STABLE, "fp32"),
    ("AMX and a model wide enough", cpu({"amx_bf16", "avx512_bf16"}), gflops(8, 0.2), 1.3, STABLE, "bf16"),
    ("ARM with bf16", cpu({"bf16", "asimd"}), gflops(3, 2), 1.5, STABLE, "bf16"),
    ("Turing, driver claims bf16", nvidia((7, 5)), gflops(2.0, 4.0), 1.0, STABLE, "fp16"),
    ("Turing, unstable", nvidia((7, 5)), gflops(0.5, 4.0), 1.0, SHAKY, "fp32"),
    ("Volta", nvidia((7, 0)), gflops(0.5, 5.0), 1.0, STABLE, "fp16"),
    ("Pascal", nvidia((6, 1)), gflops(0.5, 2.0), 1.0, STABLE, "fp32"),
    ("RTX 30", nvidia((8, 6)), gflops(2.2, 2.2), 1.7, STABLE, "bf16"),
    ("bf16 no faster, fp16 is", nvidia((8, 6)), gflops(1.4, 2.2), 1.7, STABLE, "fp16"),
    ("Ada", nvidia((8, 9)), gflops(2, 2.1), 1.7, STABLE, "bf16"),
    ("Hopper", nvidia((9, 0)), gflops(12, 12), 4.0, STABLE, "bf16"),
    ("Blackwell", nvidia((10, 0)), gflops(15, 15), 4.0, STABLE, "bf16"),
    ("MI50, driver claims bf16", amd("gfx906:sramecc+:xnack-"), gflops(0.3, 1.9), 1.5, STABLE, "fp16"),
    ("MI50, bf16 measures well by chance", amd("gfx906"), gflops(1.9, 1.9), 1.5, STABLE, "fp16"),
    ("MI50, unstable", amd("gfx906"), gflops(0.3, 1.9), 1.5, SHAKY, "fp32"),
    ("MI50, fp16 hardly faster", amd("gfx906"), gflops(0.3, 1.4), 1.2, STABLE, "fp32"),
    ("MI100", amd("gfx908"), gflops(2, 4), 2.0, STABLE, "bf16"),
    ("MI250X", amd("gfx90a:sramecc+:xnack-"), gflops(4, 4), 2.0, STABLE, "bf16"),
    ("MI300X", amd("gfx942"), gflops(6, 6), 3.0, STABLE, "bf16"),
    ("RDNA 3", amd("gfx1100"), gflops(1.8, 1.9), 1.6, STABLE, "bf16"),
    ("Strix Halo", amd("gfx1151"), gflops(29.5 / 3.1, 33.6 / 3.1), 5.0, STABLE, "bf16"),
    ("MPS, bf16 wins", MPS, gflops(1.6, 1.6), 1.4, STABLE, "bf16"),
    ("MPS, it does not", MPS, gflops(1.1, 1.2), 1.1, STABLE, "fp32"),
    ("unknown chip", amd("gfx2000"), gflops(9, 9), 9.0, STABLE, "fp32"),
]


@pytest.mark.parametrize(
    ("chip", "ratios", "step", "stable", "expected"), [m[1:] for m in MACHINES], ids=[m[0] for m in MACHINES]
)
def test_precision(chip, ratios, step, stable, expected):
    value, why = policy.precision(chip, ratios, {"fp32": 1000.0, "bf16": 1000 * step}, stable)
    assert value == expected and why


@pytest.mark.parametrize("chip", [m[1] for m in MACHINES], ids=[m[0] for m in MACHINES])
def test_without_measurements_everything_is_safe(chip):
    choices = resolve(AUTO, chip, CONFIG, None, None).choices
    assert choices == Choices("fp32", memory_fraction=0.8 if "Strix" in chip.name else 1.0)


def test_a_half_format_counts_only_as_measured():
    assert policy.precision(nvidia((9, 0)), {"fp32": 100.0}, None, None).value == "fp32"
    assert policy.precision(cpu({"amx_bf16"}), gflops(8, 8), None, None).value == "fp32"
    assert policy.precision(nvidia((9, 0)), gflops(1.5), None, None).value == "bf16"
    assert policy.precision(nvidia((9, 0)), gflops(1.49), None, None).value == "fp32"


def test_architectures():
    assert nvidia((7, 5)).native == HALF and nvidia((8, 0)).native == nvidia((12, 1)).native == BOTH
    assert amd("gfx906:sramecc+").native == HALF and amd("gfx1036").native == HALF
    assert amd("gfx1151").shared_memory and not amd("gfx1100").shared_memory
    assert nvidia((12, 1), shared_memory=True).shared_memory
    assert identify(torch.device("cpu")).device == "cpu"


def kernels(**seconds: float | None) -> dict:
    rows = {
        name: {"works": True, "why": "", "plain_seconds": took, "documents_seconds": took / 2}
        if took
        else {"works": False, "why": "not built"}
        for name, took in seconds.items()
    }
    return {"default": "flash", "default_documents": "flash", "kernels": rows}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (kernels(flash=1.0, math=3.0), "default"),
        (kernels(flash=1.0, cudnn=0.98, math=3.0), "default"),  # not worth another rounding
        (kernels(flash=1.0, cudnn=0.9, math=3.0), "cudnn"),
        (kernels(flash=None, efficient=1.0, math=3.0), "efficient"),  # torch would take one that is wrong
        (None, "default"),
    ],
)
def test_attention(measured, expected):
    assert policy.attention(nvidia((9, 0)), measured).value == expected


def test_rows_with_and_without_documents_are_decided_on_apart():
    """As on an RTX 30: the flash kernel takes no mask, and torch's own choice is then one that is slow at it."""
    measured = kernels(flash=1.0, efficient=1.6, cudnn=1.2, math=6.0)
    del measured["kernels"]["flash"]["documents_seconds"]
    measured["default_documents"] = "math"
    assert policy.attention(nvidia((8, 6)), measured) == (
        "flash,cudnn",
        "2.50 times as fast as torch's own choice, flash and math",
    )
    measured["default_documents"] = "cudnn"
    assert policy.attention(nvidia((8, 6)), measured).value == "default"
    del measured["kernels"]["efficient"]["documents_seconds"], measured["kernels"]["cudnn"]["documents_seconds"]
    value, why = policy.attention(nvidia((8, 6)), measured)
    assert value == "default" and "several documents" in why


def test_documents_by_their_starts_where_that_beats_every_mask():
    """As measured on an H200 at Plasma 1.1's shape: slower than cuDNN for rows of one document, which are rare."""
    measured = kernels(flash=1.0, cudnn=0.7, efficient=1.8)
    del measured["kernels"]["flash"]["documents_seconds"]
    measured["kernels"]["cudnn"]["documents_seconds"] = 1.34
    measured["kernels"]["efficient"]["documents_seconds"] = 3.3
    measured["default"] = measured["default_documents"] = "cudnn"
    measured["kernels"]["varlen"] = {"works": True, "why": "", "plain_seconds": 1.17, "documents_seconds": 1.33}
    assert policy.attention(nvidia((9, 0)), measured).value == "default"
    measured["kernels"]["varlen"]["documents_seconds"] = 0.8
    assert policy.attention(nvidia((9, 0)), measured).value == "varlen"


def test_only_math_on_a_gpu_is_an_error_that_says_why():
    measured = kernels(flash=None, efficient=None, cudnn=None, math=3.0)
    with pytest.raises(InputError, match=r"machine.attention: no fused attention.*Hopper.*flash: not built.*Fix"):
        policy.attention(nvidia((9, 0)), measured)
    with pytest.raises(InputError, match="AOTRITON"):
        policy.attention(amd("gfx1151"), measured)
    by_hand = dataclasses.replace(AUTO, attention="math")
    assert resolve(by_hand, nvidia((9, 0)), CONFIG, {"attention": measured}, None).choices.attention == "math"
    # Nothing better exists for these: their math kernel is the normal case.
    for chip in (cpu(()), amd("gfx906"), MPS):
        assert policy.attention(chip, {**measured, "default": "math", "default_documents": "math"}).value == "default"


def test_compile_pays_or_not():
    measured = {"works": True, "why": "", "cold_seconds": 20.0, "eager_seconds": 0.03, "compiled_seconds": 0.02}
    needed = policy.break_even(measured, 10.0)
    assert needed == pytest.approx(policy.COMPILATIONS * 20 / 0.1)
    assert not policy.compiled(measured, blocks_per_step=10.0, steps=int(needed) - 1).value
    assert policy.compiled(measured, blocks_per_step=10.0, steps=int(needed) + 1).value
    slower = {**measured, "compiled_seconds": 0.04}
    assert policy.compiled(slower, blocks_per_step=10.0, steps=10**9) == (False, "compiled blocks are not faster")
    broken = {"works": False, "why": "no compiler"}
    assert policy.compiled(broken, blocks_per_step=10.0, steps=10**9) == (False, "no compiler")


def test_memory_decides_micro_batch_and_checkpointing():
    gpu = nvidia((9, 0))

    def needed(rows: int, recompute: bool = False) -> int:
        return needed_bytes(CONFIG, Choices("fp32", "default", False, recompute, rows * 256), AUTO, gpu)

    def choose(free: float, chip: Architecture = gpu, **changes: str) -> Choices:
        record = resolve(dataclasses.replace(AUTO, **changes), chip, CONFIG, None, int(free / 0.95) + 1)
        assert record.needed_bytes <= free or not record.choices.checkpointing
        return record.choices

    assert choose(1 << 40).micro_batch_tokens == 0 and not choose(1 << 40).checkpointing
    for rows in (1, 2, 32):
        assert choose(needed(rows)) == Choices("fp32", micro_batch_tokens=rows * 256)
    assert choose(needed(4), micro_batch_tokens=512).micro_batch_tokens == 512
    between = (needed(1, True) + needed(1)) / 2
    assert choose(between).checkpointing and not choose(between, checkpointing="off").checkpointing
    assert not choose(needed(1, True) / 2).checkpointing  # of no use
    math = amd("gfx906")
    assert choose(needed(8), math).micro_batch_tokens < choose(needed(8)).micro_batch_tokens  # every score is kept


def test_a_cpu_keeps_the_fixed_rule():
    for replicas in (1, 8):
        asked = dataclasses.replace(AUTO, replicas=replicas, threads=2)
        assert resolve(asked, cpu(()), CONFIG, None, 1).choices.micro_batch_tokens == 0


def test_what_is_set_by_hand_is_taken():
    by_hand = Requested("fp16", "math", "on", "on", 4096, 16384, 1000)
    record = resolve(by_hand, nvidia((9, 0)), CONFIG, None, None)
    assert record.choices == Choices("fp16", "math", True, True, 4096, 1.0)
    assert {reason for name, reason in record.why.items() if name != "memory_fraction"} == {"as set"}
    assert isinstance(nvidia((9, 0)), Architecture)
