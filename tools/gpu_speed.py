"""Parts of tools/gpu_report.py that time a device: products and copies, training steps, nanochat's next to ours."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from athanor.base.strict import build
from athanor.hardware.kernels import fastest, linear_shapes, synchronise
from athanor.hardware.peaks import peak_tflops
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.flops import allowed_pairs, run_flops, training_flops
from athanor.model.precision import AUTOCAST
from athanor.model.transformer import Transformer
from athanor.runtime import presets
from athanor.runtime.machine import machine as machine_settings
from athanor.training.compiling import first_line
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.loop import Hooks
from athanor.training.memory import training_bytes
from athanor.training.model_params import ModelParams
from athanor.training.optimizer import OptimizerSettings
from athanor.training.pretrain_params import PretrainParams
from athanor.training.setup import Choices, ExecutionPlan, tuned
from athanor.training.step import Stepper
from athanor.training.world import SINGLE
from tools.gpu_report import ROOT, Job

DOCUMENT_TOKENS = 600  # about what pages of the web have
PACKAGES = ("torch", "triton", "numpy", "ruamel.yaml", "gguf", "psutil", "pyarrow", "sentencepiece", "safetensors")
WARM, TIMED, PROFILED = 5, 12, 2  # steps


class RandomRows:
    """A sampler of random ids; a document has about `document_tokens`, or all of a row if 0."""

    def __init__(self, vocab_size: int, context_tokens: int, document_tokens: int = DOCUMENT_TOKENS) -> None:
        self.vocab_size, self.context_tokens, self.document_tokens = vocab_size, context_tokens, document_tokens

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> Any:
        draw = np.random.default_rng([1, position_tokens + skipped_tokens])
        sizes = batch_tokens // self.context_tokens, self.context_tokens + 1
        begins_BS = draw.random(sizes) * self.document_tokens < 1 if self.document_tokens else np.zeros(sizes, bool)
        return SimpleNamespace(
            tokens_BS=draw.integers(0, self.vocab_size, sizes), document_BS=np.cumsum(begins_BS, axis=1)
        )


def shape(job: Job, preset: str) -> tuple[ModelConfig, PretrainParams]:
    """Model and pretraining of a preset. d12: as large as nanochat's, with the one-gpu-hour recipe. A CPU has one preset."""
    small = job.device == "cpu"
    name = "one-gpu-hour" if preset == "d12" else preset
    values = presets.values(ROOT / "presets" / f"{job.preset if small else name}.yaml")
    params = build(PretrainParams, values["pretrain"], "pretrain")
    config = build(ModelParams, values["model"], "model").config(values["tokenizer"]["vocab_size"])
    if preset == "d12":
        depth, T, vocab_size, tokens = d12(job)
        heads = depth // 2
        config = ModelConfig(vocab_size, depth, 64 * depth, heads, heads, 128, 64 * depth * 8 // 3, T, 1e5, 1e-6, True, False)
        params = dataclasses.replace(params, batch_tokens=tokens, tokens=max(tokens, params.tokens), document_mask=False)
    return config, params


def d12(job: Job) -> tuple[int, int, int, int]:
    """Layers, tokens of a row, ids and tokens of a step of nanochat's d12."""
    return (12, 2048, 32768, 524_288) if job.device == "cuda" else (2, 128, 1024, 512)


def half(device: torch.device) -> str:
    """The best format that the device has units for."""
    return next(iter(gpu_family.identify(device).native), "fp32") if device.type == "cuda" else "fp32"


def graphs() -> int:
    """How many graphs torch compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def peak(device: torch.device, precision: str) -> float | None:
    return peak_tflops(torch.cuda.get_device_name(), precision) if device.type == "cuda" else None


@contextlib.contextmanager
def tuned_model(
    job: Job, config: ModelConfig, params: PretrainParams, choices: Choices, notes: list[str], total_tokens: int, **local: Any
) -> Iterator[tuple[ExecutionPlan, Transformer]]:
    """A fresh model on the device that runs as chosen, and the plan that says how."""
    settings = dataclasses.replace(machine_settings(), device=job.device, **local)
    plan = ExecutionPlan.of(
        "pretrain", params, settings, SINGLE, choices, config,
        total_tokens=total_tokens, document_mask=params.document_mask, validation_every_tokens=0, sample_every_tokens=0,
    )  # fmt: skip
    model = Transformer.fresh(config, params.seed).to(plan.device)
    hooks = Hooks(validate=lambda model: {}, on_note=notes.append)
    with tuned(model, choices, plan.footprint, plan.settings, hooks, job.work / "compiled"):
        yield plan, model


def machine(job: Job) -> Iterator[dict[str, Any]]:
    """Versions; the fastest products and copies; products at the preset's shapes."""
    device, cuda = torch.device(job.device), job.device == "cuda"
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    disk, shm = shutil.disk_usage(job.work), shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    yield {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": versions,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "disk_free_gb": disk.free / 1e9,
        "shm_gb": shm.total / 1e9 if shm else 0,
    }
    if cuda:
        found = torch.cuda.get_device_properties(0)
        driver = shutil.which("nvidia-smi") and subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm,persistence_mode", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20,
        ).stdout.strip()  # fmt: skip
        yield {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "processors": found.multi_processor_count,
            "memory_gb": found.total_memory / 1e9,
            "free_gb": torch.cuda.mem_get_info()[0] / 1e9,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver,
            "family": gpu_family.identify(device),
        }
    size = 8192 if cuda else 1024
    for name in dict.fromkeys((half(device), "fp32")):
        a, b = (torch.randn(size, size, device=device, dtype=AUTOCAST[name] or torch.float32) for _ in range(2))
        seconds = fastest(lambda a=a, b=b: a @ b, device, 1.0)  # type: ignore[misc]
        yield {f"product_{size}_{name}_tflops": 2 * size**3 / seconds / 1e12, f"sheet_{name}_tflops": peak(device, name)}
    source = torch.empty(1 << (30 if cuda else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield {"copy_gb_per_s": 2 * source.numel() / fastest(lambda: target.copy_(source), device, 0.5) / 1e9}
    if cuda:
        for kind in ("pageable", "pinned"):
            host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=kind == "pinned")
            part = source[: host.numel()]
            for way, call in (("from", lambda: host.copy_(part)), ("to", lambda: part.copy_(host))):  # noqa: B023
                yield {f"{way}_device_{kind}_gb_per_s": host.numel() / fastest(call, device, 0.3) / 1e9}
    config, _ = shape(job, job.preset)
    yield {"products_at_shapes": {name: _products(config, device, name) for name in dict.fromkeys((half(device), "fp32"))}}


def _products(config: ModelConfig, device: torch.device, precision: str) -> dict[str, float]:
    """TFLOPS of the three products of each linear layer, and of all as a step uses them."""
    tokens, options = (16384 if device.type == "cuda" else 256), {"device": device, "dtype": AUTOCAST[precision]}
    rates, flops, seconds = {}, 0.0, 0.0
    for (outputs, inputs), times in linear_shapes(config).items():
        x, w, dy = (torch.randn(*size, **options) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        calls: tuple[Callable[[], Any], ...] = (lambda: x @ w.t(), lambda: dy @ w, lambda: dy.t() @ x)  # noqa: B023
        took = sum(fastest(call, device, 0.1) for call in calls)
        work = len(calls) * 2.0 * tokens * outputs * inputs
        rates[f"{outputs}x{inputs}"] = work / took / 1e12
        flops, seconds = flops + times * work, seconds + times * took
    return rates | {"all": flops / seconds / 1e12}


def choice(job: Job) -> Iterator[dict[str, Any]]:
    """The automatic choice, as the first training makes it."""
    from athanor.runtime.choices import choose

    (config, params), notes = shape(job, job.preset), list[str]()
    started, steps = time.perf_counter(), params.tokens // params.batch_tokens
    choices, reasons = choose([job.work / "slot"], config, "auto", params.batch_tokens, steps, notes.append)
    yield {"took": time.perf_counter() - started, **dataclasses.asdict(choices), "why": reasons, "notes": notes}
    if job.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        yield {"reserved_gb": torch.cuda.memory_reserved() / 1e9, "free_gb": free / 1e9, "total_gb": total / 1e9}


def speed(
    job: Job, preset: str = "", rows: int = 0, compile: bool = False, attention: str = "default"
) -> Iterator[dict[str, Any]]:
    """Tokens per second of whole steps with documents, share of the sheet's peak, memory, and the longest kernels."""
    device, cuda = torch.device(job.device), job.device == "cuda"
    if not cuda and preset != "d12" and (rows or compile):
        yield {"skipped": "not on cpu"}
        return
    config, params = shape(job, preset or job.preset)
    precision, T, B = half(device), config.context_tokens, params.batch_tokens
    micro = rows * T or (65536 if preset == "d12" else 16384)
    choices, notes = Choices(precision, attention, compile and cuda, micro_batch_tokens=min(micro, B)), list[str]()
    sampler = RandomRows(config.vocab_size, T, DOCUMENT_TOKENS if params.document_mask else 0)
    batches = [sampler.batch(number * B, B) for number in range(3)]
    warm, timed = (WARM, TIMED) if cuda else (1, 2)
    with contextlib.ExitStack() as stack:
        started = time.perf_counter()
        tokens = B * (warm + timed)
        plan, model = stack.enter_context(tuned_model(job, config, params, choices, notes, tokens))
        replicas = stack.enter_context(CpuReplicas(model, plan.settings.threads))
        yield {
            "parameters": config.parameter_count(),
            "choices": dataclasses.asdict(choices),
            "estimated_gb": training_bytes(config, plan.footprint, device) / 1e9,
            "ready_s": time.perf_counter() - started,
            "notes": notes,
        }
        stepper = Stepper(replicas, OptimizerSettings.of(params), plan.settings)

        def steps(count: int) -> float:
            synchronise(device)
            begun = time.perf_counter()
            for number in range(count):
                stepper.meter.begin_step()
                stepper.step(batches[number % 3], params.lr)
                stepper.meter.end_step()
            synchronise(device)
            return (time.perf_counter() - begun) / count

        first = steps(1)
        steps(warm)
        stepper.meter.window()
        before = graphs() if compile else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = steps(timed)
        pairs = sum(allowed_pairs(rows.document_BS[:, :-1], document_mask=params.document_mask) for rows in batches) / 3
        flops, sheet = run_flops(config, B, pairs, B), peak(device, precision)
        yield {"first_step_s": first, "step_s": seconds, "tokens_per_second": B / seconds, "tflops": flops / seconds / 1e12}
        yield {name: value for name, value in stepper.meter.window().items() if name.startswith("time.")}
        if sheet:
            full = B * training_flops(config, T, causal=False)
            yield {"mfu": flops / seconds / 1e12 / sheet, "mfu_full_square": full / seconds / 1e12 / sheet}
        if cuda:
            yield {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "reserved_gb": torch.cuda.max_memory_reserved() / 1e9}
        if compile:
            yield {"graphs": before, "more_graphs": graphs() - before}
        yield _profile(lambda: steps(PROFILED), seconds, cuda)


def _profile(call: Callable[[], float], seconds: float, cuda: bool) -> dict[str, Any]:
    """Milliseconds of a step on the device by kernel, and its share of the time that the step takes without a profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [(getattr(each, key) / PROFILED / 1e3, each) for each in profiler.key_averages() if each.device_type == kind]
    top = sorted(events, key=lambda row: -row[0])[: 16 if cuda else 4]
    rows = [{"ms": ms, "calls": each.count // PROFILED, "name": each.key[:100]} for ms, each in top]
    return {"device_ms": sum(ms for ms, _ in events), "busy": sum(ms for ms, _ in events) / seconds / 1e3, "kernels": rows}


def nanochat(job: Job) -> Iterator[dict[str, Any]]:
    """Steps of nanochat's model and optimizer as its base_train has them: compiled, 32 rows, windows as its SDPA likes them."""
    if not job.nanochat:
        yield {"skipped": "no --nanochat"}
        return
    device, cuda = torch.device(job.device), job.device == "cuda"
    if not cuda:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its optimizer compiles a minute
    sys.path.insert(0, job.nanochat)
    from nanochat import flash_attention  # type: ignore[import-not-found]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    depth, T, vocab_size, tokens = d12(job)
    dim, heads, rows = 64 * depth, depth // 2, 32 if cuda else 2
    # Without FlashAttention 3 its short windows are explicit masks, which it warns of.
    pattern = "SSSL" if flash_attention.USE_FA3 else "L"
    with torch.device("meta"):
        model = GPT(GPTConfig(T, vocab_size, depth, heads, heads, dim, window_pattern=pattern))
    model.to_empty(device=device)
    model.init_weights()
    optimizer, own = model.setup_optimizer(), model.estimate_flops()
    scores = 12 * heads * 128 * depth
    causal = own - scores * T + scores * (T + 1) / 2  # as model/flops.py counts
    yield {"window_pattern": pattern, "flops_per_token": own, "flops_per_token_causal": causal}
    run: Any = torch.compile(model, dynamic=False) if cuda else model
    draw = torch.randint(vocab_size, (rows, T + 1), device=device)

    def step() -> None:
        for _ in range(tokens // (rows * T)):
            loss = run(draw[:, :-1].contiguous(), draw[:, 1:].contiguous())
            (loss * (rows * T / tokens)).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    times = []
    for _ in range(12 if cuda else 3):
        synchronise(device)
        begun = time.perf_counter()
        step()
        synchronise(device)
        times.append(time.perf_counter() - begun)
    rate, sheet = tokens / float(np.median(times[len(times) // 3 :])), peak(device, "bf16")
    yield {"first_step_s": times[0], "tokens_per_second": rate, "tflops": rate * causal / 1e12}
    if cuda:
        yield {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "reserved_gb": torch.cuda.max_memory_reserved() / 1e9}
    if sheet:
        yield {"mfu": rate * causal / 1e12 / sheet, "mfu_own": rate * own / 1e12 / sheet}


