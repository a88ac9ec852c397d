"""The one training loop, for pretraining and fine-tuning alike.

Takes a model, a stateless sampler, settings and a folder for checkpoints;
tells the outside what happens through `Hooks`. Killed at any moment and
started again it ends with the same weights, bit for bit on a CPU: the batch,
the learning rate and the curve depend on the token position only, and a
checkpoint holds everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from athanor.errors import GateError, Interrupted
from athanor.model.config import ModelConfig
from athanor.model.flops import training_flops
from athanor.model.transformer import Transformer
from athanor.training import checkpoint
from athanor.training.lanes import Lanes
from athanor.training.loss import Targets, supervised, targets, token_losses
from athanor.training.optimizer import AdamWSettings, adamw, clip_gradients, step_unless
from athanor.training.precision import LossScale, autocast
from athanor.training.schedule import Schedule
from athanor.training.state import RunState, json_safe, restore, run_tensors

MAX_SKIPPED_IN_A_ROW = 50
PROBE_ROWS = 2


class Rows(Protocol):
    """A batch: int64 [B, T + 1] ids and document numbers; `mask_BS` (1 = supervised) if there is a loss mask."""

    tokens_BS: np.ndarray
    document_BS: np.ndarray


class Sampler(Protocol):
    def batch(self, position_tokens: int, batch_tokens: int) -> Rows: ...


@dataclass(frozen=True)
class LoopSettings:
    """What decides the result, then how this machine runs it. `total_tokens` is a multiple of `batch_tokens`."""

    total_tokens: int
    batch_tokens: int
    grad_clip: float
    z_loss: float
    precision: str
    document_mask: bool
    validation_every_tokens: int
    sample_every_tokens: int
    micro_batch_rows: int
    threads: int  # at work on micro-batches, where there are lanes
    log_every_steps: int
    save_every_seconds: float

    @property
    def steps(self) -> int:
        return self.total_tokens // self.batch_tokens


@dataclass
class Hooks:
    """The outside world. Nothing here may change weights or draw from a global random state."""

    validate: Callable[[Transformer], dict[str, Any]]
    before_first_step: Callable[[Transformer], None] = lambda model: None
    on_resume: Callable[[int], None] = lambda tokens: None
    on_step: Callable[[dict[str, float]], None] = lambda row: None
    on_validation: Callable[[int, dict[str, Any]], None] = lambda step, scores: None
    on_sample: Callable[[int, Transformer], None] = lambda step, model: None
    on_note: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass
class TrainResult:
    """`curve`: at most 2000 rows of means; `validations`: {step, tokens, **scores} each, the last one at the end.

    `seconds` and `trained_tokens` are of this process only, without
    validation, samples and checkpoints.
    """

    steps: int
    tokens: int
    skipped_steps: int
    supervised_tokens: int
    curve: list[dict[str, float | None]]
    validations: list[dict[str, Any]]
    seconds: float
    trained_tokens: int

    def metrics(self, config: ModelConfig) -> dict[str, Any]:
        """What the run was and ended with; nothing that differs between equal runs."""
        return {
            "parameters": config.parameter_count(),
            "steps": self.steps,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "flops": training_flops(config, config.context_tokens) * self.tokens,
            "skipped_steps": self.skipped_steps,
            "train_loss": self.curve[-1]["loss"],
            "validation": {k: v for k, v in self.validations[-1].items() if k not in ("step", "tokens")},
        }

    def timings(self, config: ModelConfig) -> dict[str, float]:
        """Speed of this process; empty when there was nothing left to train."""
        if not self.seconds:
            return {}
        speed = self.trained_tokens / self.seconds
        gflops = speed * training_flops(config, config.context_tokens) / 1e9
        return {"train_seconds": self.seconds, "tokens_per_second": speed, "model_gflops": gflops}

    def validation_rows(self, values: Callable[[dict[str, Any]], dict[str, float]]) -> list[dict[str, float]]:
        """A row for each validation: its tokens and what `values` takes from its scores."""
        return [{"tokens": scores["tokens"], **values(scores)} for scores in self.validations]



def train(
    model: Transformer,
    sampler: Sampler,
    optimizer_settings: AdamWSettings,
    schedule: Schedule,
    settings: LoopSettings,
    folder: Path,
    hooks: Hooks,
) -> TrainResult:
    """Train `model` in place, from its newest checkpoint in `folder` if there is one.

    A finished run returns at once with its result. Raises Interrupted after
    saving when `hooks.should_stop()`, GateError when nothing but non-finite
    gradients comes.
    """
    with Lanes(model, settings.threads) as lanes:
        return _train(lanes, sampler, optimizer_settings, schedule, settings, folder, hooks)


def _train(
    lanes: Lanes,
    sampler: Sampler,
    optimizer_settings: AdamWSettings,
    schedule: Schedule,
    settings: LoopSettings,
    folder: Path,
    hooks: Hooks,
) -> TrainResult:
    folder.mkdir(parents=True, exist_ok=True)
    model = lanes.model
    device = model.head_weight.device
    progress = RunState(settings.steps)
    saved = checkpoint.latest(folder, hooks.on_note)
    if saved is None:
        hooks.before_first_step(model)
    optimizer, scale = adamw(model, optimizer_settings), LossScale(settings.precision, device)
    if saved is not None:
        restore(saved, model, optimizer, scale, progress)
        hooks.on_resume(progress.step * settings.batch_tokens)
    pin_step = schedule.cooldown_start // settings.batch_tokens

    def save() -> None:
        tensors = run_tensors(model, optimizer, scale)
        checkpoint.save(folder, progress.step, tensors, progress.state(), pinned=progress.step == pin_step)

    pending: list[Tensor] = []
    seconds, trained, saved_at = 0.0, 0, time.monotonic()
    window_seconds = 0.0
    while progress.step < settings.steps:
        started = time.perf_counter()
        position = progress.step * settings.batch_tokens
        rate = schedule.rate(position + settings.batch_tokens)
        rows = sampler.batch(position, settings.batch_tokens)
        scalars, count = _step(lanes, optimizer, scale, rows, rate, settings)
        pending.append(scalars)
        progress.step += 1
        progress.supervised += count
        trained += settings.batch_tokens
        last = progress.step == settings.steps
        stop = hooks.should_stop()
        validate = last or _crosses(position, settings.batch_tokens, settings.validation_every_tokens)
        save_now = last or stop or progress.step == pin_step
        save_now = save_now or time.monotonic() - saved_at >= settings.save_every_seconds
        if validate or save_now or len(pending) >= settings.log_every_steps:
            fetched = torch.stack(pending).tolist()  # the only look at the device
            window_seconds += time.perf_counter() - started
            seconds += time.perf_counter() - started
            _record(progress, fetched, schedule, settings, window_seconds, hooks)
            pending, window_seconds = [], 0.0
        else:
            window_seconds += time.perf_counter() - started
            seconds += time.perf_counter() - started
        if validate:
            scores = json_safe(hooks.validate(model))
            tokens = progress.step * settings.batch_tokens
            progress.validations.append({"step": progress.step, "tokens": tokens, **scores})
            hooks.on_validation(progress.step, scores)
        if last or _crosses(position, settings.batch_tokens, settings.sample_every_tokens):
            hooks.on_sample(progress.step, model)
        if save_now:
            save()
            saved_at = time.monotonic()
        if stop and not last:
            raise Interrupted(f"stopped at step {progress.step} of {settings.steps}, saved in {folder}")
    curve = progress.curve.rows()
    if curve[-1]["lr"] != schedule.final:
        raise GateError("final learning rate", f"{curve[-1]['lr']} instead of {schedule.final}", where=str(folder))
    return TrainResult(
        progress.step,
        progress.step * settings.batch_tokens,
        progress.skipped,
        progress.supervised,
        curve,
        progress.validations,
        seconds,
        trained,
    )


def _step(
    lanes: Lanes,
    optimizer: torch.optim.AdamW,
    scale: LossScale,
    rows: Rows,
    rate: float,
    settings: LoopSettings,
) -> tuple[Tensor, int]:
    """One optimiser step; returns [loss, gradient norm before clipping, skipped] on the device, and the targets."""
    model = lanes.model
    device = model.head_weight.device
    mask_BS = getattr(rows, "mask_BS", None)
    # Of the whole step, not of a micro-batch; at least 1, for a batch with nothing to learn from.
    count = int(supervised(rows.document_BS, mask_BS).sum())

    def loss_of(replica: Transformer, batch: Targets) -> Tensor:
        with autocast(settings.precision, device):
            part = token_losses(replica, batch.to(device), z_loss=settings.z_loss).sum() / max(1, count)
        scale.scaled(part).backward()
        return part.detach()

    loss = lanes.backward(micro_batches(rows, settings.micro_batch_rows, settings.document_mask), loss_of)
    scale.unscale([weight.grad for weight in model.parameters() if weight.grad is not None])
    norm = clip_gradients(model.parameters(), settings.grad_clip)
    skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
    step_unless(optimizer, skipped, rate)
    scale.update(skipped)
    return torch.stack((loss, norm, skipped.float())), count


def micro_batches(rows: Rows, micro_batch_rows: int, document_mask: bool) -> list[Targets]:
    """Cut a batch into groups of rows, in order."""
    mask_BS = getattr(rows, "mask_BS", None)
    cuts = [slice(at, at + micro_batch_rows) for at in range(0, len(rows.tokens_BS), micro_batch_rows)]
    return [
        targets(
            rows.tokens_BS[cut],
            rows.document_BS[cut],
            None if mask_BS is None else mask_BS[cut],
            document_mask=document_mask,
        )
        for cut in cuts
    ]


def _record(
    progress: RunState,
    fetched: list[list[float]],
    schedule: Schedule,
    settings: LoopSettings,
    window_seconds: float,
    hooks: Hooks,
) -> None:
    """Enter fetched scalars of the last steps into the curve and tell the hooks."""
    speed = len(fetched) * settings.batch_tokens / max(window_seconds, 1e-9)
    for index, (loss, norm, skipped) in enumerate(fetched):
        step = progress.step - len(fetched) + index + 1
        rate = schedule.rate(step * settings.batch_tokens)
        progress.skipped += int(skipped)
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
        progress.curve.add(step * settings.batch_tokens, loss, rate, norm)
        row = {
            "step": step,
            "tokens": step * settings.batch_tokens,
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "skipped": skipped,
            "tokens_per_second": speed,
        }
        hooks.on_step(row)
        if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise GateError(
                "finite steps",
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a gradient that is not finite",
                where=f"step {step}",
                fix="lower lr, or use precision fp32",
            )


def _crosses(position: int, batch_tokens: int, every_tokens: int) -> bool:
    """Whether the step from `position` reaches a multiple of `every_tokens` (0: never)."""
    return bool(every_tokens) and (position + batch_tokens) // every_tokens > position // every_tokens


def whole_steps(tokens: int, batch_tokens: int) -> int:
    """`tokens` rounded down to whole steps, at least one."""
    return max(1, tokens // batch_tokens) * batch_tokens


def probe_batch(rows: Rows, document_mask: bool) -> Targets:
    """The first rows of a batch, small enough to try things on."""
    return micro_batches(rows, PROBE_ROWS, document_mask)[0]
