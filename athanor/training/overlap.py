"""What goes on beside the steps of a training: the next batch is read, and checkpoints are written."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.training import checkpoint
from athanor.training.state import RunState, run_tensors
from athanor.training.step import Rows, Stepper

if TYPE_CHECKING:
    from athanor.training.loop import Sampler


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
            if self._writer is None or wait:
                checkpoint.save(folder, progress.step, tensors, state, pinned=pinned)
            else:
                tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
                arguments: tuple[Any, ...] = (folder, progress.step, tensors, copy.deepcopy(state))
                self._writing = self._writer.submit(checkpoint.save, *arguments, pinned=pinned)
        stepper.world.barrier()

    def finish_writing(self) -> None:
        """Wait for the checkpoint under way; raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
