"""Training on an accelerator: speed, memory against the estimate, and a killed run that goes on. Without any data.

    python -m tools.bench_gpu [--preset plasma-1.1] [--steps 2000] [--variants bf16,bf16-compiled,fp16,fp32]
    python -m tools.bench_gpu --preset micro --steps 20 --device cpu --variants fp32      # tries the script itself
    git clone https://github.com/karpathy/nanochat /tmp/nanochat; ... --nanochat /tmp/nanochat   # its d12 beside ours

Ids are random, in rows of several documents as the preset's are. Each variant is a process of its own, and prints
tokens per second (the median of the steps after the first twenty), model FLOPs utilisation by the data sheet, the share of
the ceiling measured here, and peak memory beside what was estimated. Then the first variant is killed half way, goes
on, and is compared with one that was left alone. nanochat's model and optimizer run as in its base_train, from a
checkout (its gpt.py and optim.py need torch alone), compiled, on random ids,
after the first of our variants: its own count of operations against the same data sheet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from athanor.base.strict import build
from athanor.runtime import presets

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS = 20
DOCUMENT_TOKENS = 600  # about what pages of the web have


class RandomRows:
    """A sampler of random ids; the document numbers change about every `DOCUMENT_TOKENS`."""

    def __init__(self, vocab_size: int, context_tokens: int) -> None:
        self.vocab_size, self.context_tokens = vocab_size, context_tokens

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> Any:
        draw = np.random.Generator(np.random.PCG64([1, position_tokens + skipped_tokens]))
        shape = batch_tokens // self.context_tokens, self.context_tokens + 1
        document_BS = np.cumsum(draw.random(shape) < 1 / DOCUMENT_TOKENS, axis=1)
        return SimpleNamespace(tokens_BS=draw.integers(0, self.vocab_size, shape), document_BS=document_BS)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One training in this process; `kill_at` ends it there."""
    import torch

    from athanor.hardware import kernels
    from athanor.hardware.measure import ceilings
    from athanor.model.flops import run_flops
    from athanor.model.transformer import Transformer
    from athanor.runtime.hooks import rates
    from athanor.runtime.machine import cores
    from athanor.training.loop import Hooks, train
    from athanor.training.memory import training_bytes
    from athanor.training.model_params import ModelParams
    from athanor.training.optimizer import OptimizerSettings
    from athanor.training.pretrain_params import PretrainParams
    from athanor.training.schedule import Schedule
    from athanor.training.setup import Choices, ExecutionPlan, tuned
    from athanor.training.world import SINGLE

    values = presets.values(ROOT / "presets" / f"{job['preset']}.yaml")
    params = build(PretrainParams, values["pretrain"], "pretrain")
    config = build(ModelParams, values["model"], "model").config(values["tokenizer"]["vocab_size"])
    precision, _, compiled = job["variant"].partition("-")
    choices = Choices(precision, compile=bool(compiled), micro_batch_tokens=job["micro_batch_tokens"])
    machine = SimpleNamespace(
        device=job["device"],
        threads=cores(),
        overlap="auto",
        log_every_steps=10,
        save_every_seconds=job.get("save_every", 60.0),
    )
    total = job["steps"] * params.batch_tokens
    plan = ExecutionPlan.of(
        "pretrain", params, machine, SINGLE, choices, config,
        total_tokens=total, document_mask=params.document_mask, validation_every_tokens=0, sample_every_tokens=0,
    )  # fmt: skip
    torch.manual_seed(params.seed)
    model = Transformer.fresh(config, params.seed).to(plan.device)
    seconds: dict[int, float] = {}

    def on_step(row: dict[str, float]) -> None:
        seconds[int(row["step"])] = row.get("time.step_s", float("nan"))
        if row["step"] == job.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)

    hooks = Hooks(validate=lambda model: {}, on_step=on_step, on_note=lambda text: print(text, file=sys.stderr))
    optimizer = OptimizerSettings.of(params)
    schedule = Schedule("wsd", params.lr, params.lr, params.batch_tokens, 0, total)
    with tuned(model, choices, plan.footprint, plan.settings, hooks, Path(tempfile.gettempdir()) / "athanor-bench-gpu"):
        started = time.perf_counter()
        result = train(model, RandomRows(config.vocab_size, config.context_tokens), optimizer, schedule, plan.settings,
                       Path(job["folder"]), hooks)  # fmt: skip
        wall = time.perf_counter() - started
    measured = [value for step, value in seconds.items() if step > WARM_STEPS and value == value]
    step_s = statistics.median(measured) if measured else wall / job["steps"]
    flops = run_flops(config, params.batch_tokens, result.pairs / result.steps, params.batch_tokens)
    name = torch.cuda.get_device_name() if plan.device.type == "cuda" else ""
    products = kernels.products(config, plan.footprint.micro_batch_tokens, plan.device, 8.0, (precision,))
    facts = {
        "tokens_per_second": params.batch_tokens / step_s,
        **rates({"model_gflops": flops / step_s / 1e9}, name, precision, None),
        "of_ceiling": flops / step_s / 1e9 / ceilings({"products": products})[precision],
        "estimated_gb": training_bytes(config, plan.footprint, plan.device) / 1e9,
        "last_loss": result.curve[-1]["loss"],
    }
    if plan.device.type == "cuda":
        facts |= {
            "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
            "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
    return facts


def run_nanochat(job: dict[str, Any]) -> dict[str, Any]:
    """Steps of nanochat's model of a depth, with its widths, heads, windows and optimizer."""
    sys.path.insert(0, job["nanochat"])
    import torch
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    from athanor.hardware.peaks import peak_tflops

    depth, device, accelerated = job["depth"], torch.device(job["device"]), job["device"] == "cuda"
    dim, T = 64 * depth, job["row_tokens"]
    heads = max(1, dim // 128)
    rows, tokens_per_step = job["rows"], job["tokens"]
    with torch.device("meta"):
        model = GPT(GPTConfig(T, 32768, depth, heads, heads, dim))
    model.to_empty(device=device)
    model.init_weights()
    flops_per_token, optimizer = model.estimate_flops(), model.setup_optimizer()
    compiled = torch.compile(model, dynamic=False) if accelerated else model
    micro_batches = max(1, tokens_per_step // (rows * T))
    times = []
    for _ in range(job["steps"]):
        started = time.perf_counter()
        for _ in range(micro_batches):
            ids = torch.randint(32768, (rows, T + 1), device=device)
            (compiled(ids[:, :-1], ids[:, 1:]) / micro_batches).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if accelerated:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    rate = micro_batches * rows * T / statistics.median(times[min(WARM_STEPS, len(times) // 2) :])
    peak = peak_tflops(torch.cuda.get_device_name(), "bf16") if accelerated else None
    facts = {"tokens_per_second": rate, "tflops": rate * flops_per_token / 1e12}
    return facts | ({"mfu": facts["tflops"] / peak} if peak else {})


def child(job: dict[str, Any]) -> dict[str, Any] | None:
    """`run` in a process of its own; None if it was killed or failed."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_gpu", "--job", json.dumps(job)], stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="plasma-1.1")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--variants", default="bf16,bf16-compiled,fp16,fp32")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="0: the trainer's rule")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nanochat", metavar="CHECKOUT", help="time its d12, too")
    parser.add_argument("--nanochat-depth", type=int, default=12)
    parser.add_argument("--nanochat-rows", type=int, default=32, help="of 2,048 tokens in a micro-batch")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        asked = json.loads(args.job)
        print(json.dumps((run_nanochat if "nanochat" in asked else run)(asked)))
        return
    theirs = {
        "nanochat": args.nanochat,
        "depth": args.nanochat_depth,
        "device": args.device,
        "row_tokens": 2048 if args.device == "cuda" else 128,
        "rows": args.nanochat_rows,
        "tokens": 524_288 if args.device == "cuda" else 0,  # its own for d12
        "steps": min(args.steps, 4 * WARM_STEPS),
    }
    job = {name: getattr(args, name) for name in ("preset", "steps", "device", "micro_batch_tokens")}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(args.variants.split(",")):
            results[variant] = child({**job, "variant": variant, "folder": f"{folder}/{number}"})
            print(f"{variant:<16}", json.dumps(results[variant]), flush=True)
            if args.nanochat and number == 0:
                print(f"nanochat d{args.nanochat_depth:<6}", json.dumps(child(theirs)), flush=True)
        first = {**job, "variant": args.variants.split(",")[0], "folder": f"{folder}/killed"}
        child({**first, "kill_at": args.steps // 2, "save_every": 1.0})
        resumed, whole = child(first), results[first["variant"]]
        print("killed and resumed", json.dumps(resumed))
        if resumed and whole:
            print(f"last loss {resumed['last_loss']:.6f}, of the run left alone {whole['last_loss']:.6f}")


if __name__ == "__main__":
    main()
