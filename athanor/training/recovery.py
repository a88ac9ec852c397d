"""How a run recovers from a spike, from numbers that are not finite, and from running out of memory.

The skipped ranges (the state's `ledger`) alone decide what the weights become,
and the history decides the ranges. Which checkpoint a rollback starts from
costs time and changes nothing: up to the first step that reads other data the
steps are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from athanor.base.errors import GateError, InputError
from athanor.training import checkpoint, forensics, skipped_ranges
from athanor.training.compiling import admit_rows
from athanor.training.guard import detect_divergence
from athanor.training.memory import StepFootprint, available_bytes, check_memory, training_bytes
from athanor.training.meter import memory
from athanor.training.number_range import Frame
from athanor.training.state import RunState, history_of, json_safe, resume
from athanor.training.step import Rows, Stepper

if TYPE_CHECKING:
    from athanor.training.loop import Hooks, Sampler

MAX_REPAIRS = 3
MAX_EXAMINED = 3
SUSPECT_STEPS = 4  # of a range, those with the highest loss, are searched for documents
_CHANGE = "lower lr, set model.qk_norm to true, lower grad_clip, or look at the documents that the journal names"


class Recovery:
    """Watches the steps of a run, and rolls it back where that is needed."""

    def __init__(
        self,
        stepper: Stepper,
        progress: RunState,
        sampler: Sampler,
        hooks: Hooks,
        pin_step: int,
        frames: Collection[Frame] = (),
    ) -> None:
        self.frames = frames
        self.stepper, self.progress, self.sampler, self.hooks = stepper, progress, sampler, hooks
        self.settings, self.pin_step = stepper.settings, pin_step

    def batch(self, position: int) -> Rows:
        """The batch of the step that begins at this position of training."""
        skipped, tokens = skipped_ranges.skipped_before(self.progress.ledger, position), self.settings.batch_tokens
        return self.sampler.batch(position, tokens, skipped) if skipped else self.sampler.batch(position, tokens)

    # -- memory -------------------------------------------------------------

    def step(self, rows: Rows, lr: float) -> tuple[Tensor, int]:
        """`Stepper.step`; when memory runs out with smaller micro-batches, down to one row."""
        while True:
            judged = self.stepper.guard.judged
            try:
                return self.stepper.step(rows, lr)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self.hooks.on_out_of_memory(self.progress.step + 1, self._named_tensors())
            # Out of the handler: the traceback held the step's tensors.
            # Once the guard has judged, the update is on its way, and a second one would be another step.
            # Nor can one process of several repeat it: the others are waiting for its gradients.
            self._halve(self.stepper.world.size == 1 and self.stepper.guard.judged == judged)

    def _named_tensors(self) -> dict[str, Tensor]:
        """The weights of this process and the optimiser's state; asks nothing of other processes."""
        state = {f"optimiser {name}": tensor for name, tensor in self.stepper.optimizer.tensors().items()}
        return state | dict(self.stepper.backend.replicas.model.named_parameters())

    def _halve(self, may_repeat: bool) -> None:
        settings, world = self.stepper.settings, self.stepper.world
        for replica in self.stepper.backend.replicas.models:
            replica.zero_grad(set_to_none=True)
        if self.stepper.device.type != "cpu":
            getattr(torch, self.stepper.device.type).empty_cache()
        rows, step = settings.micro_batch_rows, self.progress.step + 1
        batch_rows = settings.batch_tokens // self.stepper.backend.replicas.model.config.context_tokens
        rows = min(rows, batch_rows)
        if rows <= 1 or not may_repeat:
            at_a_time = "one row" if rows <= 1 else f"{rows} rows"
            of_process = f" of process {world.rank} of {world.size}" if world.size > 1 else ""
            problem = f"out of memory in step {step}{of_process} with {at_a_time} at a time"
            raise InputError(problem, where="model", fix=self._advice(rows))
        self.stepper.settings = dataclasses.replace(settings, micro_batch_rows=rows // 2)
        # A batch of 3 · n rows in halves of 3 · n / 2 may leave a remainder, too.
        for size in {rows // 2, batch_rows % (rows // 2)} - {0}:
            admit_rows(self.stepper.backend.replicas.models, size)
        text = f"step {step} ran out of memory: micro-batches of {rows // 2} instead of {rows} rows from here on"
        self._report("out_of_memory", text, step=step, micro_batch_rows=rows // 2)

    def _advice(self, rows: int) -> str:
        """What would make a step fit, in order."""
        replicas, device = self.stepper.backend.replicas, self.stepper.device
        config = replicas.model.config
        parallel = min(replicas.count, self.settings.threads)
        default = StepFootprint(rows, config.context_tokens, self.settings.precision, replicas.count, parallel)
        footprint = dataclasses.replace(self.settings.footprint or default, micro_batch_rows=rows)
        # The estimate may have said that it fits; the device knows better.
        free = 0.9 * training_bytes(config, footprint, device)
        if (available := available_bytes(device)) is not None:
            free = min(free, available + self._own_bytes(device))
        try:
            check_memory(config, footprint, device, int(free))
        except InputError as error:
            return error.fix
        return "a machine with more memory"

    def _own_bytes(self, device: torch.device) -> float:
        """Bytes that this process holds, and that would be free without it."""
        if device.type == "cuda":
            return torch.cuda.memory_reserved(device)
        return memory(device).get("memory.bytes" if device.type == "mps" else "memory.host_bytes", 0)

    # -- spikes -------------------------------------------------------------

    def next_skipped_range(self) -> dict[str, Any] | None:
        """The next range of data to skip, if the history up to its last step shows a divergence."""
        settings, progress = self.settings, self.progress
        step = len(progress.history)
        if not settings.max_rollbacks:
            return None
        # Other data, and another rate, begin at the cooldown; and the steps before it belong to other runs as well.
        floor = max(0, self.pin_step) if step > self.pin_step else 0
        base = max(floor, step - settings.rules.reach)
        divergence = detect_divergence(progress.history.rows(base, step), settings.rules, step)
        if divergence is None:
            return None
        first = max(floor, base + divergence.onset - settings.rules.margin)
        start = first * settings.batch_tokens
        last = (step - 1) * settings.batch_tokens
        start += skipped_ranges.skipped_before(progress.ledger, start)
        end = last + skipped_ranges.skipped_before(progress.ledger, last) + settings.batch_tokens
        return skipped_ranges.entry(step, first + 1, start, end, divergence.reason)

    def roll_back(self, folder: Path, row: dict[str, Any]) -> None:
        """Restore a step from before the range of data that `row` skips."""
        progress, found_at, first = self.progress, row["found"], row["step"] - 1
        if len(progress.ledger) >= self.settings.max_rollbacks:
            tried = "; ".join(f"steps {old['step']} to {old['found']} ({old['reason']})" for old in progress.ledger)
            raise GateError(
                "a run that heals",
                f"{row['reason']}, and {len(progress.ledger)} ranges of data were left out before: {tried}",
                where=f"step {found_at}",
                fix=_CHANGE,
            )
        worst = self._worst(first, found_at)
        batches = [(step, *self._position_of(step)) for step in worst]
        self._restore(folder, first)
        progress.ledger = [*progress.ledger, row]
        if self.stepper.world.main:
            checkpoint.drop(folder, first, lambda state: row not in state["ledger"])
        self.stepper.world.barrier()
        documents = [
            document for step, position, skipped in batches for document in self._documents(position, skipped, step)
        ]
        documents.sort(key=lambda document: -document["loss"] if document["loss"] is not None else -math.inf)
        names = ", ".join(dict.fromkeys(document["document"] for document in documents[:3])) or "no document"
        text = (
            f"step {found_at}: {row['reason']}. Back to step {progress.step}; {row['to'] - row['from']:,} tokens of data "
            f"are left out from step {row['step']} on. Most suspicious: {names}"
        )
        self._report_rollback(text, row["reason"], found_at, skip=row, documents=documents[:8])

    def _worst(self, first: int, last: int) -> list[int]:
        """The steps of a range with the highest loss."""
        rows = self.progress.history.rows(first, last)
        losses = [loss if math.isfinite(loss) else math.inf for loss, _, _ in rows]
        return sorted(first + 1 + index for index in sorted(range(len(rows)), key=lambda i: -losses[i])[:SUSPECT_STEPS])

    # -- numbers that are not finite ----------------------------------------

    def nonfinite_state(self) -> forensics.Finding | None:
        """The first weight or optimiser state of any process that is not finite; every process has to call this."""
        local_finding = forensics.nonfinite_state(self.stepper)
        (anywhere,) = self.stepper.world.any(local_finding is not None)
        return local_finding or (forensics.Finding("state", "of another process") if anywhere else None)

    def repair(self, folder: Path, finding: forensics.Finding) -> None:
        """Go back to finite weights and train on the same data again, because no batch caused this."""
        progress, step = self.progress, self.progress.step
        progress.repairs += 1
        if progress.repairs > MAX_REPAIRS:
            raise GateError(
                "sound numbers",
                f"{finding} is not finite, for the {progress.repairs}th time",
                where=f"step {step}",
                fix="test the memory of the machine, or its accelerator; or lower lr",
            )
        self._restore(folder, len(progress.history))
        text = f"step {step}: {finding} is not finite. Back to step {progress.step}, with the same data"
        self._report_rollback(text, f"{finding} is not finite", step)

    def examine(self, step: int, loss: float, norm: float) -> None:
        """Report where a skipped step came from, by a replay; only for the first few of a run."""
        progress, overflows_expected = self.progress, self.settings.precision == "fp16"
        if progress.examined >= MAX_EXAMINED or (overflows_expected and progress.skipped_in_a_row < 5):
            return  # in fp16 a step that overflows now and then finds the loss scale, and is no fault
        progress.examined += 1
        position, skipped = self._position_of(step)
        documents = self._documents(position, skipped, step)
        names = ", ".join(dict.fromkeys(suspect["document"] for suspect in documents[:3])) or "no document"
        facts: dict[str, Any] = {"step": step, "documents": documents}
        if math.isfinite(loss) and math.isfinite(norm):
            text = f"step {step} was refused: loss {loss:.3g}, gradient norm {norm:.3g}. Most suspicious: {names}"
            self._report("refused_step", text, **facts)
            return
        finding = forensics.examine(self.stepper, self.batch(position))
        text = f"step {step} was skipped, it is not finite. {finding}. Most suspicious: {names}"
        frames = [json_safe(frame._asdict()) for frame in self.frames]  # of the steps before, by block
        self._report("forensics", text, kind=finding.kind, where=finding.where, frames=frames, **facts)

    # -- common -------------------------------------------------------------

    def _position_of(self, step: int) -> tuple[int, int]:
        """Position of a step's batch in training, and the tokens of data left out before it."""
        position = (step - 1) * self.settings.batch_tokens
        return position, skipped_ranges.skipped_before(self.progress.ledger, position)

    def _documents(self, position: int, skipped: int, step: int) -> list[dict[str, Any]]:
        rows = self.sampler.batch(position, self.settings.batch_tokens, *([skipped] if skipped else []))
        width = self.stepper.model.config.context_tokens
        return [
            {
                "document": self.hooks.name_document(position + suspect.row * width, skipped, suspect.document),
                "loss": suspect.loss if math.isfinite(suspect.loss) else None,
                "step": step,
            }
            for suspect in forensics.suspects(self.stepper, rows)
        ]

    def _restore(self, folder: Path, max_step: int) -> None:
        """Restore the newest checkpoint up to `max_step` whose history is the beginning of this run's."""
        history = self.progress.history
        if not resume(
            folder,
            self.stepper,
            self.progress,
            self.hooks.on_note,
            max_step,
            lambda saved: history.begins_with(history_of(saved)),
            rewinding=True,
        ):
            raise GateError(
                "way back", f"no checkpoint up to step {max_step} is left", where=str(folder), fix="remove this folder"
            )

    def _report_rollback(self, text: str, reason: str, found_at: int, **facts: Any) -> None:
        self.hooks.on_rollback(self.progress.step, {"found": found_at, "reason": reason, **facts})
        self.hooks.on_note(text)

    def _report(self, event: str, text: str, **facts: Any) -> None:
        self.hooks.on_event(event, facts)
        self.hooks.on_note(text)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is one of memory: of an accelerator, of torch's allocator on the CPU, or of Python."""
    if isinstance(error, MemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "not enough memory" in words)


def has_nonfinite(rows: Sequence[Sequence[Any]]) -> bool:
    """Whether a loss or a gradient norm, the first two of each row, is not finite."""
    return any(not math.isfinite(value) for row in rows for value in row[:2])
