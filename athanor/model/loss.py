"""The one loss: cross-entropy of supervised targets, summed.

Training divides the sum by the number of supervised targets of the whole
step. A mean of micro-batch means would weigh a token by how few others its
micro-batch happened to supervise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from athanor.model import varlen
from athanor.model.cross_entropy import (
    chunk_rows,
    cross_entropies,
    plain_summed_cross_entropy,
    summed_cross_entropy,
)
from athanor.model.kernels import use_cpu_kernel
from athanor.model.transformer import Transformer


class Targets(NamedTuple):
    """Rows of ids and what to predict from them.

    ids_BT int64; document_BT int64 or None (one document per row, or padding
    at the end only); where_N: flat positions in [B·T] whose next id is
    supervised; next_N: those ids; source_N: number of the source of each, or
    None where sources are not known; values_NK: fp32, what an objective beside
    cross-entropy knows of each; starts_M: int32, the documents as attention
    without a mask takes them (athanor/model/varlen.py). Found on the host, so the output layer runs
    for supervised positions alone and the device is never asked for a count.
    """

    ids_BT: Tensor
    document_BT: Tensor | None
    where_N: Tensor
    next_N: Tensor
    source_N: Tensor | None = None
    values_NK: Tensor | None = None
    starts_M: Tensor | None = None

    def to(self, device: torch.device) -> Targets:
        """A copy on the device. From pinned memory: else the copy waits for what the device is doing."""
        pinned = (tensor.pin_memory() if device.type == "cuda" and tensor is not None else tensor for tensor in self)
        return Targets(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in pinned))


def supervised(document_BS: np.ndarray, mask_BS: np.ndarray | None) -> np.ndarray:
    """Which of the T = S - 1 targets count: bool [B, T].

    A target has to lie in the document of the id before it: nothing in a
    document tells what the next one in the row starts with.
    """
    inside_BT = (document_BS[:, 1:] == document_BS[:, :-1]) & (document_BS[:, 1:] >= 0)
    return inside_BT if mask_BS is None else inside_BT & (mask_BS[:, 1:] != 0)


def targets(
    tokens_BS: np.ndarray,
    document_BS: np.ndarray,
    mask_BS: np.ndarray | None,
    *,
    document_mask: bool,
    source_BS: np.ndarray | None = None,
    values_BSK: np.ndarray | None = None,
) -> Targets:
    """Targets for rows of S = T + 1 ids, their document numbers, an optional loss mask, numbers of sources and values."""
    where_N = np.flatnonzero(supervised(document_BS, mask_BS))
    inputs_BT = document_BS[:, :-1]
    by_length = document_mask and varlen.active()
    several = document_mask and bool((inputs_BT != inputs_BT[:, :1]).any())
    return Targets(
        torch.from_numpy(np.ascontiguousarray(tokens_BS[:, :-1])),
        torch.from_numpy(np.ascontiguousarray(inputs_BT)) if several else None,
        torch.from_numpy(where_N),
        torch.from_numpy(tokens_BS[:, 1:].reshape(-1)[where_N]),
        None if source_BS is None else torch.from_numpy(source_BS[:, 1:].reshape(-1)[where_N]),
        None if values_BSK is None else torch.from_numpy(values_BSK[:, 1:].reshape(-1, values_BSK.shape[-1])[where_N]),
        torch.from_numpy(varlen.document_starts(inputs_BT)) if by_length else None,
    )


def token_losses(model: Transformer, batch: Targets, *, z_loss: float = 0.0) -> Tensor:
    """Cross-entropy in nats of every supervised target, fp32 [N], in the order of `where_N`.

    `z_loss` adds that many times the squared log-sum-exp of the logits, which
    keeps them from drifting upwards in training.
    """
    return cross_entropies(_supervised_hidden(model, batch), model.head_weight, batch.next_N, z_loss)


def log_probs_and_entropies(model: Transformer, batch: Targets) -> tuple[Tensor, Tensor]:
    """Log probability of every supervised target, and the entropy of what may follow there without gradient; fp32 [N].

    Logits exist for a chunk of targets at a time, and once more in backward.
    """
    h_ND, head_VD = _supervised_hidden(model, batch), model.head_weight

    def chunk(h_ND: Tensor, next_N: Tensor) -> tuple[Tensor, Tensor]:
        logp_NV = F.linear(h_ND, head_VD).float().log_softmax(-1)
        seen_NV = logp_NV.detach()
        return logp_NV.gather(1, next_N[:, None])[:, 0], -(seen_NV.exp() * seen_NV).sum(-1)

    step = chunk_rows(h_ND.device, len(head_VD))
    pieces = [
        checkpoint(chunk, h_ND[start : start + step], batch.next_N[start : start + step], use_reentrant=False)
        for start in range(0, max(1, len(h_ND)), step)
    ]
    logp, entropy = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return logp, entropy


def losses_and_stops(model: Transformer, batch: Targets, stop: int) -> Tensor:
    """Three numbers for every supervised target, fp32 [N, 3].

    Its `token_losses`; 1 where the target is `stop`; 1 where it is and the model's likeliest id is `stop`, too.
    """
    h_ND = _supervised_hidden(model, batch)
    losses_N = cross_entropies(h_ND, model.head_weight, batch.next_N, 0.0)
    ends_N = batch.next_N == stop
    predicts_stop_N = torch.zeros_like(ends_N)
    predicts_stop_N[ends_N] = F.linear(h_ND[ends_N], model.head_weight).argmax(-1) == stop
    return torch.stack([losses_N, ends_N.to(losses_N.dtype), predicts_stop_N.to(losses_N.dtype)], dim=1)


def training_loss(
    model: Transformer, batch: Targets, divisor: int, *, z_loss: float = 0.0, by_source_K: Tensor | None = None
) -> Tensor:
    """The sum of `token_losses` divided by `divisor`, to call `backward` on; a scalar.

    The sums of each source's own `token_losses` are added to `by_source_K`; no gradient goes through them.
    """
    h_ND = _supervised_hidden(model, batch)
    by_hand = h_ND.device.type != "cpu" or use_cpu_kernel(h_ND)
    summed = summed_cross_entropy if by_hand else plain_summed_cross_entropy
    loss, losses_N = summed(h_ND, model.head_weight, batch.next_N, divisor, z_loss)
    if by_source_K is not None and batch.source_N is not None:
        by_source_K.index_add_(0, batch.source_N, losses_N)
    return loss


def _supervised_hidden(model: Transformer, batch: Targets) -> Tensor:
    documents = {"document_BT": batch.document_BT} if batch.starts_M is None else {"starts_M": batch.starts_M}
    h_ND = model.hidden(batch.ids_BT, **documents).flatten(0, 1)
    return h_ND if len(batch.where_N) == len(h_ND) else h_ND.index_select(0, batch.where_N)
