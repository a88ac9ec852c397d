"""The profile on disk, its measurement at a tiny size, and choices that a resume keeps. 10 s."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from athanor.base.artifacts import read_json, write_json
from athanor.cli import cli
from athanor.cli.doctor.checks import hardware_profile
from athanor.hardware import kernels, measure, profile, steps
from athanor.hardware.measure import Bounds
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.flops import forward_flops
from athanor.runtime import presets
from athanor.runtime.choices import FILE, choose
from athanor.training.memory import training_bytes
from athanor.training.setup import Choices, DeviceSpec, setup_device
from tests.runtime.view import ROOT

CPU = torch.device("cpu")
TINY = ModelConfig(256, 2, 32, 4, 2, 8, 64, 32, 1e4, 1e-6, False)
BRIEF = Bounds(0.3, 0.2, 0.2, 0.0, 0.1)
COMPILE = {"works": True, "why": "", "cold_seconds": 1.0, "eager_seconds": 1.0, "compiled_seconds": 0.5}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without a profile, on one thread of the CPU."""
    for name in ("DVC_ROOT", "ATHANOR_ATTENTION", "ATHANOR_COMPILE", "ATHANOR_MICRO_BATCH_TOKENS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATHANOR_THREADS", "1")
    monkeypatch.setenv("ATHANOR_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored(root: Path, **parts: Any) -> dict[str, Any]:
    """A profile for TINY on this machine."""
    made = {"schema": profile.SCHEMA, "fingerprint": profile.fingerprint(TINY, CPU, 1), **parts}
    profile.save(root, made)
    return made


def pick(*slots: Path, precision: str = "auto", steps: int = 10) -> Choices:
    return choose(slots, TINY, precision, 256, steps).choices


def test_round_trip_and_fingerprint(here):
    wanted = profile.fingerprint(TINY, CPU, 1)
    assert profile.load(here, wanted) is None
    made = stored(here, seconds=1.5)
    assert profile.load(here, wanted) == made == profile.read(here)
    for other in (
        profile.fingerprint(TINY, CPU, 2),
        profile.fingerprint(dataclasses.replace(TINY, dim=64), CPU, 1),
        {**wanted, "torch": "1.0"},
        {**wanted, "device": "cuda: another"},
    ):
        assert profile.load(here, other) is None
    profile.save(here, {**made, "schema": profile.SCHEMA + 1})
    assert profile.load(here, wanted) is None
    (here / profile.FILE).write_text('{"schema": 1, "finger')  # a disk that was full
    assert profile.load(here, wanted) is None


def test_shapes_are_those_of_the_flops_count():
    matrices = sum(2 * outputs * inputs * times for (outputs, inputs), times in kernels.linear_shapes(TINY).items())
    scores = 2 * TINY.layers * 2 * TINY.heads * TINY.head_dim
    assert matrices == forward_flops(TINY, 1) - scores


def test_products_have_the_layouts_of_training():
    linear, x = torch.nn.Linear(3, 5, bias=False), torch.ones(4, 3, requires_grad=True)
    torch.nn.init.ones_(linear.weight)
    y = linear(x)
    y.backward(torch.ones_like(y))
    truth = {"forward": y, "input_gradient": x.grad, "weight_gradient": linear.weight.grad}
    made = kernels.operands(5, 3, 4, CPU)
    assert {layout: call().shape for layout, call in kernels.layouts(*made).items()} == {
        layout: truth[layout].shape for layout in kernels.LAYOUTS
    }
    assert all(len(x.unique()) == x.numel() for x in made)  # a chip is faster with numbers all alike
    assert all(torch.equal(a, b) for a, b in zip(made, kernels.operands(5, 3, 4, CPU), strict=True))


class Drawn(TorchDispatchMode):
    """Counts the random numbers that are made, by device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "rand" in str(func) or "normal" in str(func):
            self.counts[str(out.device)] += out.numel()
        return out


def test_the_quick_measurement_is_bounded_in_operations_and_in_numbers_that_are_made():
    """Operands were once made on the host for each layout and format: over a minute for three billion of them."""
    with Drawn() as drawn:
        kernels.products(TINY, 64, CPU, 0.01)
    shapes = kernels.linear_shapes(TINY)
    assert drawn.counts["cpu"] == sum(64 * inputs + outputs * inputs + 64 * outputs for outputs, inputs in shapes)
    plasma = dataclasses.replace(TINY, vocab_size=48000, dim=1280, heads=20, kv_heads=4, head_dim=64, ffn_dim=3584)
    for config in (TINY, plasma, dataclasses.replace(plasma, vocab_size=256_000)):
        tokens = kernels.rows_for(config, 16384, torch.device("cuda"))
        weights = sum(outputs * inputs for outputs, inputs in kernels.linear_shapes(config))
        assert 6 * weights * tokens <= 2e13  # two seconds on the slowest card of the table, in fp32
        assert 1024 <= tokens <= 16384 and tokens * config.vocab_size <= 1 << 28


def test_measured_whole(here, monkeypatch):
    short = measure.measure(TINY, CPU, 1, precision="fp32", batch_tokens=256, root=here, bounds=BRIEF)
    assert "attention" not in short  # what training does not use is not measured
    monkeypatch.setattr(measure, "cpu_attention_fits", lambda *_: False)
    found = measure.measure(TINY, CPU, 1, precision="fp32", batch_tokens=256, root=here, bounds=BRIEF)
    assert json.loads(json.dumps(found)) == found
    assert found["fingerprint"] == profile.fingerprint(TINY, CPU, 1)
    row = found["products"]["gflops"]["fp32"]
    assert min(row[name] for name in kernels.LAYOUTS) <= row["ceiling"] <= max(row[name] for name in kernels.LAYOUTS)
    attention = found["attention"]
    assert attention["default"] in attention["kernels"] and attention["kernels"]["math"]["works"]
    assert not attention["kernels"]["cudnn"]["works"] and attention["kernels"]["cudnn"]["why"]
    assert attention["kernels"]["math"]["documents_seconds"] > 0
    assert "loss" not in found  # training has one way to its loss, so there is nothing to choose
    assert found["compile"] == {"works": False, "why": "not measured, because it is off"}
    assert not found["loader"]["works"] and found["checkpoint"]["bytes_per_second"] > 0
    assert list((here / ".athanor" / "slots").iterdir()) == []
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["total_bytes"]
    assert set(found["steps"]) >= {"fp32"}


def test_a_kernel_that_is_wrong_does_not_count(monkeypatch):
    real, calls = torch.nn.functional.scaled_dot_product_attention, []

    def broken(*args: Any, **how: Any) -> torch.Tensor:
        calls.append(1)
        return real(*args, **how) * (1.0 if len(calls) <= 2 else 1.01)  # the first two are the reference

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    found = kernels.attention(TINY, 2, "fp32", CPU, 0.1)["kernels"]
    assert not any(row["works"] for row in found.values()) and "wrong by" in found["math"]["why"]


def test_a_loss_that_overflows_is_not_stable(monkeypatch):
    assert steps.stable(TINY, "fp32", CPU)
    monkeypatch.setattr(steps, "step", lambda model, rows, precision, scale=1.0: _overflow(model))
    assert not steps.stable(TINY, "fp16", CPU)


def _overflow(model: torch.nn.Module) -> torch.Tensor:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, torch.inf)
    return torch.zeros(())


def test_a_kernel_that_this_torch_lacks_is_no_error(monkeypatch):
    """Of a newer torch, or one that its dispatch does not know: each has rows of its own kind."""
    monkeypatch.setitem(kernels.KERNELS, "newer", "NEWER_ATTENTION")
    monkeypatch.setitem(kernels.KERNELS, "apart", "")
    real = kernels.variant

    def variant(kind: str, name: str, document_BT: torch.Tensor) -> torch.Tensor | None:
        if name == "apart":
            raise ImportError("no such kernel")
        return real(kind, name, document_BT)

    monkeypatch.setattr(kernels, "variant", variant)
    found = kernels.attention(TINY, 2, "fp32", CPU, 0.1)["kernels"]
    assert found["math"]["works"] and not found["newer"]["works"] and "NEWER_ATTENTION" in found["newer"]["why"]
    assert found["apart"] == {"works": False, "why": "plain: ImportError: no such kernel"}


def test_another_process_measures_and_ends(here):
    how = {"precision": "fp32", "batch_tokens": 256, "bounds": BRIEF}
    found = measure.in_subprocess(TINY, CPU, 1, here, **how)
    assert found["fingerprint"] == profile.fingerprint(TINY, CPU, 1) and found["products"]["gflops"]["fp32"]
    with pytest.raises(RuntimeError, match="KeyError: 'fp7'"):
        measure.in_subprocess(TINY, CPU, 1, here, **{**how, "precision": "fp7"})


def test_a_compiler_without_end_is_stopped(here):
    found = steps.compiling(TINY, 2, "fp32", CPU, 1, here / "cache", 0.5)
    assert found == {"works": False, "why": "it took longer than 0 s"}


def test_a_full_disk_is_told(here, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measure.checkpoint, "save", full)
    assert "No space" in measure.checkpoints(here / "slots", TINY)["why"] and list((here / "slots").iterdir()) == []


def test_command_measures_once(here, monkeypatch, capsys):
    values = presets.values(ROOT / "presets" / "micro.yaml")
    values["model"] |= {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn_dim": 32}
    values["model"] |= {"vocab_size": 320, "context_tokens": 16}
    values["tokenizer"]["vocab_size"], values["pretrain"]["batch_tokens"] = 320, 64
    Path("params.yaml").write_text(json.dumps(values))
    monkeypatch.setenv("ATHANOR_COMPILE", "off")
    monkeypatch.setattr(measure, "Bounds", lambda compile: BRIEF._replace(compile=compile))

    def run(*words: str) -> tuple[bool, str]:
        assert cli.call("bench", ["hardware", *words]) == 0
        said = capsys.readouterr()
        return "measuring: matrix products" in said.err, said.out

    first, table = run()
    assert first and "GFLOPS" in table and "What auto comes to" in table and "Loader      skipped" in table
    again, same = run()
    assert not again and same.splitlines()[:-7] == table.splitlines()[:-7]
    assert run("--again")[0]
    monkeypatch.setenv("ATHANOR_THREADS", "2")  # another machine, as far as a profile is concerned
    measured, text = run("--json")
    assert measured and json.loads(text) == profile.read(here)
    assert not run()[0]


def test_doctor_tells_of_the_profile(here):
    def told() -> list[str]:
        return [str(finding) for finding in hardware_profile(here)]

    assert told() == []
    stored(here, compile=COMPILE, precision="fp32", attention={"default": "flash"})
    assert len(told()) == 1 and "fp32, flash attention, 2.00 times as fast compiled" in told()[0]
    (here / "params.yaml").write_text("model: {dim: 64, layers: 2, vocab_size: null}\n")
    assert "stale" in told()[0] and "model.dim" in told()[0] and "layers" not in told()[0]
    (here / profile.FILE).write_text("{")
    assert "cannot be read" in told()[0] and told()[0].startswith("note")


def test_without_a_profile_the_cpu_does_as_it_always_did(here):
    record = choose([here / "slot"], TINY, "auto", 256, 10**9)
    assert record.choices == Choices("fp32") and set(record.why) == set(dataclasses.asdict(record.choices))
    assert record.needed_bytes < record.free_bytes
    spec = DeviceSpec("cpu", 1, "pretrain", 0)
    _, footprint = setup_device(TINY, record.choices, spec, 256, "adamw")
    assert record.needed_bytes == training_bytes(TINY, footprint, CPU)  # what the loop will check


def test_the_first_training_on_an_accelerator_measures_it_and_keeps_that(here, monkeypatch):
    """Without somebody who types `athanor bench hardware` nothing was measured, and nothing compiled."""
    bounds, notes = [], []
    monkeypatch.setattr("athanor.runtime.choices.prepare", lambda *_: torch.device("cuda"))
    monkeypatch.setattr("athanor.runtime.choices.available_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(gpu_family, "identify", lambda device: gpu_family.nvidia((9, 0)))
    monkeypatch.setattr(gpu_family, "name", lambda device: "H100")

    def measured(config, device, count, root, **how):
        bounds.append(how["bounds"].compile)
        return {
            "schema": profile.SCHEMA,
            "fingerprint": profile.fingerprint(config, device, count),
            "compile": COMPILE if how["bounds"].compile else {"works": False, "why": "it is off"},
        }

    monkeypatch.setattr(measure, "in_subprocess", measured)

    def choices(slot: str, steps: int) -> Choices:
        return choose([here / slot], TINY, "fp32", 256, steps, notes.append).choices

    assert not choices("short", 10).compile and profile.read(here) is None  # too short for the compiler
    assert choices("long", 10**6).compile and profile.read(here)
    assert choices("other", 10**6).compile and bounds == [0.0, measure.QUICK.compile]
    assert all("first training" in note for note in notes) and len(notes) == 2
    monkeypatch.setattr("athanor.runtime.choices.prepare", lambda *_: torch.device("mps"))
    assert not choices("a Mac", 10**6).compile and bounds[-1] == 0.0  # its compiler is not tried


def test_a_resume_keeps_its_choices_when_the_profile_changes(here):
    slots = [here / "slot", here / "trunk"]
    stored(here, compile={**COMPILE, "works": False, "why": "no compiler"})
    first = pick(*slots, steps=10**9)
    assert not first.compile
    stored(here, compile=COMPILE, steps={"fp32": 1.0, "bf16": 9.0})
    assert pick(*slots, steps=10**9) == first
    fresh = pick(here / "other", steps=10**9)
    assert fresh.compile  # the planted difference: a new run does follow the new profile
    # A run of another length goes on from the trunk as the trunk began, and so do those after it.
    longer = [here / "longer", here / "trunk"]
    assert pick(*longer, steps=10**9) == first
    assert pick(here / "longer", steps=10**9) == first
    assert read_json(here / "longer" / FILE) == read_json(here / "slot" / FILE)


def test_settings_by_hand_win_over_kept_choices(here, monkeypatch):
    slot = here / "slot"
    assert not pick(slot).compile
    monkeypatch.setenv("ATHANOR_COMPILE", "on")
    monkeypatch.setenv("ATHANOR_ATTENTION", "math")
    record = choose([slot], TINY, "auto", 256, 10)
    assert record.choices.compile and record.choices.attention == "math" and record.why["compile"] == "as set"
    monkeypatch.delenv("ATHANOR_COMPILE")
    assert not pick(slot).compile


def test_precision_stays_when_the_device_changes(here):
    began = dataclasses.asdict(Choices("bf16", "cudnn", True))
    record = {"device": "cuda", "profile": None, "why": {}, "choices": began}
    write_json(here / "slot" / FILE, record)
    assert pick(here / "slot") == Choices("bf16")  # kernels of the other device mean nothing here
    assert read_json(here / "slot" / FILE) == record


def test_a_record_that_is_not_understood_is_made_anew(here):
    """Code may change what is chosen; a slot that it goes on with once had to be mended by hand."""
    write_json(here / "slot" / FILE, {"device": "cpu", "choices": {"precision": "fp32"}})
    choices = pick(here / "slot", precision="fp32")
    assert read_json(here / "slot" / FILE)["choices"] == dataclasses.asdict(choices)
