"""What a chip decides that no driver is asked about: formats that advice offers, and how much memory may be taken."""

from __future__ import annotations

import ast
import os
import platform
from types import SimpleNamespace

import pytest
import torch

from athanor.evaluation import compression
from athanor.hardware import measure
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.device import prepare
from athanor.model.validation import BitsPerByte
from athanor.training import memory, meter
from athanor.training.memory import StepFootprint
from tests.runtime.view import ROOT

SHAPE = ModelConfig(4096, 8, 512, 8, 8, 64, 2048, 512, 1e4, 1e-6, False)


@pytest.fixture
def chip(monkeypatch):
    """A GPU that is not here; returns the memory limits that torch is told."""
    limits: list[float] = []

    def build(target: str = "", capability: tuple[int, int] = (0, 0), shared: bool = False) -> list[float]:
        properties = SimpleNamespace(gcnArchName=target, is_integrated=shared, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.version, "hip", "7.0" if target else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)  # as ROCm builds and Turing cards say
        # Below torch's own checks of what it is given.
        monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        limit = lambda share, index: limits.append(share)  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", limit, raising=False)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        return limits

    return build


@pytest.mark.parametrize(
    ("target", "capability", "advice"),
    [
        ("gfx906:sramecc+:xnack-", (0, 0), "precision: fp16"),  # MI50
        ("gfx1151", (0, 0), "precision: bf16"),
        ("", (7, 5), "precision: fp16"),  # Turing
        ("", (9, 0), "precision: bf16"),
        ("", (6, 1), None),
    ],
)
def test_advice_for_too_little_memory_offers_no_format_that_is_emulated(monkeypatch, chip, target, capability, advice):
    chip(target, capability)
    # The estimate itself needs a torch that knows CUDA.
    monkeypatch.setattr(memory, "training_bytes", lambda config, load, device: 9 if load.precision == "fp32" else 5)
    load = StepFootprint(1, 512, "fp32", checkpointing=True)
    steps = memory.what_to_change(SHAPE, load, torch.device("cuda"), lambda size: size <= 7)
    assert [step for step in steps if step.startswith("precision")] == ([advice] if advice else [])


def test_a_gpu_that_shares_memory_is_limited_wherever_it_is_taken(chip):
    threads = torch.get_num_threads()
    told = []
    for how in ({"target": "gfx1151"}, {"target": "gfx1100"}, {"capability": (12, 1), "shared": True}):
        limits = chip(**how)
        assert prepare("auto", threads).type == "cuda"
        told.append(len(limits))
    assert told == [1, 1, 2] and limits == [0.8, 0.8]  # the second has memory of its own


ROCM, CUDA = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("target", "release", "given", "added"),
    [
        ("", "6.8", {}, CUDA),
        ("", "6.6-microsoft-standard-WSL2", {}, {}),
        ("", "6.8", {"PYTORCH_ALLOC_CONF": "backend:native"}, {}),
        ("gfx90a", "6.8", {}, {}),
        ("gfx1151", "6.8", {}, ROCM),
    ],
)
def test_the_environment_that_torch_reads_at_its_first_use_of_a_gpu(monkeypatch, chip, target, release, given, added):
    chip(target, (9, 0))
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(platform, "release", lambda: release)
    prepare("auto", torch.get_num_threads())
    assert os.environ == given | added


def test_few_digits_are_those_that_a_chip_has_units_for(monkeypatch, chip):
    """Muon's products; and bits per byte, which stay in fp32 where that is not bf16."""
    score, asked = BitsPerByte(1.0, 1, 1, 1, 1.0, None), []
    monkeypatch.setattr(compression, "bits_per_byte", lambda *_, precision, **__: asked.append(precision) or score)
    found = []
    for target, capability in (("gfx906", (0, 0)), ("gfx90a", (0, 0)), ("", (7, 0)), ("", (6, 0)), ("", (9, 0))):
        chip(target, capability)
        device = torch.device("cuda")
        found.append(gpu_family.product_dtype(device))
        model = SimpleNamespace(config=SHAPE, head_weight=SimpleNamespace(device=device))
        compression.model_rates(model, SimpleNamespace(token_bytes=None), {"web": []})
    assert found == [torch.float16, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    assert asked == ["fp32", "bf16", "fp32", "fp32", "bf16"]


def test_apple_s_gpu_takes_what_metal_recommends(monkeypatch):
    """None is here: what torch is asked and told."""
    limits: list[float] = []
    answers = {"recommended_max_memory": lambda: 9, "driver_allocated_memory": lambda: 4}
    monkeypatch.setattr(torch, "mps", SimpleNamespace(set_per_process_memory_fraction=limits.append, **answers))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = prepare("mps", torch.get_num_threads())
    assert prepare("auto", torch.get_num_threads()).type == "cpu"  # until somebody has tried it
    assert device.type == "mps" and limits == [1.0]
    assert memory.available_bytes(device) == 5 and measure.memory(device) == {"free_bytes": 5, "total_bytes": 9}
    assert meter.memory(device)["memory.bytes"] == 4


def test_there_is_one_place_where_a_device_is_taken():
    """Everything that works on an accelerator goes through `prepare`, or names its limit itself."""
    takers = {}
    for path in sorted((ROOT / "athanor").rglob("*.py")) + sorted((ROOT / "stages").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("torch.device") or not node.args:
                continue
            if not isinstance(node.args[0], ast.Constant) or node.args[0].value not in ("cpu", "meta"):
                takers.setdefault(path.relative_to(ROOT).as_posix(), []).append(ast.unparse(node))
    # The two programs of their own are told the device that their parent took, and compile one block or nothing.
    allowed = {"athanor/model/device.py"}
    apart = {"athanor/hardware/steps.py", "athanor/training/compiling.py"}
    assert set(takers) == allowed | apart, takers
    for path in allowed:
        assert "limit_memory(device)" in (ROOT / path).read_text(encoding="utf-8")
