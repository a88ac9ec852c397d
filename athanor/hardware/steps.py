"""Whole training steps of a small part of a model: by number format, compiled or not."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from athanor.hardware.kernels import compare, threads
from athanor.model.config import ModelConfig
from athanor.model.loss import Targets, training_loss
from athanor.model.precision import LossScale, autocast, autocast_dtype, products
from athanor.model.transformer import Transformer
from athanor.training.compiling import (
    Shapes,
    compile_block,
    first_line,
    run_in_subprocess,
    tune_blocks,
    untune,
    use_cache,
)

_LAYERS = 2  # of the part that is measured
_STABLE_STEPS = 20
_SCALE_HALVINGS = 4  # that a new loss scale may need to settle


def truncated_model(config: ModelConfig, device: torch.device, layers: int = _LAYERS) -> Transformer:
    return Transformer.fresh(dataclasses.replace(config, layers=min(layers, config.layers)), 0).to(device)


def batch(config: ModelConfig, rows: int, device: torch.device) -> Targets:
    """Rows of made-up ids, each of them a target."""
    T = config.context_tokens
    ids_BT = (torch.arange(rows * T, device=device) * 7 % config.vocab_size).view(rows, T)
    return Targets(ids_BT, None, torch.arange(rows * T, device=device), ids_BT.roll(-1, 1).flatten())


def step(model: Transformer, rows: Targets, precision: str, scale: float = 1.0) -> torch.Tensor:
    """Forward and backward of one micro-batch; returns the loss."""
    model.zero_grad(set_to_none=True)
    with products(precision, rows.ids_BT.device):
        with autocast(precision, rows.ids_BT.device):
            loss = training_loss(model, rows, rows.next_N.numel())
        (loss * scale).backward()
    return loss.detach()


def by_format(
    config: ModelConfig, rows: int, formats: Sequence[str], device: torch.device, budget_seconds: float
) -> dict[str, float]:
    """Tokens per second of forward and backward, output layer included, in each format."""
    model, data = truncated_model(config, device), batch(config, rows, device)
    calls: dict[str, Callable[[], Any]] = {name: functools.partial(step, model, data, name) for name in formats}
    return {name: data.next_N.numel() / seconds for name, seconds in compare(calls, device, budget_seconds).items()}


def stable(config: ModelConfig, precision: str, device: torch.device) -> bool:
    """Whether a short training in a format stays finite, with its loss scale settled."""
    model, data = truncated_model(config, device), batch(config, 1, device)
    scale, skipped, loss = LossScale(precision, device), 0, torch.zeros(())
    for _ in range(_STABLE_STEPS):
        loss = step(model, data, precision, float(scale.scale))
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        scale.unscale(gradients)
        bad = ~torch.stack([gradient.isfinite().all() for gradient in gradients]).all() | ~loss.isfinite()
        scale.update(bad)
        if bool(bad):
            skipped += 1
            continue
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().clamp(min=1e-6)
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=0.01 / float(norm.clamp(min=1.0)))
    return bool(loss.isfinite()) and skipped <= _SCALE_HALVINGS


def answer_of(module: str, job: dict[str, Any], seconds: float) -> Any:
    """Run a job by a module's `answer` in a process of its own; RuntimeError with the reason if it fails."""
    output, problem = run_in_subprocess(module, [json.dumps({**job, "seconds": seconds})], seconds)
    if problem:
        raise RuntimeError(problem)
    return json.loads(output.strip().splitlines()[-1])


def answer(work: Callable[[dict[str, Any]], Any]) -> int:
    """Print what `work` makes of the job on the command line, or its error; the exit status."""
    job = json.loads(sys.argv[1])
    signal.alarm(int(job.pop("seconds")) + 1)  # in case the process that would end this one is gone
    try:
        print(json.dumps(work(job)))
    except Exception as error:  # of a compiler, a driver or a kernel: of any type
        print(first_line(error))
        return 1
    return 0


def compiling(
    config: ModelConfig, rows: int, precision: str, device: torch.device, count: int, cache: Path, limit_seconds: float
) -> dict[str, Any]:
    """What compiling one block costs and brings, measured in a process of its own: a compiler may hang."""
    job = {
        "config": config.to_dict(), "rows": rows, "precision": precision, "device": str(device), "threads": count,
        "cache": str(cache),
    }  # fmt: skip
    try:
        return {"works": True, "why": "", **answer_of("athanor.hardware.steps", job, limit_seconds)}
    except RuntimeError as error:
        return {"works": False, "why": str(error)}


def _compile_and_time(job: dict[str, Any]) -> dict[str, float]:
    torch.set_flush_denormal(True)
    use_cache(Path(job["cache"]))
    config, device, name = ModelConfig.from_dict(job["config"]), torch.device(job["device"]), job["precision"]
    model = truncated_model(config, device, layers=1)
    with autocast(name, device):  # as `Transformer.hidden` gives it to blocks
        dtype = torch.bfloat16 if autocast_dtype(device) is torch.bfloat16 else torch.float32
    shape = job["rows"], config.context_tokens, config.dim
    x_BTD = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    block = model.model.layers[0]

    def run() -> None:
        with products(name, device):
            with autocast(name, device):
                out = block(x_BTD, model.rotary, None, None)
            torch.autograd.grad(out.float().sum(), [x_BTD, *block.parameters()])

    shapes = Shapes(frozenset({(job["rows"], config.context_tokens)}), documents=False)
    with threads(job["threads"]):
        started = time.perf_counter()
        compiled = compile_block([model], shapes, name, job["threads"])
        cold = time.perf_counter() - started

        def run_switched(compiled_on: bool) -> None:
            if compiled_on:
                tune_blocks([model], compiled=compiled, rows_tokens=shapes.rows_tokens)
            else:
                untune([model])
            run()

        took = compare({"eager": lambda: run_switched(False), "compiled": lambda: run_switched(True)}, device, 3.0)
    return {"cold_seconds": cold, "eager_seconds": took["eager"], "compiled_seconds": took["compiled"]}


if __name__ == "__main__":
    sys.exit(answer(_compile_and_time))
