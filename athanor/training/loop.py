"""The one training loop, for pretraining and fine-tuning alike.

Takes a model, a stateless sampler, settings and a folder for checkpoints;
reports what happens through `Hooks`. Killed at any moment and
started again it ends with the same weights, bit for bit on a CPU: the batch,
the learning rate and the curve depend on the token position only, and a
checkpoint holds everything else. That includes what it does about its own
spikes and non-finite numbers (recovery.py).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from athanor.base.errors import GateError, Interrupted
from athanor.model.flops import allowed_pairs, pass_flops, run_flops
from athanor.model.transformer import Transformer
from athanor.training import checkpoint
from athanor.training.best import SelectionKey
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.meter import memory
from athanor.training.optimizer import OptimizerSettings
from athanor.training.overlap import Overlap
from athanor.training.recovery import Recovery, has_nonfinite
from athanor.training.result import TrainResult
from athanor.training.schedule import Schedule
from athanor.training.settings import LoopSettings
from athanor.training.skipped_ranges import known_at
from athanor.training.state import RunState, json_safe, resume
from athanor.training.step import Objective, Rows, Stepper
from athanor.training.vitals import Vitals
from athanor.training.world import SINGLE, World

MAX_SKIPPED_IN_A_ROW = 50
# Of a step: loss, gradient norm, skipped, and what else is known.
StepRecord = tuple[float, float, float, dict[str, float]]


class Sampler(Protocol):
    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> Rows:
        """The batch of the step at this position of training, `skipped_tokens` of data further on."""


@dataclass
class Hooks:
    """Callbacks of the training loop. None of them may change weights or draw from a global random state.

    After a resume `on_replay` gets every step that the checkpoint knows, and
    `on_validation` every score: a record that was lost, or that another run
    of the same trunk made, can be filled up. `code` is the digest of the code that trains. After `on_rollback` the run
    stands at that step, and the later ones come again. `on_event` tells of
    forensics, refused_step and out_of_memory. `on_out_of_memory` gets the step and the tensors that have names, while
    what filled the memory is still there.
    """

    validate: Callable[[Transformer], dict[str, Any]]
    before_first_step: Callable[[Transformer], None] = lambda model: None
    on_resume: Callable[[int], None] = lambda tokens: None
    on_replay: Callable[[dict[str, float]], None] = lambda row: None
    on_step: Callable[[dict[str, float]], None] = lambda row: None
    on_validation: Callable[[int, dict[str, Any]], None] = lambda step, scores: None
    on_sample: Callable[[int, Transformer], None] = lambda step, model: None
    on_rollback: Callable[[int, dict[str, Any]], None] = lambda step, facts: None
    on_event: Callable[[str, dict[str, Any]], None] = lambda name, facts: None
    on_out_of_memory: Callable[[int, dict[str, Tensor]], None] = lambda step, tensors: None
    # Names a document from the row's position in training, the tokens of data skipped before it and its number in the batch.
    name_document: Callable[[int, int, int], str] = lambda position, skipped, document: (
        f"document {document} of the row at {position + skipped}"
    )
    on_note: Callable[[str], None] = lambda text: None
    should_stop: Callable[[], bool] = lambda: False
    should_save: Callable[[], bool] = lambda: False
    code: str = ""


class Trunk(Protocol):
    """The folder for checkpoints of the phase before the cooldown, with a lock that is entered before it is used."""

    path: Path

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...


def train(
    model: Transformer,
    sampler: Sampler,
    optimizer_settings: OptimizerSettings,
    schedule: Schedule,
    settings: LoopSettings,
    folder: Path,
    hooks: Hooks,
    trunk: Trunk | None = None,
    world: World = SINGLE,
    selection_key: SelectionKey | None = None,
    objective: Objective | None = None,
) -> TrainResult:
    """Train `model` in place, from its newest checkpoint in `folder` if there is one.

    With a `trunk`, checkpoints until the cooldown are kept there: that phase
    does not depend on the number of tokens (Hägele et al. 2024,
    arXiv:2405.18392), so runs of other lengths continue from it.

    Without an `objective` cross-entropy is made smaller. With a `selection_key` of the validations' scores the model
    ends with the weights of the best of them, else with the last.

    In a `world` of several processes all of them call this. Only the main one
    uses the folders, and has the trained `model` afterwards; the hooks are
    called in all (except for samples), and what decides what to do next must
    not differ between them.

    A finished run returns at once with its result. Raises Interrupted after
    saving when `hooks.should_stop()`, GateError when nothing but non-finite
    gradients comes, or going back did not help.
    """
    overlap = Overlap(sampler, settings.overlap)
    with world.watched(), CpuReplicas(model, settings.threads) as replicas, overlap:
        stepper = Stepper(replicas, optimizer_settings, settings, world, objective)
        run = _Training(stepper, overlap, schedule, settings, hooks, selection_key)
        resumed = run.resume(folder)
        if trunk is not None and not resumed:
            with trunk:
                if not run.resume(trunk.path, run.pin_step):
                    hooks.before_first_step(model)
                else:
                    hooks.on_note("that is the trunk: the steps that runs of any length with these settings share")
                run.advance(trunk.path, run.pin_step)
                # A longer run may have saved this very step on its way, when it was just another one.
                if world.main:
                    checkpoint.pin(trunk.path, run.pin_step)
        elif not resumed:
            hooks.before_first_step(model)
        run.advance(folder, settings.steps)
        model = run.stepper.model  # gathers the weights where they are sharded
        if selection_key is not None and world.main:
            run.progress.best.restore_into(model)
        world.destroy()
        return run.result(folder)


class _Training:
    """One training run: its present state, and how it advances to a later step."""

    def __init__(
        self,
        stepper: Stepper,
        overlap: Overlap,
        schedule: Schedule,
        settings: LoopSettings,
        hooks: Hooks,
        selection_key: SelectionKey | None,
    ) -> None:
        self.selection_key = selection_key
        self.stepper, self.world, self.meter = stepper, stepper.world, stepper.meter
        self.overlap, self.schedule, self.settings, self.hooks = overlap, schedule, settings, hooks
        self.progress = RunState(hooks.code)
        # The last step that runs of other lengths share; the final one belongs to this length alone.
        before_cooldown = schedule.cooldown_start // settings.batch_tokens if schedule.shape == "wsd" else -1
        self.pin_step = min(before_cooldown, settings.steps - 1)
        model, steps = stepper.backend.replicas.model, settings.steps
        self.vitals = Vitals(model, self.meter, settings.precision, settings.batch_tokens, steps)
        self.recovery = Recovery(stepper, self.progress, overlap, hooks, self.pin_step, self.vitals.frames)
        self.trained = 0

    def resume(self, folder: Path, max_step: int | None = None) -> bool:
        """Load the newest complete checkpoint of `folder`, of step `max_step` or before; False if there is none."""

        def usable(saved: checkpoint.Checkpoint) -> bool:
            # A longer run may have gone back to before `max_step` because of what it met later.
            return saved.step > 0 and (max_step is None or known_at(saved.state["ledger"], max_step))

        if not resume(folder, self.stepper, self.progress, self.hooks.on_note, max_step, usable):
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
        anchors = folder / checkpoint.ANCHORS
        checkpointed_steps = [until_step]
        if self.world.main:
            folder.mkdir(parents=True, exist_ok=True)
            checkpointed_steps += [checkpoint.step_of(path) for path in checkpoint.steps(anchors)]
        missing = progress.step < until_step and min(checkpointed_steps) > progress.step
        if self.world.any(self.world.main and missing)[0]:
            with self.meter.time("checkpoint"):
                self.overlap.save(anchors, self.stepper, progress)
        pending: list[Tensor] = []
        saved_at = time.monotonic()
        while progress.step < until_step:
            if progress.step == self.pin_step:
                self.stepper.guard.reset()
            self.vitals.before(progress.step + 1)
            self.meter.begin_step()
            position = progress.step * settings.batch_tokens
            lr = self.schedule.lr_at(position + settings.batch_tokens)
            with self.meter.time("data"):
                rows = self.recovery.batch(position)
            scalars, count = self.recovery.step(rows, lr)
            pending.append(scalars)
            progress.step += 1
            progress.supervised += count
            pairs = allowed_pairs(rows.document_BS[:, :-1], document_mask=settings.document_mask)
            progress.pairs += pairs
            row_tokens = rows.document_BS[:, 1:].size
            self.meter.count(row_tokens, pairs, count)
            self.trained += row_tokens
            last = progress.step == settings.steps
            save_requested = hooks.should_save()  # asked at every step
            save_due = time.monotonic() - saved_at >= settings.save_every_seconds
            stop, save_requested, save_due = self.world.any(hooks.should_stop(), save_requested, save_due)
            validate = last or _crosses(position, settings.batch_tokens, settings.validation_every_tokens)
            pinned = progress.step == self.pin_step
            must_save = progress.step == until_step or stop or pinned or save_requested
            # An anchor is as good as a checkpoint to resume from.
            save_anchor = not must_save and self.overlap.anchor_due(self.stepper, progress.step)
            save_now = must_save or (not save_anchor and save_due)
            read_vitals = self.vitals.due(progress.step)
            fetch = validate or save_now or save_anchor or read_vitals or len(pending) >= settings.log_every_steps
            fetched = torch.stack(pending).tolist() if fetch else []  # the only look at the device
            self.meter.end_step()
            if fetch:
                factor = self.stepper.gradient_factor(fetched[-1])
                readings = self.vitals.read(progress.step, rows.tokens_BS, factor)  # first: its time is in this window
                window = self.meter.window(self._gflop) | readings
                pending = []
                with self.meter.time("log"):
                    steps = [self.stepper.named(row) for row in fetched]
                    rolled_back = self._rolls_back(
                        folder, steps, save_now or save_anchor, window | memory(self.meter.device)
                    )
                if rolled_back:
                    saved_at = -settings.save_every_seconds  # soon, or a killed run would do it all again
                    continue
            if validate:
                with self.meter.time("evaluation"):
                    model = self.stepper.model
                    scores = json_safe(hooks.validate(model))
                if self.selection_key is not None:
                    progress.best.update(progress.step, self.selection_key(scores), model, keep=self.world.main)
                tokens = progress.step * settings.batch_tokens
                progress.validations.append({"step": progress.step, "tokens": tokens, "scores": scores})
                hooks.on_validation(progress.step, scores)
            if last or _crosses(position, settings.batch_tokens, settings.sample_every_tokens):
                with self.meter.time("sample"):
                    model = self.stepper.model
                    if self.world.main:
                        hooks.on_sample(progress.step, model)
                    self.world.barrier()
            if save_now or save_anchor:
                with self.meter.time("checkpoint"):
                    where = anchors if save_anchor else folder
                    self.overlap.save(where, self.stepper, progress, pinned=pinned, wait=must_save)
                saved_at = time.monotonic()
            if stop and not last:
                progress_text = f"stopped at step {progress.step} of {settings.steps} ({progress.step * settings.batch_tokens:,} tokens)"
                raise Interrupted(f"{progress_text}; the same command goes on from there (saved in {folder})")
        if self.world.main and progress.step == settings.steps:
            shutil.rmtree(anchors, ignore_errors=True)  # a trunk keeps them, for a longer run may go back in it

    def _gflop(self, tokens: int, pairs: int, targets: int) -> dict[str, float]:
        """Arithmetic of this process for so much of all processes' work: the model's, and what is really computed."""
        config, footprint = self.stepper.backend.replicas.model.config, self.settings.footprint
        unit, flops = 1e9 * self.world.size, run_flops(config, tokens, pairs, targets)
        if footprint is None or not footprint.checkpointing:
            return {"model_gflops": flops / unit}
        again = pass_flops(config, tokens, pairs, 0)  # blocks run once more in backward
        return {"model_gflops": flops / unit, "hardware_gflops": (flops + again) / unit}

    def _rolls_back(self, folder: Path, steps: list[StepRecord], saving: bool, window: dict[str, float]) -> bool:
        """Record the last steps; True when the run had to return to an earlier step."""
        # What is saved must be finite, or there would be nothing to go back to.
        finding = self.recovery.nonfinite_state() if saving or has_nonfinite(steps) else None
        if finding is not None:
            self.overlap.finish_writing()
            self.recovery.repair(folder, finding)
            return True
        speed = self.settings.batch_tokens / max(window["time.step_s"], 1e-9)
        for number, (loss, norm, skipped, readings) in enumerate(steps, 1):
            extra = {"tokens_per_second": speed} | readings | (window if number == len(steps) else {})
            self._record(loss, norm, skipped, extra)
            skipped_range = self.recovery.next_skipped_range()
            if skipped_range is not None:
                self.overlap.finish_writing()
                self.recovery.roll_back(folder, skipped_range)
                return True
        return False

    def _record(self, loss: float, norm: float, skipped: float, extra: dict[str, float]) -> None:
        """Enter one step into the history and pass it to the hooks, with the other readings of it in `extra`."""
        progress = self.progress
        progress.skipped += int(skipped)
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
        progress.history.add(loss, norm, skipped)
        step = len(progress.history)
        self.hooks.on_step({**self._row(step, loss, norm, skipped), **extra})
        if skipped:
            self.recovery.examine(step, loss, norm)
        if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise GateError(
                "finite steps",
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a gradient that is not finite, or far out",
                where=f"step {step}",
                fix="lower lr, or use precision fp32",
            )

    def _row(self, step: int, loss: float, norm: float, skipped: float) -> dict[str, float]:
        tokens = step * self.settings.batch_tokens
        lr = self.schedule.lr_at(tokens)
        return {"step": step, "tokens": tokens, "loss": loss, "lr": lr, "grad_norm": norm, "skipped": skipped}

    def result(self, folder: Path) -> TrainResult:
        curve = self.progress.history.curve(self.settings.batch_tokens, self.schedule.lr_at)
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
            self.trained,
            self.progress.pairs,
            self.meter.summary(),
            self.progress.best.step or self.progress.step,
            self.progress.ledger,
            self.progress.codes,
        )


def _crosses(position: int, batch_tokens: int, every_tokens: int) -> bool:
    """Whether the step from `position` reaches a multiple of `every_tokens` (0: never)."""
    return bool(every_tokens) and (position + batch_tokens) // every_tokens > position // every_tokens
