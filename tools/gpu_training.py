"""Parts of tools/gpu_report.py about all around the steps: a resumed run, scores, answers, checkpoints, the pipeline."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from athanor.base.strict import read_yaml
from athanor.decoding.engine import Engine
from athanor.decoding.sampling import Sampling
from athanor.hardware.kernels import synchronise
from athanor.model.device import prepare
from athanor.model.transformer import Transformer
from athanor.model.validation import bits_per_byte
from athanor.runtime import presets
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.overlap import Overlap
from athanor.training.schedule import Schedule
from athanor.training.setup import Choices
from athanor.training.state import RunState
from tools.gpu_report import ROOT
from tools.gpu_speed import Facts, RandomRows, half, shape, tuned_model, tuned_stepper
from tools.scratch import Scratch

NEEDED = ("google.protobuf", "gguf", "psutil", "pyarrow", "sentencepiece", "sklearn", "transformers")


def _trained(
    job: Any, folder: Path, deterministic: str, killed: bool = False
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """One training by the loop itself, perhaps killed half way, soon after a checkpoint: its steps and weights."""
    steps, rows = 40 if job.device == "cuda" else 8, list[dict[str, float]]()
    (config, params), asked = shape(job, "one-gpu-hour"), iter(range(1, steps + 1))

    def on_step(row: dict[str, float]) -> None:
        rows.append(row)
        if killed and row["step"] == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks = Hooks(
        validate=lambda model: {}, on_step=on_step, should_save=lambda: killed and next(asked) == steps * 3 // 8
    )
    schedule = Schedule("wsd", params.lr, params.lr, params.batch_tokens, 0, steps * params.batch_tokens)
    local = {"log_every_steps": steps // 4, "save_every_seconds": 3600.0, "deterministic": deterministic}
    choices = Choices(half(job.device))
    with tuned_model(job, config, params, choices, [], steps, **local) as (plan, model):
        sampler = RandomRows(config.vocab_size, config.context_tokens)
        train(model, sampler, OptimizerSettings.of(params), schedule, plan.settings, folder, hooks)
    return rows, {name: weight.detach() for name, weight in model.named_parameters()}


def resume(job: Any, deterministic: str = "off") -> Facts:
    """A killed and resumed training against one that ran through: on a GPU the bits agree if it is deterministic."""
    if job.device == "cpu" and deterministic == "on":
        yield {"skipped": "not on cpu"}
        return
    folder = job.work / f"resume-{deterministic}"
    if not (child := os.fork()):  # before this process touches the device
        _trained(job, folder / "killed", deterministic, killed=True)
        os._exit(1)
    yield {"killed": os.waitpid(child, 0)[1] == signal.SIGKILL}
    resumed, weights = _trained(job, folder / "killed", deterministic)
    yield {"resumed_from": resumed[0]["step"] - 1}
    rows, others = _trained(job, folder / "whole", deterministic)
    differences = [abs(row["loss"] - rows[int(row["step"]) - 1]["loss"]) for row in resumed]
    yield {
        "tokens_per_second": rows[-1]["tokens_per_second"],
        "losses": [rows[0]["loss"], rows[-1]["loss"]],
        "max_loss_difference": max(differences),
        "max_weight_difference": max(float((weights[name] - other).abs().max()) for name, other in others.items()),
    }


def score(job: Any) -> Facts:
    """Bits per byte of held-out text, twice in two formats; then 64 answers at once."""
    cuda, device, (config, params) = job.device == "cuda", prepare(job.device, 2), shape(job, job.preset)
    model = Transformer.fresh(config, params.seed).to(device).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(10.0)  # or all logits are near 0, and rounding does not show
    draw = np.random.default_rng(1)
    lengths = draw.integers(20, 2 * config.context_tokens, 100 if cuda else 10)
    documents = [draw.integers(0, config.vocab_size, length) for length in lengths]
    for name in (f"{half(job.device)} first", f"{half(job.device)} again", "fp32 first", "fp32 again"):
        started = time.perf_counter()
        bytes_V = np.full(config.vocab_size, 4)
        bpb = bits_per_byte(model, documents, bytes_V, config.context_tokens, precision=name.split()[0]).bpb
        yield {name: {"bpb": bpb, "tokens_per_second": int(lengths.sum()) / (time.perf_counter() - started)}}
    rows, prompt, new = (64, 64, 129) if cuda else (8, 16, 9)
    engine = Engine(model, rows=rows, tokens=prompt + new, stop_ids=())
    prompts = draw.integers(0, config.vocab_size, (rows, prompt)).tolist()
    engine.add_requests([(row, prompts[row], new, Sampling()) for row in range(rows)])
    synchronise(device)
    started = time.perf_counter()
    while engine.rows:
        engine.step()
    seconds = time.perf_counter() - started
    yield {"decode_step_ms": 1e3 * seconds / (new - 1), "decoded_per_second": rows * (new - 1) / seconds}


def save(job: Any) -> Facts:
    """Checkpoints of the preset's model: for how long the steps wait, and until they are on the disk."""
    config, params = shape(job, job.preset)
    with tuned_stepper(job, config, params, Choices("fp32"), []) as (_, stepper), Overlap(None, True) as overlap:
        progress, folder = RunState(), job.work / "saved"
        for name in ("first", "second"):
            progress.step += 1
            synchronise(stepper.device)
            started = time.perf_counter()
            overlap.save(folder, stepper, progress, wait=False)
            stall = time.perf_counter() - started
            overlap.finish_writing()
            size = max(path.stat().st_size for path in folder.rglob("*.safetensors"))
            yield {name: {"gb": size / 1e9, "stall_s": stall, "on_disk_s": time.perf_counter() - started}}


def pipeline(job: Any) -> Facts:
    """The default pipeline, or micro's in a rehearsal: each stage by its module, without DVC and MLflow."""
    for package in NEEDED:
        importlib.import_module(package)  # or a stage misses it after a minute
    scratch, seconds = Scratch(ROOT, job.work / "pipeline"), dict[str, float]()
    preset = "micro" if job.preset == "micro" else "default"
    folder = scratch.folder(scratch.base / "run", presets.values(ROOT / "presets" / f"{preset}.yaml"))
    environment = os.environ | {
        "DVC_ROOT": str(folder),
        "PYTHONPATH": os.environ["PYTHONPATH"].partition(os.pathsep)[2],
    }
    for stage in read_yaml(ROOT / "dvc.yaml")["stages"]:
        started = time.perf_counter()
        subprocess.run(scratch.command(stage), cwd=folder, env=environment, check=True)
        seconds[stage] = time.perf_counter() - started
        yield {"stages": seconds}
        if stage in ("pretrain", "sft"):
            facts = json.loads((folder / "metrics" / "runs" / f"{stage}.json").read_text())["facts"]
            yield {stage: {key: facts.get(key) for key in ("choices", "tokens_per_second", "mfu")}}
        if stage == "eval":
            yield {"summary": json.loads((folder / "metrics" / "summary" / "eval.json").read_text())}
