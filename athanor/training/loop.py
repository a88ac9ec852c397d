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

import torch
from torch import Tensor

from athanor.errors import GateError, Interrupted
from athanor.model.transformer import Transformer
from athanor.training import checkpoint
from athanor.training.lanes import Lanes
from athanor.training.optimizer import AdamWSettings
from athanor.training.result import TrainResult
from athanor.training.schedule import Schedule
from athanor.training.settings import LoopSettings
from athanor.training.state import RunState, json_safe, resume, save
from athanor.training.step import Rows, Stepper
from athanor.training.world import ALONE, World

MAX_SKIPPED_IN_A_ROW = 50


class Sampler(Protocol):
    def batch(self, position_tokens: int, batch_tokens: int) -> Rows: ...


@dataclass
class Hooks:
    """The outside world. Nothing here may change weights or draw from a global random state.

    After a resume `on_replay` gets every step that the checkpoint knows, and
    `on_validation` every score: a record that was lost, or that another run
    of the same trunk made, can be filled up.
    """

    validate: Callable[[Transformer], dict[str, Any]]
    before_first_step: Callable[[Transformer], None] = lambda model: None
    on_resume: Callable[[int], None] = lambda tokens: None
    on_replay: Callable[[dict[str, float]], None] = lambda row: None
    on_step: Callable[[dict[str, float]], None] = lambda row: None
    on_validation: Callable[[int, dict[str, Any]], None] = lambda step, scores: None
    on_sample: Callable[[int, Transformer], None] = lambda step, model: None
    on_note: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False


class Trunk(Protocol):
    """Where checkpoints of the phase before the cooldown are kept: a folder, and a lock to enter before using it."""

    path: Path

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...


def train(
    model: Transformer,
    sampler: Sampler,
    optimizer_settings: AdamWSettings,
    schedule: Schedule,
    settings: LoopSettings,
    folder: Path,
    hooks: Hooks,
    trunk: Trunk | None = None,
    world: World = ALONE,
) -> TrainResult:
    """Train `model` in place, from its newest checkpoint in `folder` if there is one.

    With a `trunk`, checkpoints until the cooldown are kept there: that phase
    does not depend on the number of tokens (Hägele et al. 2024,
    arXiv:2405.18392), so runs of other lengths continue from it.

    In a `world` of several processes all of them call this. Only the main one
    uses the folders, and has the trained `model` afterwards; the hooks are
    called in all (except for samples), and what decides what to do next must
    not differ between them.

    A finished run returns at once with its result. Raises Interrupted after
    saving when `hooks.should_stop()`, GateError when nothing but non-finite
    gradients comes.
    """
    with world.watched(), Lanes(model, settings.threads) as lanes:
        run = _Training(Stepper(lanes, optimizer_settings, settings, world), sampler, schedule, settings, hooks)
        found = run.resume(folder)
        if trunk is not None and not found:
            with trunk:
                if not run.resume(trunk.path, at_most=run.pin_step):
                    hooks.before_first_step(model)
                run.advance(trunk.path, run.pin_step)
                # A longer run may have saved this very step on its way, when it was just another one.
                if world.main:
                    checkpoint.pin(trunk.path, run.pin_step)
        elif not found:
            hooks.before_first_step(model)
        run.advance(folder, settings.steps)
        run.stepper.model  # noqa: B018  gathers the weights where they are sharded
        world.leave()
        return run.result(folder)


class _Training:
    """A model on its way: where it stands, and how it gets from one step to a later one."""

    def __init__(
        self,
        stepper: Stepper,
        sampler: Sampler,
        schedule: Schedule,
        settings: LoopSettings,
        hooks: Hooks,
    ) -> None:
        self.stepper, self.world = stepper, stepper.world
        self.sampler, self.schedule, self.settings, self.hooks = sampler, schedule, settings, hooks
        self.progress = RunState()
        # The last step that runs of other lengths share; the final one belongs to this length alone.
        before_cooldown = schedule.cooldown_start // settings.batch_tokens if schedule.shape == "wsd" else -1
        self.pin_step = min(before_cooldown, settings.steps - 1)
        self.seconds, self.trained = 0.0, 0

    def resume(self, folder: Path, at_most: int | None = None) -> bool:
        """Take over the newest whole checkpoint of `folder`, of step `at_most` or before; False if there is none."""
        if not resume(folder, self.stepper, self.progress, self.hooks.on_note, at_most):
            return False
        self.hooks.on_resume(self.progress.step * self.settings.batch_tokens)
        for number, (loss, norm, skipped) in enumerate(self.progress.history.steps(), 1):
            self.hooks.on_replay(self._row(number, loss, norm, skipped))
        for row in self.progress.validations:
            self.hooks.on_validation(row["step"], row["scores"])
        return True

    def advance(self, folder: Path, until_step: int) -> None:
        """Train to `until_step`, with checkpoints in `folder`, the last of them at that step."""
        progress, settings, hooks = self.progress, self.settings, self.hooks
        if self.world.main:
            folder.mkdir(parents=True, exist_ok=True)
        pending: list[Tensor] = []
        window_seconds, saved_at = 0.0, time.monotonic()
        while progress.step < until_step:
            started = time.perf_counter()
            position = progress.step * settings.batch_tokens
            rate = self.schedule.rate(position + settings.batch_tokens)
            rows = self.sampler.batch(position, settings.batch_tokens)
            scalars, count = self.stepper.step(rows, rate)
            pending.append(scalars)
            progress.step += 1
            progress.supervised += count
            self.trained += settings.batch_tokens
            last = progress.step == settings.steps
            due = time.monotonic() - saved_at >= settings.save_every_seconds
            stop, due = self.world.any(hooks.should_stop(), due)
            validate = last or _crosses(position, settings.batch_tokens, settings.validation_every_tokens)
            pinned = progress.step == self.pin_step
            save_now = progress.step == until_step or stop or pinned or due
            fetch = validate or save_now or len(pending) >= settings.log_every_steps
            fetched = torch.stack(pending).tolist() if fetch else []  # the only look at the device
            window_seconds += time.perf_counter() - started
            self.seconds += time.perf_counter() - started
            if fetch:
                self._record(fetched, window_seconds)
                pending, window_seconds = [], 0.0
            if validate:
                scores = json_safe(hooks.validate(self.stepper.model))
                tokens = progress.step * settings.batch_tokens
                progress.validations.append({"step": progress.step, "tokens": tokens, "scores": scores})
                hooks.on_validation(progress.step, scores)
            if last or _crosses(position, settings.batch_tokens, settings.sample_every_tokens):
                model = self.stepper.model
                if self.world.main:
                    hooks.on_sample(progress.step, model)
                self.world.meet()
            if save_now:
                save(folder, self.stepper, progress, pinned=pinned)
                saved_at = time.monotonic()
            if stop and not last:
                at = f"stopped at step {progress.step} of {settings.steps} ({progress.step * settings.batch_tokens:,} tokens)"
                raise Interrupted(f"{at}; the same command goes on from there (saved in {folder})")

    def _record(self, fetched: list[list[float]], window_seconds: float) -> None:
        """Enter fetched scalars of the last steps into the history and tell the hooks."""
        progress = self.progress
        speed = len(fetched) * self.settings.batch_tokens / max(window_seconds, 1e-9)
        for index, (loss, norm, skipped) in enumerate(fetched):
            step = progress.step - len(fetched) + index + 1
            progress.skipped += int(skipped)
            progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
            progress.history.add(loss, norm, skipped)
            self.hooks.on_step({**self._row(step, loss, norm, skipped), "tokens_per_second": speed})
            if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise GateError(
                    "finite steps",
                    f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a gradient that is not finite",
                    where=f"step {step}",
                    fix="lower lr, or use precision fp32",
                )

    def _row(self, step: int, loss: float, norm: float, skipped: float) -> dict[str, float]:
        tokens = step * self.settings.batch_tokens
        rate = self.schedule.rate(tokens)
        return {"step": step, "tokens": tokens, "loss": loss, "lr": rate, "grad_norm": norm, "skipped": skipped}

    def result(self, folder: Path) -> TrainResult:
        curve = self.progress.history.curve(self.settings.batch_tokens, self.schedule.rate)
        if curve[-1]["lr"] != self.schedule.final:
            raise GateError(
                "final learning rate", f"{curve[-1]['lr']} instead of {self.schedule.final}", where=str(folder)
            )
        return TrainResult(
            self.progress.step,
            self.progress.step * self.settings.batch_tokens,
            self.progress.skipped,
            self.progress.supervised,
            curve,
            self.progress.validations,
            self.seconds,
            self.trained,
        )


def _crosses(position: int, batch_tokens: int, every_tokens: int) -> bool:
    """Whether the step from `position` reaches a multiple of `every_tokens` (0: never)."""
    return bool(every_tokens) and (position + batch_tokens) // every_tokens > position // every_tokens
