"""What goes on beside the steps of a training: the next batch is read, and checkpoints are written."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from athanor.training import checkpoint
from athanor.training.state import RunState, run_tensors
from athanor.training.step import Rows, Stepper

if TYPE_CHECKING:
    from athanor.training.loop import Sampler


def host_copies(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, in the memory of those from `before`: pinned for tensors of a GPU, which then copies alone."""
    copies = {}
    for name, tensor in tensors.items():
        buffer = before.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty_like(tensor, device="cpu")
            with contextlib.suppress(RuntimeError):  # containers and WSL2 limit what may be pinned
                buffer = torch.empty_like(buffer, pin_memory=tensor.is_cuda)
        copies[name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)  # Metal is not waited for below
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # once for all of them
    return copies


class Overlap:
    """The batches of a sampler and the checkpoints of a run; the same ones whether it is `active` or not.

    Active, it reads the batch after the one that is asked for, and a save that need not be waited for returns when
    the state has been copied to the host. Such a checkpoint is as good as any other as soon as it stands under its
    name; killed before, the run goes on from the one before it.
    """

    def __init__(self, sampler: Sampler, active: bool) -> None:
        self.sampler = sampler
        self._reader, self._writer = (ThreadPoolExecutor(1) for _ in range(2)) if active else (None, None)
        self._next: tuple[tuple[int, ...], Future[Rows]] | None = None
        self._writing: Future[Path] | None = None
        self._copies: dict[str, Tensor] = {}
        self._anchored_at = -math.inf

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in filter(None, (self._reader, self._writer)):
            pool.shutdown(cancel_futures=pool is self._reader)

    def batch(self, position_tokens: int, batch_tokens: int, *skipped_tokens: int) -> Rows:
        """As `Sampler.batch`."""
        wanted = position_tokens, batch_tokens, *skipped_tokens
        following = position_tokens + batch_tokens, *wanted[1:]
        read_ahead, self._next = self._next, None
        if read_ahead is not None and read_ahead[0] != wanted:
            read_ahead[1].exception()  # wait: a sampler is not asked by two threads at once
            read_ahead = None
        rows = self.sampler.batch(*wanted) if read_ahead is None else read_ahead[1].result()
        if self._reader is not None:
            self._next = following, self._reader.submit(self.sampler.batch, *following)
        return rows

    def save(
        self, folder: Path, stepper: Stepper, progress: RunState, *, pinned: bool = False, wait: bool = True
    ) -> None:
        """A checkpoint of this moment, written by the main process; all processes call this."""
        self.finish_writing()
        stepper.backend.check_same()
        tensors, state = run_tensors(stepper, progress), progress.state()
        if stepper.world.main:
            if self._writer is None:
                checkpoint.save(folder, progress.step, tensors, state, pinned=pinned)
            else:
                self._copies = host_copies(tensors, self._copies)
                arguments: tuple[Any, ...] = (folder, progress.step, self._copies, copy.deepcopy(state))
                self._writing = self._writer.submit(checkpoint.save, *arguments, pinned=pinned)
                if wait:
                    self.finish_writing()
        if folder.name == checkpoint.ANCHORS:
            self._anchored_at = time.monotonic()
        stepper.world.barrier()

    def anchor_due(self, stepper: Stepper, step: int) -> bool:
        """Return True if an anchor is due after this step; all processes call this.

        On an accelerator 256 steps may take half a minute, and an anchor gigabytes. There it also waits until shortly
        before a checkpoint is due, whose place it takes. A run that is resumed writes the next one without waiting:
        so the older of the two that are kept always lies at least `anchor_every` steps back.
        """
        settings, accelerated = stepper.settings, stepper.device.type != "cpu"
        if step % settings.rules.anchor_every:
            return False
        due = time.monotonic() - self._anchored_at >= 0.9 * settings.save_every_seconds * accelerated
        return stepper.world.any(due)[0]

    def finish_writing(self) -> None:
        """Wait for the checkpoint under way; raises what went wrong with it."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:
            if self._writing.done():  # else the wait was interrupted, and the copies are still being read
                self._writing = None
