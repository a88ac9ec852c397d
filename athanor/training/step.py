"""One optimiser step: forward and backward of a batch, clipping, and an update that the device may refuse.

The loop decides which batch, at which rate, and what comes of the outcome;
this decides how a machine works through it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from athanor.model.transformer import Transformer
from athanor.training.guard import SpikeGuard
from athanor.training.lanes import Lanes
from athanor.training.loss import Targets, supervised, targets, training_loss
from athanor.training.meter import Meter
from athanor.training.optimizer import AdamW, AdamWSettings, clip_gradients
from athanor.training.precision import LossScale, autocast
from athanor.training.settings import LoopSettings

PROBE_ROWS = 2


class Rows(Protocol):
    """A batch: int64 [B, T + 1] ids and document numbers; `mask_BS` (1 = supervised) if there is a loss mask."""

    tokens_BS: np.ndarray
    document_BS: np.ndarray


class Stepper:
    """Steps of one model, with the optimiser's state and the loss scale."""

    def __init__(self, lanes: Lanes, optimizer_settings: AdamWSettings, settings: LoopSettings) -> None:
        self.lanes, self.settings = lanes, settings
        self.optimizer = AdamW(lanes.model, optimizer_settings)
        self.scale = LossScale(settings.precision, lanes.model.head_weight.device)
        self.meter = Meter(lanes.model.head_weight.device)
        self.guard = SpikeGuard(settings.rules, lanes.model.head_weight.device, active=settings.spike_guard)

    @property
    def model(self) -> Transformer:
        return self.lanes.model

    def step(self, rows: Rows, rate: float) -> tuple[Tensor, int]:
        """One update; returns [loss, gradient norm before clipping, skipped] on the device, and the targets."""
        settings, device = self.settings, self.model.head_weight.device
        mask_BS = getattr(rows, "mask_BS", None)
        # Of the whole step, not of a micro-batch; at least 1, for a batch with nothing to learn from.
        count = int(supervised(rows.document_BS, mask_BS).sum())

        def loss_of(replica: Transformer, batch: Targets) -> Tensor:
            with self.meter.time("forward"), autocast(settings.precision, device):
                part = training_loss(replica, batch.to(device), max(1, count), z_loss=settings.z_loss)
            with self.meter.time("backward"):
                self.scale.scaled(part).backward()
            return part.detach()

        with self.meter.time("forward_backward"):
            loss = self.lanes.backward(micro_batches(rows, settings.micro_batch_rows, settings.document_mask), loss_of)
        with self.meter.time("optimizer"):
            self.scale.unscale([weight.grad for weight in self.model.parameters() if weight.grad is not None])
            norm = clip_gradients(self.model.parameters(), settings.grad_clip)
            broken = ~(torch.isfinite(norm) & torch.isfinite(loss))
            skipped = self.guard.refuses(loss, norm, broken)
            self.optimizer.step_unless(skipped, rate)
            self.scale.update(broken)
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


def probe_batch(rows: Rows, document_mask: bool) -> Targets:
    """The first rows of a batch, small enough to try things on."""
    return micro_batches(rows, PROBE_ROWS, document_mask)[0]
