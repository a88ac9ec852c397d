"""One optimiser step: forward and backward of a batch, clipping, and an update that the device may refuse.

The loop decides which batch, at which rate, and what comes of the outcome;
this decides how a machine works through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from athanor.model.loss import Targets, supervised, targets, training_loss
from athanor.model.precision import LossScale, autocast, products
from athanor.model.transformer import Transformer
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.guard import SpikeGuard
from athanor.training.meter import Meter
from athanor.training.optimizer import Optimizer, OptimizerSettings, clip_gradients
from athanor.training.parallel import gradient_backend
from athanor.training.settings import LoopSettings
from athanor.training.world import SINGLE, World

PROBE_ROWS = 2


class Rows(Protocol):
    """A batch: int64 [B, T + 1] ids and document numbers.

    `mask_BS` (1 = supervised) if there is a loss mask; `source_BS`, numbers
    in the names `sources`, if the loss of each source is to be known;
    `values_BSK` if the objective has to know more of each target.
    """

    tokens_BS: np.ndarray
    document_BS: np.ndarray


class Readings(NamedTuple):
    """What a step reports. `divisor`: of the loss's sum; `counts`: names of other sums, and what each is divided by;
    `known`: numbers that are there before the step."""

    divisor: int
    counts: Mapping[str, float]
    known: Mapping[str, float] = {}


class Objective(Protocol):
    """What the steps of a training make smaller."""

    def readings(self, rows: Rows, supervised_BT: np.ndarray) -> Readings:
        """What there will be to report of a whole batch; its targets are marked in `supervised_BT`."""

    def loss(self, model: Transformer, batch: Targets, divisor: int, sums_K: Tensor) -> Tensor:
        """The loss of a micro-batch, a scalar; adds to `sums_K`, in the order of `counts`, without gradient."""


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of pretraining and fine-tuning, and beside it the loss of each source that the batch tells apart."""

    z_loss: float = 0.0

    def readings(self, rows: Rows, supervised_BT: np.ndarray) -> Readings:
        # The divisor is at least 1, for a batch with nothing to learn from.
        divisor, names = max(1, int(supervised_BT.sum())), getattr(rows, "sources", ())
        if not names:
            return Readings(divisor, {})
        source_BS = getattr(rows, "source_BS", None)
        counts_K = np.bincount(source_BS[:, 1:][supervised_BT], minlength=len(names))
        return Readings(divisor, {f"loss.{name}": count for name, count in zip(names, counts_K, strict=True)})

    def loss(self, model: Transformer, batch: Targets, divisor: int, sums_K: Tensor) -> Tensor:
        return training_loss(model, batch, divisor, z_loss=self.z_loss, by_source_K=sums_K)


class Stepper:
    """Steps of one model, with the optimiser's state and the loss scale; the same in every process of a world."""

    def __init__(
        self,
        replicas: CpuReplicas,
        optimizer_settings: OptimizerSettings,
        settings: LoopSettings,
        world: World = SINGLE,
        objective: Objective | None = None,
    ) -> None:
        self.settings, self.world = settings, world
        self.objective = objective or CrossEntropy(settings.z_loss)
        self.names: tuple[str, ...] = ()  # of what the last step reported beside the loss
        self.device = replicas.model.head_weight.device
        self.backend = gradient_backend(replicas, world)
        parallel_map, sharded = (
            (None, self.backend) if world.sharded else (replicas.parallel_map if replicas.count > 1 else None, None)
        )
        self.optimizer = Optimizer(self.backend, optimizer_settings, parallel_map, sharded)
        self.scale = LossScale(settings.precision, self.device)
        self.meter = Meter(self.device)
        self.guard = SpikeGuard(settings.rules, self.device, active=settings.spike_guard)

    @property
    def model(self) -> Transformer:
        """The model with its present weights, whole: in a world of several, ask in all processes."""
        return self.backend.model()

    def step(self, rows: Rows, lr: float) -> tuple[Tensor, int]:
        """One update; returns a row of numbers on the device (`named` reads it), and the count of targets."""
        with products(self.settings.precision, self.device):
            return self._step(rows, lr)

    def _step(self, rows: Rows, lr: float) -> tuple[Tensor, int]:
        settings, device = self.settings, self.device
        mask_BS = getattr(rows, "mask_BS", None)
        # The targets of the whole step in all processes, not of one micro-batch.
        supervised_BT = supervised(rows.document_BS, mask_BS)
        divisor, counts, known = self.objective.readings(rows, supervised_BT)
        self.names = (*counts, *known)

        def loss_of(replica: Transformer, batch: Targets) -> Tensor:
            sums_K = torch.zeros(len(counts), device=device)
            with self.meter.time("forward"), autocast(settings.precision, device):
                batch_loss = self.objective.loss(replica, batch.to(device), divisor, sums_K)
            with self.meter.time("backward"):
                self.scale.scaled(batch_loss).backward()
            return torch.cat((batch_loss.detach()[None], sums_K))

        if hasattr(self.backend.replicas.model, "begin_step"):  # a LoRA draws its dropout for the step
            self.backend.replicas.model.begin_step()
        batches = own_batches(rows, self.world, settings.micro_batch_rows, settings.document_mask)
        with self.meter.time("forward_backward"):
            sums = self.backend.backward(batches, loss_of)
            loss, sums_K = sums[0], sums[1:]
        with self.meter.time("optimizer"):
            self.scale.unscale(self.backend.gradients())
            weights = [weight for _, weight in self.backend.named_parameters()]
            norm = clip_gradients(weights, settings.grad_clip, self.backend.joint_norm)
            nonfinite = ~(torch.isfinite(norm) & torch.isfinite(loss))
            skipped = self.guard.refuses(loss, norm, nonfinite)
            self.optimizer.step_unless(skipped, lr)
            scale = self.scale.scale
            self.scale.update(nonfinite)
        means_K, known_K = sums_K / _copied(counts, device), _copied(known, device)
        numbers = torch.cat((torch.stack((loss, norm, skipped.float(), scale)), means_K, known_K))
        return numbers, int(supervised_BT.sum())

    def named(self, row: Sequence[float]) -> tuple[float, float, float, dict[str, float]]:
        """Loss, gradient norm and skipped of a fetched row of `step`, and what else there is to tell of it."""
        loss, norm, skipped, scale, *means = row
        extra = {name: mean for name, mean in zip(self.names, means, strict=True) if not math.isnan(mean)}
        return loss, norm, skipped, extra | ({"loss_scale": scale} if self.scale.active else {})

    def gradient_factor(self, row: Sequence[float]) -> float:
        """What the step of a fetched row multiplied its gradients with after backward; NaN where that spoilt them."""
        _, norm, _, scale, *_ = row
        return min(1.0, self.settings.grad_clip / (norm + 1e-6)) / scale if math.isfinite(norm) else math.nan


def _copied(numbers: Mapping[str, float], device: torch.device) -> Tensor:
    """The values on the device. From pinned memory: else the host waits until the step is done."""
    values = torch.tensor(list(numbers.values()), dtype=torch.float32)
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def own_batches(rows: Rows, world: World, micro_batch_rows: int, document_mask: bool) -> list[Targets]:
    """The micro-batches of this process: contiguous rows, as equal in number as can be.

    As many micro-batches in every process, because FSDP gathers weights in
    each: one that has no rows left for the last runs it on a row of which
    nothing is to be learnt.
    """
    if world.size == 1:
        return micro_batches(rows, micro_batch_rows, document_mask)
    count = len(rows.tokens_BS)
    start, end = (count * rank // world.size for rank in (world.rank, world.rank + 1))
    parts = {name: getattr(rows, name, None) for name in BatchSlice._fields}
    own_rows = BatchSlice(**{name: None if part is None else part[start:end] for name, part in parts.items()})
    batches = micro_batches(own_rows, micro_batch_rows, document_mask)
    max_batches = -(-count // (world.size * micro_batch_rows))
    idle_row = own_rows._replace(
        tokens_BS=rows.tokens_BS[:1], document_BS=np.full_like(rows.document_BS[:1], -1), mask_BS=None
    )
    while len(batches) < max_batches:
        batches += micro_batches(idle_row, 1, document_mask)
    return batches


class BatchSlice(NamedTuple):
    """Some rows of a batch."""

    tokens_BS: np.ndarray
    document_BS: np.ndarray
    mask_BS: np.ndarray | None
    source_BS: np.ndarray | None = None
    values_BSK: np.ndarray | None = None


def micro_batches(rows: Rows, micro_batch_rows: int, document_mask: bool) -> list[Targets]:
    """Cut a batch into groups of rows, in order."""
    mask_BS, source_BS, values_BSK = (getattr(rows, name, None) for name in ("mask_BS", "source_BS", "values_BSK"))
    cuts = [slice(start, start + micro_batch_rows) for start in range(0, len(rows.tokens_BS), micro_batch_rows)]
    return [
        targets(
            rows.tokens_BS[cut],
            rows.document_BS[cut],
            None if mask_BS is None else mask_BS[cut],
            document_mask=document_mask,
            source_BS=None if source_BS is None else source_BS[cut],
            values_BSK=None if values_BSK is None else values_BSK[cut],
        )
        for cut in cuts
    ]


def probe_batch(rows: Rows, document_mask: bool) -> Targets:
    """The first rows of a batch, small enough to try things on."""
    return micro_batches(rows, PROBE_ROWS, document_mask)[0]
