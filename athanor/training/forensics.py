"""Attribution of a bad step: where a number that is not finite came from, and which documents had a high loss.

Everything here runs a batch once more and changes nothing: no weight, no
optimiser state, no random number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from athanor.model.loss import Targets, supervised, token_losses, training_loss
from athanor.model.precision import autocast, products
from athanor.model.transformer import Transformer
from athanor.training.step import Rows, Stepper, micro_batches


class Finding(NamedTuple):
    """`kind`: weight, optimiser state, input, forward, backward or "not reproduced"; `where` names the first place."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


class Suspect(NamedTuple):
    """A document in a batch: mean loss of its supervised targets there, and its row and number in the batch."""

    loss: float
    row: int
    document: int


@torch.no_grad()
def nonfinite_state(stepper: Stepper) -> Finding | None:
    """The first tensor of the optimiser or the weights that holds a number that is not finite.

    The optimiser is examined first. A gradient that is not finite never reaches
    it, and a weight that is not finite makes every gradient so; but a moment
    that is not finite makes its weight so at once.
    """
    for kind, tensors in (("optimiser state", stepper.optimizer.tensors()), ("weight", _weights(stepper.model))):
        names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        if not names:
            continue
        finite = torch.stack([torch.isfinite(tensors[name]).all() for name in names])  # one look at the device
        if not bool(finite.all()):
            return Finding(kind, names[finite.tolist().index(False)])
    return None


def examine(stepper: Stepper, rows: Rows) -> Finding:
    """Run a batch again and name the first place, in order of computing, that gave a number that is not finite."""
    finding = nonfinite_state(stepper)
    if finding is not None:
        return finding
    model, settings = stepper.model, stepper.settings
    if rows.tokens_BS.min() < 0 or rows.tokens_BS.max() >= model.config.vocab_size:
        return Finding("input", f"ids outside 0 to {model.config.vocab_size - 1}")
    device = model.head_weight.device
    count = max(1, int(supervised(rows.document_BS, getattr(rows, "mask_BS", None)).sum()))
    try:
        for batch in micro_batches(rows, settings.micro_batch_rows, settings.document_mask):
            model.zero_grad(set_to_none=True)
            finding = _replay(stepper, batch.to(device), count)
            if finding is not None:
                return finding
    finally:
        model.zero_grad(set_to_none=True)
    return Finding("not reproduced", "the same batch gives finite numbers now")


def _replay(stepper: Stepper, batch: Targets, count: int) -> Finding | None:
    """Run forward and backward of one micro-batch, with hooks that look for numbers that are not finite."""
    settings, model = stepper.settings, stepper.model
    with _watched(model) as (outputs, gradients), products(settings.precision, batch.ids_BT.device):
        with autocast(settings.precision, batch.ids_BT.device):
            loss = training_loss(model, batch, count, z_loss=settings.z_loss)
        if outputs:
            return Finding("forward", outputs[0])
        if not bool(torch.isfinite(loss)):
            return Finding("forward", "logits or loss, after the last module")
        stepper.scale.scaled(loss).backward()
        return Finding("backward", gradients[0]) if gradients else None


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[list[str], list[str]]]:
    """Two lists of the first modules that see a number that is not finite: one for forward, one for backward."""
    forward: list[str] = []
    backward: list[str] = []
    order: list[str] = []  # modules as their outputs come

    def before(name: str, inputs: Any) -> None:
        if not forward and _has_nonfinite(inputs):
            # No output was: it came to be between two modules, in the one around.
            forward.append(f"{name.rpartition('.')[0] or 'the model'}, on the way to {name}")

    def after(name: str, out: Any) -> None:
        if not forward and _has_nonfinite(out):
            forward.append(name)
        order.append(name)
        if isinstance(out, Tensor) and out.requires_grad:
            index = len(order)
            out.register_hook(lambda gradient: at_output(name, index, gradient))

    def at_output(name: str, index: int, gradient: Tensor) -> None:
        if not backward and _has_nonfinite(gradient):
            later = f", from {order[index]}" if index < len(order) else ", from the loss"
            backward.append(f"gradient of the output of {name}{later}")

    def at_weight(name: str, gradient: Tensor) -> None:
        if not backward and _has_nonfinite(gradient):
            backward.append(f"gradient of {name}")

    hooks = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, name=name: before(name, inputs)))
            hooks.append(module.register_forward_hook(lambda _, inputs, out, name=name: after(name, out)))
    for name, weight in model.named_parameters():
        hooks.append(weight.register_hook(lambda gradient, name=name: at_weight(name, gradient)))
    try:
        yield forward, backward
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def suspects(stepper: Stepper, rows: Rows, max_suspects: int = 8) -> list[Suspect]:
    """The documents of a batch by their loss under these weights, highest first; what is not finite comes first."""
    model, settings = stepper.model, stepper.settings
    device, documents = model.head_weight.device, []
    batches = micro_batches(rows, settings.micro_batch_rows, settings.document_mask)
    for number, batch in enumerate(batches):
        with autocast(settings.precision, device):
            losses_N = token_losses(model, batch.to(device)).cpu().double().numpy()
        row_N = batch.where_N.numpy() // batch.ids_BT.shape[1] + number * settings.micro_batch_rows
        document_N = rows.document_BS[row_N, batch.where_N.numpy() % batch.ids_BT.shape[1]]
        documents += _means(losses_N, row_N, document_N)

    def order(suspect: Suspect) -> tuple[bool, float, int, int]:
        # Attention carries what is not finite on in the row: the earliest document that has it comes first.
        finite = math.isfinite(suspect.loss)
        return finite, -suspect.loss if finite else 0.0, suspect.row, suspect.document

    return sorted(documents, key=order)[:max_suspects]


def _means(losses_N: np.ndarray, row_N: np.ndarray, document_N: np.ndarray) -> list[Suspect]:
    """The mean loss of each document of each row."""
    if not len(losses_N):
        return []
    documents, which_N, counts = np.unique(
        np.stack((row_N, document_N), 1), axis=0, return_inverse=True, return_counts=True
    )
    means = np.bincount(which_N.ravel(), weights=losses_N) / counts
    return [
        Suspect(float(mean), int(row), int(document)) for mean, (row, document) in zip(means, documents, strict=True)
    ]


def _weights(model: Transformer) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def _has_nonfinite(value: Any) -> bool:
    """Whether a tensor, or one in a sequence, holds a number that is not finite."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and not bool(torch.isfinite(value.detach()).all())
    return isinstance(value, Sequence) and not isinstance(value, str) and any(map(_has_nonfinite, value))
