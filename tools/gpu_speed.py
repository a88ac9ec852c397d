"""Parts of tools/gpu_report.py that time a device: products and copies, training steps, nanochat's next to ours."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from athanor.base.strict import build
from athanor.hardware import kernels
from athanor.hardware.kernels import fastest, synchronise
from athanor.hardware.peaks import peak_tflops
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.flops import allowed_pairs, run_flops, training_flops
from athanor.model.precision import AUTOCAST
from athanor.model.transformer import Transformer
from athanor.runtime import machine as machine_file
from athanor.runtime import presets
from athanor.training.compiling import Shapes, compile_block, graphs, tune_blocks
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.loop import Hooks
from athanor.training.memory import training_bytes
from athanor.training.model_params import ModelParams
from athanor.training.optimizer import OptimizerSettings
from athanor.training.pretrain_params import PretrainParams
from athanor.training.setup import Choices, ExecutionPlan, tuned
from athanor.training.step import Stepper
from athanor.training.world import SINGLE
from tools.gpu_report import ROOT

Facts = Iterator[dict[str, Any]]
DOCUMENT_TOKENS = 600  # about what pages of the web have
PROFILED = 2  # steps


class RandomRows:
    """A sampler of random ids; a document has about `document_tokens`."""

    def __init__(self, vocab_size: int, context_tokens: int, document_tokens: float = DOCUMENT_TOKENS) -> None:
        self.vocab_size, self.context_tokens, self.document_tokens = vocab_size, context_tokens, document_tokens

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> Any:
        draw = np.random.default_rng([1, position_tokens + skipped_tokens])
        sizes = batch_tokens // self.context_tokens, self.context_tokens + 1
        document_BS = np.cumsum(draw.random(sizes) * self.document_tokens < 1, axis=1)
        return SimpleNamespace(tokens_BS=draw.integers(0, self.vocab_size, sizes), document_BS=document_BS)


def d12(job: Any) -> tuple[int, int, int, int]:
    """Layers, tokens of a row, ids and tokens of a step of nanochat's d12; smaller on a CPU."""
    return (12, 2048, 32768, 524_288) if job.device == "cuda" else (2, 128, 1024, 512)


def shape(job: Any, preset: str) -> tuple[ModelConfig, PretrainParams]:
    """Model and pretraining of a preset; on a CPU always the one asked for. d12: of that size, by the recipe of one-gpu-hour."""
    name = job.preset if job.device == "cpu" else preset.replace("d12", "one-gpu-hour")
    values = presets.values(ROOT / "presets" / f"{name}.yaml")
    params = build(PretrainParams, values["pretrain"], "pretrain")
    if preset != "d12":
        return build(ModelParams, values["model"], "model").config(values["tokenizer"]["vocab_size"]), params
    depth, T, ids, tokens = d12(job)
    heads, dim = depth // 2, 64 * depth
    config = ModelConfig(ids, depth, dim, heads, heads, 128, dim * 8 // 3, T, 1e5, 1e-6, True, tied_embeddings=False)
    return config, dataclasses.replace(params, batch_tokens=tokens, document_mask=False)


def half(device: str) -> str:
    """The first format that the GPU has units for, or fp32."""
    return next(iter(gpu_family.identify(torch.device(device)).native), "fp32") if device == "cuda" else "fp32"


@contextlib.contextmanager
def tuned_model(
    job: Any,
    config: ModelConfig,
    params: PretrainParams,
    choices: Choices,
    notes: list[str],
    steps: int = 9,
    **local: Any,
) -> Iterator[tuple[ExecutionPlan, Transformer]]:
    """A fresh model on the device that runs as chosen, and the plan that says how.

    Blocks are compiled here, without the trial in another process that a training makes: that takes as long again.
    """
    settings = dataclasses.replace(machine_file.machine(), **local)
    plan = ExecutionPlan.of(
        "pretrain", params, settings, SINGLE, choices, config, total_tokens=steps * params.batch_tokens,
        document_mask=params.document_mask, validation_every_tokens=0, sample_every_tokens=0,
    )  # fmt: skip
    model = Transformer.fresh(config, params.seed).to(plan.device)
    hooks = Hooks(validate=lambda model: {}, on_note=notes.append)
    cache, eager = job.work / "compiled", dataclasses.replace(choices, compile=False)
    with tuned(model, eager, plan.footprint, plan.settings, hooks, cache):
        if choices.compile:
            B, T = plan.footprint.micro_batch_rows, config.context_tokens
            shapes, started = Shapes.of(B, T, params.batch_tokens, params.document_mask), time.perf_counter()
            compiled = compile_block([model], shapes, choices.precision, plan.settings.threads, choices.attention)
            tune_blocks([model], compiled=compiled, rows_tokens=shapes.rows_tokens)
            notes.append(f"compiled in {time.perf_counter() - started:.1f} s")
        yield plan, model


@contextlib.contextmanager
def tuned_stepper(*arguments: Any) -> Iterator[tuple[ExecutionPlan, Stepper]]:
    """Steps of such a model, without the loop around them."""
    with tuned_model(*arguments) as (plan, model), CpuReplicas(model, plan.settings.threads) as replicas:
        yield plan, Stepper(replicas, OptimizerSettings.of(arguments[2]), plan.settings)


def mfu(job: Any, precision: str, **flops_per_s: float) -> dict[str, float]:
    """TFLOPS under each name, and their share of the data sheet's peak where it is known."""
    sheet = job.device == "cuda" and peak_tflops(torch.cuda.get_device_name(), precision)
    rates = {f"tflops{name}": value / 1e12 for name, value in flops_per_s.items()}
    return rates | ({key.replace("tflops", "mfu"): rate / sheet for key, rate in rates.items()} if sheet else {})


def memory(job: Any) -> dict[str, float]:
    if job.device != "cuda":
        return {}
    peak, (free, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
    values = {"peak": peak, "peak_reserved": torch.cuda.max_memory_reserved(), "free": free, "total": total}
    return {f"{name}_gb": value / 1e9 for name, value in values.items()}


def machine(job: Any) -> Facts:
    """Versions; the fastest products and copies; products at the preset's shapes."""
    from torch.utils.collect_env import get_pretty_env_info

    cuda, device = job.device == "cuda", torch.device(job.device)
    lines = get_pretty_env_info().splitlines()
    yield {"versions": [line for line in lines if re.search(r"ersion|GPU|Model name|^CPU\(s\)|pip3", line)]}
    formats = list(dict.fromkeys((half(job.device), "fp32")))
    if cuda:
        found = torch.cuda.get_device_properties(0)
        yield {"device": str(found), "cudnn": torch.backends.cudnn.version(), "formats": formats, **memory(job)}
    size = 8192 if cuda else 512
    for name in formats:
        a = torch.randn(size, size, device=device, dtype=AUTOCAST[name] or torch.float32)
        seconds = fastest(lambda a=a: a @ a.t(), device, 0.5)
        yield {f"product_{size}_{name}": mfu(job, name, **{"": 2 * size**3 / seconds})}
    source = torch.empty(1 << (30 if cuda else 24), dtype=torch.uint8, device=device)
    host = torch.empty(1 << (28 if cuda else 24), dtype=torch.uint8)
    pairs = {"copy": (torch.empty_like(source), source), "to_device": (source[: len(host)], host)}
    pairs["from_device"] = pairs["to_device"][::-1]
    if cuda:
        pairs |= {
            f"{name}_pinned": tuple(x if x.is_cuda else x.pin_memory() for x in pairs[name]) for name in list(pairs)[1:]
        }
    yield {
        f"{name}_gb_per_s": len(b) / fastest(lambda: a.copy_(b), device, 0.3) / 1e9 for name, (a, b) in pairs.items()
    }
    yield kernels.products(shape(job, job.preset)[0], 16384, device, 4.0, tuple(formats))


def choice(job: Any) -> Facts:
    """The automatic choice, as the first training makes it, and the memory that it leaves behind."""
    from athanor.runtime.choices import choose

    (config, params), notes = shape(job, job.preset), list[str]()
    started, steps = time.perf_counter(), params.tokens // params.batch_tokens
    record = choose([job.work / "slot"], config, "auto", params.batch_tokens, steps, notes.append, params.optimizer)
    yield {"took_s": time.perf_counter() - started, **dataclasses.asdict(record), "notes": notes}
    yield memory(job) | {"reserved_gb": torch.cuda.memory_reserved() / 1e9}


def speed(job: Any, preset: str = "", rows: int = 0, compile: bool = False, attention: str = "default") -> Facts:
    """Whole steps with documents: tokens per second, share of the peak, memory against the estimate, longest kernels."""
    cuda, device, notes = job.device == "cuda", torch.device(job.device), list[str]()
    if compile and not cuda and preset != "d12":
        yield {"skipped": "not on cpu"}
        return
    config, params = shape(job, preset or job.preset)
    B, T, precision = params.batch_tokens, config.context_tokens, half(job.device)
    micro_batch_tokens = min(B, rows * T or (65536 if preset == "d12" else 16384))
    choices = Choices(precision, attention, compile and cuda, micro_batch_tokens=micro_batch_tokens)
    sampler = RandomRows(config.vocab_size, T, DOCUMENT_TOKENS if params.document_mask else np.inf)
    batches = [sampler.batch(number * B, B) for number in range(3)]
    started = time.perf_counter()
    with tuned_stepper(job, config, params, choices, notes) as (plan, stepper):
        ready, estimate = time.perf_counter() - started, training_bytes(config, plan.footprint, device)
        yield {**dataclasses.asdict(choices), "ready_s": ready, "estimated_gb": estimate / 1e9, "notes": notes}

        def timed(steps: int) -> float:
            synchronise(device)
            begun = time.perf_counter()
            for number in range(steps):
                stepper.meter.begin_step()
                stepper.step(batches[number % 3], params.lr)
                stepper.meter.end_step()
            synchronise(device)
            return (time.perf_counter() - begun) / steps

        first, _, before = timed(1), timed(4 if cuda else 1), graphs() if compile else 0
        stepper.meter.window()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(12 if cuda else 2)
        pairs = sum(allowed_pairs(each.document_BS[:, :-1], document_mask=params.document_mask) for each in batches) / 3
        square = B * training_flops(config, T, causal=False)
        yield {"first_step_s": first, "tokens_per_second": B / seconds, **stepper.meter.window(), **memory(job)}
        yield mfu(job, precision, **{"": run_flops(config, B, pairs, B) / seconds, "_full_square": square / seconds})
        yield {"new_graphs": graphs() - before if compile else 0}
        yield profiled(lambda: timed(PROFILED), seconds, cuda)


def profiled(call: Callable[[], Any], seconds: float, cuda: bool) -> dict[str, Any]:
    """Milliseconds of a step by kernel, and for which share of its `seconds` without a profiler the device is busy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [each for each in profiler.key_averages() if str(each.device_type).endswith("CUDA") == cuda]
    rows = sorted((getattr(each, key) / PROFILED / 1e3, each.count // PROFILED, each.key[:90]) for each in events)
    return {"busy": sum(row[0] for row in rows) / seconds / 1e3, "kernels": rows[: -17 if cuda else -4 : -1]}


def nanochat(job: Any) -> Facts:
    """Steps of nanochat's d12 and optimizer as its base_train has them: compiled, 32 rows, its choice of kernels."""
    if not job.nanochat:
        yield {"skipped": "no --nanochat"}
        return
    cuda, device = job.device == "cuda", torch.device(job.device)
    if not cuda:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its optimizer would compile for a minute
    torch.set_float32_matmul_precision("high")  # as its compute_init does
    sys.path.insert(0, str(job.nanochat))
    from nanochat.flash_attention import USE_FA3  # type: ignore[import-not-found]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    depth, T, ids, tokens = d12(job)
    dim, heads, rows = 64 * depth, depth // 2, 32 if cuda else 2
    pattern = "SSSL" if USE_FA3 else "L"  # short windows without FlashAttention 3 are explicit masks, of which it warns
    with torch.device("meta"):
        model = GPT(GPTConfig(T, ids, depth, heads, heads, dim, window_pattern=pattern))
    model.to_empty(device=device).init_weights()
    optimizer, own = model.setup_optimizer(), model.estimate_flops()
    full = 12 * dim * depth * T  # of attention; ours counts the causal half, as model/flops.py does
    run, batch = torch.compile(model, dynamic=False), torch.randint(ids, (2, rows, T), device=device)  # inputs, targets
    seconds = []
    for _ in range(12 if cuda else 3):
        synchronise(device)
        begun = time.perf_counter()
        for _ in range(tokens // (rows * T)):
            (run(*batch) * (rows * T / tokens)).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        synchronise(device)
        seconds.append(time.perf_counter() - begun)
    rate = tokens / float(np.median(seconds[len(seconds) // 3 :]))
    yield {"first_step_s": seconds[0], "tokens_per_second": rate, "window_pattern": pattern, **memory(job)}
    yield mfu(job, "bf16", **{"": rate * (own - full * (T - 1) / (2 * T)), "_own": rate * own})
