"""Parts of tools/gpu_report.py that use what training leads to: a resumed run, scores, answers, checkpoints, the stages."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from athanor.decoding.engine import Engine
from athanor.decoding.sampling import Sampling
from athanor.hardware.kernels import synchronise
from athanor.model.device import prepare
from athanor.model.transformer import Transformer
from athanor.model.validation import bits_per_byte
from athanor.runtime import presets
from athanor.training import checkpoint
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.overlap import Overlap
from athanor.training.schedule import Schedule
from athanor.training.setup import Choices
from athanor.training.state import RunState
from athanor.training.step import Stepper
from tools.gpu_report import ROOT, Job
from tools.gpu_speed import RandomRows, half, shape, tuned_model
from tools.scratch import Scratch


def _trained(job: Job, folder: Path, attention: str, killed: bool = False) -> dict[str, Any]:
    """One training by the loop itself, killed half way if asked to: losses by step, seconds of a step, weights."""
    cuda = job.device == "cuda"
    config, params = shape(job, "one-gpu-hour")
    steps, B = 40 if cuda else 8, params.batch_tokens
    seen: dict[str, Any] = {"losses": {}, "step_s": 0.0, "resumed_from": 0}
    asked = iter(range(1, steps + 1))

    def on_step(row: dict[str, float]) -> None:
        seen["losses"][int(row["step"])] = row["loss"]
        seen["step_s"] = row.get("time.step_s", seen["step_s"])
        if killed and row["step"] == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_resume(tokens: int) -> None:
        seen["resumed_from"] = tokens // B

    hooks = Hooks(
        validate=lambda model: {},
        on_step=on_step,
        on_resume=on_resume,
        should_save=lambda: killed and next(asked) == steps * 3 // 8,
    )
    choices = Choices(half(torch.device(job.device)), attention)
    schedule = Schedule("wsd", params.lr, params.lr, B, 0, steps * B)
    local = {"log_every_steps": steps // 4, "save_every_seconds": 3600.0}
    with tuned_model(job, config, params, choices, [], steps * B, **local) as (plan, model):
        sampler = RandomRows(config.vocab_size, config.context_tokens)
        train(model, sampler, OptimizerSettings.of(params), schedule, plan.settings, folder, hooks)
    seen["weights"] = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    seen["tokens_per_second"] = B / seen["step_s"]
    return seen


def resume(job: Job, attention: str = "default") -> Iterator[dict[str, Any]]:
    """A killed and resumed training against one that was left alone. On a GPU the bits may differ: atomic sums."""
    if job.device == "cpu" and attention != "default":
        yield {"skipped": "not on cpu"}
        return
    folder = job.work / f"resume-{attention}"
    child = os.fork()  # before this process touches the device
    if not child:
        try:
            _trained(job, folder / "killed", attention, killed=True)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    yield {"killed": status == -signal.SIGKILL}
    resumed = _trained(job, folder / "killed", attention)
    yield {"resumed_from": resumed["resumed_from"]}
    whole = _trained(job, folder / "whole", attention)
    yield {
        "tokens_per_second": whole["tokens_per_second"],
        "losses": [whole["losses"][step] for step in (1, max(whole["losses"]))],
        "max_loss_difference": max(abs(loss - whole["losses"][step]) for step, loss in resumed["losses"].items()),
        "max_weight_difference": max(
            float((weight - whole["weights"][name]).abs().max()) for name, weight in resumed["weights"].items()
        ),
    }


def score(job: Job) -> Iterator[dict[str, Any]]:
    """Held-out text twice in two formats, and 64 answers at once."""
    cuda, device = job.device == "cuda", prepare(job.device, torch.get_num_threads())
    config, params = shape(job, job.preset)
    model = Transformer.fresh(config, params.seed).to(device).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(10.0)  # or all logits would be near 0, and rounding would not show
    draw = np.random.default_rng(1)
    lengths = draw.integers(20, 2 * config.context_tokens, 100 if cuda else 10)
    documents = [draw.integers(0, config.vocab_size, length) for length in lengths]
    token_bytes = np.full(config.vocab_size, 4)
    tokens, bpb = int(lengths.sum()), {}
    for precision in dict.fromkeys((half(device), "fp32")):
        for time_of in ("first", "second"):
            started = time.perf_counter()
            result = bits_per_byte(model, documents, token_bytes, config.context_tokens, precision=precision)
            yield {f"{precision}_{time_of}_tokens_per_second": tokens / (time.perf_counter() - started)}
        bpb[precision] = result.bpb
        yield {f"{precision}_bpb": result.bpb}
    yield {"bpb_difference": max(bpb.values()) - min(bpb.values())}
    rows, prompt, new = (64, 64, 129) if cuda else (8, 16, 9)
    engine = Engine(model, rows=rows, tokens=prompt + new, stop_ids=())
    requests = [(row, list(map(int, draw.integers(0, config.vocab_size, prompt))), new, Sampling(0.0)) for row in range(rows)]
    started = time.perf_counter()
    engine.add_requests(requests)
    synchronise(device)
    prefill, started = time.perf_counter() - started, time.perf_counter()
    steps = 0
    while engine.rows:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started
    yield {"prefill_s": prefill, "decode_ms": 1000 * seconds / steps, "decoded_per_second": rows * steps / seconds}


def save(job: Job) -> Iterator[dict[str, Any]]:
    """A checkpoint of the preset's model next to the steps: how long a step waits for it, and until it is on the disk."""
    config, params = shape(job, job.preset)
    choices = Choices("fp32", micro_batch_tokens=params.batch_tokens)
    with tuned_model(job, config, params, choices, [], params.batch_tokens) as (plan, model):
        with CpuReplicas(model, plan.settings.threads) as replicas, Overlap(RandomRows(8, 8), True) as overlap:
            stepper, progress, folder = Stepper(replicas, OptimizerSettings.of(params), plan.settings), RunState(), job.work / "saved"
            for number in ("first", "second"):
                progress.step += 1
                synchronise(plan.device)
                started = time.perf_counter()
                overlap.save(folder, stepper, progress, wait=False)
                stall = time.perf_counter() - started
                overlap.finish_writing()
                total = time.perf_counter() - started
                size = sum(path.stat().st_size for path in checkpoint.steps(folder)[0].iterdir())
                yield {number: {"gb": size / 1e9, "stall_s": stall, "total_s": total, "gb_per_s": size / total / 1e9}}


def pipeline(job: Job) -> Iterator[dict[str, Any]]:
    """The default pipeline (micro: of that preset), each stage by its module, without DVC and MLflow."""
    for package in ("pyarrow", "sentencepiece", "psutil", "gguf"):
        importlib.import_module(package)  # or the last stage says so after a minute
    preset = "micro" if job.preset == "micro" else "default"
    scratch = Scratch(ROOT, job.work / "pipeline")
    folder = scratch.folder(job.work / "pipeline" / "run", presets.values(ROOT / "presets" / f"{preset}.yaml"))
    environment = {**os.environ, "DVC_ROOT": str(folder), "PYTHONPATH": os.environ["PYTHONPATH"].partition(os.pathsep)[2]}
    seconds: dict[str, float] = {}
    for stage, entry in scratch.graph.stages.items():
        if entry["cmd"].split()[0] != "python" or "rl" in str(entry.get("wdir", "")):
            continue
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *entry["cmd"].split()[1:]], cwd=folder, env=environment, stdin=subprocess.DEVNULL, text=True
        )
        seconds[stage] = time.perf_counter() - started
        yield {"stages": seconds}
        if done.returncode:
            yield {"error": f"stage {stage} exited {done.returncode}"}
            return
        runs = folder / "metrics" / "runs" / f"{stage.replace('-', '_')}.json"
        if stage in ("pretrain", "sft"):
            facts = json.loads(runs.read_text())
            yield {stage: {key: facts[key] for key in ("choices", "tokens_per_second") if key in facts}}
    yield {"summary": json.loads((folder / "metrics" / "summary" / "eval.json").read_text())}


