"""Checks before the first step: a model that learns wrongly is cheaper to find here than after a week.

They work on a copy of the model and draw no random numbers, so training goes
on exactly as if they had not run.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.base.errors import GateError
from athanor.model import varlen
from athanor.model.loss import Targets, token_losses, training_loss
from athanor.model.precision import autocast, products
from athanor.model.transformer import Transformer
from athanor.training.attention import attention
from athanor.training.compiling import tune_blocks
from athanor.training.recovery import out_of_memory
from athanor.training.vitals import residual_growth

INITIAL_LOSS_TOLERANCE = 0.1
OVERFIT_STEPS = 60
OVERFIT_SHARE = 0.5  # of the initial loss that has to be gone by then
INPUTS_MATTER = 1.1  # times the loss, with inputs in another order
RESIDUAL_LIMIT = 3.2
UNTIED_RESIDUAL_LIMIT = 0.16
_PROBE_TOKENS = 64
# Relative distance of the path that trains from plain blocks in fp32: of the loss, and of any weight's gradient.
# Measured on untrained models of 2 to 18 layers: at most 3e-5 and 0.018 in bf16, 1.3e-6 and 0.0025 in fp16.
PATH_TOLERANCES = {"fp32": (1e-3, 0.02), "bf16": (0.01, 0.25), "fp16": (0.01, 0.1)}

_PATH_SCALE = 1024.0  # of the loss, so that no gradient is too small for fp16


def preflight(model: Transformer, batch: Targets, *, fresh: bool = True, precision: str = "fp32") -> dict[str, float]:
    """Run the gates on a small batch; GateError names the first that fails. Returns what was measured.

    `fresh` says the weights are untrained: then the first loss must be ln V
    and must fall quickly. Trained weights may have nothing left to learn.
    The model's own blocks are run in `precision`, in which it will train.
    """
    check_targets(batch)
    check_path(model, batch, precision, fresh=fresh)
    batch = batch.to(model.head_weight.device)  # FSDP keeps the whole model on the host
    probe = copy.deepcopy(model).float()
    first = probe_gradients(probe, batch)
    check_reach(probe, batch.ids_BT)
    check_accumulation(probe, narrowed(batch))
    if not fresh:
        return {"initial_loss": first}
    first = untrained_loss(probe, batch)
    check_initial_loss(first, model.config.vocab_size)
    growth = check_residual(probe)
    remaining_loss, shuffled = check_overfits(probe, narrowed(batch))
    return {"initial_loss": first, "residual_growth": growth, "overfit_loss": remaining_loss, "shuffled_loss": shuffled}


def check_targets(batch: Targets) -> None:
    """Every target must be the id after its position; of the last position of a row it is not among the inputs."""
    inside_N = (batch.where_N + 1) % batch.ids_BT.shape[1] != 0
    following_N = batch.ids_BT.flatten()[batch.where_N[inside_N] + 1]
    wrong = int((following_N != batch.next_N[inside_N]).sum())
    if wrong:
        raise GateError(
            "targets", f"{wrong} of {len(following_N)} targets are not the next id", fix="shift targets by one position"
        )


@torch.no_grad()
def untrained_loss(model: Transformer, batch: Targets) -> float:
    """Expected loss over all ids as the target, at the positions of the batch.

    Not the loss of the batch's own targets: with tied embeddings an untrained
    model leans towards ids it has just read, so text with many repeats
    (indentation, tables) would look known.
    """
    h_BTD = model.hidden(batch.ids_BT, document_BT=batch.document_BT)
    logits_NV = F.linear(h_BTD.flatten(0, 1).index_select(0, batch.where_N), model.head_weight)
    return float((logits_NV.logsumexp(-1) - logits_NV.mean(-1)).mean())


def check_initial_loss(loss: float, vocab_size: int) -> None:
    """An untrained model must know nothing and claim nothing: its loss is ln V."""
    if not abs(loss - math.log(vocab_size)) <= INITIAL_LOSS_TOLERANCE:
        raise GateError(
            "initial loss",
            f"the untrained model's loss is {loss:.3f}, ln V is {math.log(vocab_size):.3f}",
            fix="check the initialisation and that targets are the next ids",
        )


@torch.no_grad()
def check_residual(model: Transformer) -> float:
    """The residual stream of an untrained model must grow through the blocks, but no more than damping allows.

    What a block adds has a root mean square that goes with the square of the
    width, relative to the embedding: measured from 96 to 1024 wide and 2 to 18
    layers deep, 1.1 to 1.4 · (width / 192)². Without damping by
    1/sqrt(2 · layers) it is 4 times as much at 5 layers, 6 at 18. An embedding
    with an output matrix beside it is larger: of that, blocks add
    0.09 · (width / 192)^1.5, and sqrt(2 · layers) times as much undamped. Ids of a
    text would not do: where they repeat, attention does not average them out.
    """
    length = min(4 * _PROBE_TOKENS, model.config.context_tokens)
    ids_1T = (7919 * torch.arange(length, device=model.head_weight.device) % model.config.vocab_size)[None]
    growth = residual_growth(model, ids_1T)
    if growth is None:
        return math.nan
    width = model.config.dim / 192
    tied = model.config.tied_embeddings
    limit = 1.5 + RESIDUAL_LIMIT * width**2 if tied else math.hypot(1.01, UNTIED_RESIDUAL_LIMIT * width**1.5)
    if not 0.5 <= float(growth) <= limit:
        raise GateError(
            "initialisation",
            f"the residual stream grows {float(growth):.3g} times through {model.config.layers} blocks (limit {limit:.3g})",
            fix="damp what writes to the residual stream by 1/sqrt(2 · layers)",
        )
    return float(growth)


def check_accumulation(model: Transformer, batch: Targets) -> None:
    """Gradients of the rows one by one must add up to the gradient of all at once."""
    rows, T = batch.ids_BT.shape
    if rows < 2 or not len(batch.where_N):
        return
    single_rows = []
    for row in range(rows):
        mine_N = batch.where_N // T == row
        document_1T = None if batch.document_BT is None else batch.document_BT[row : row + 1]
        where_N = batch.where_N[mine_N] - row * T
        single_rows.append(Targets(batch.ids_BT[row : row + 1], document_1T, where_N, batch.next_N[mine_N]))
    sums = []
    for group in ([batch], [single_row for single_row in single_rows if len(single_row.where_N)]):
        model.zero_grad(set_to_none=True)
        for single_row in group:
            (token_losses(model, single_row).sum() / len(batch.where_N)).backward()
        sums.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    size = torch.stack(torch._foreach_norm(sums[0])).norm()
    distance = float(torch.stack(torch._foreach_norm(torch._foreach_sub(*sums))).norm() / size)
    if not distance <= (1e-4 if size.device.type == "cpu" else 1e-2):  # products of 10 bits are allowed on a GPU
        raise GateError(
            "accumulation",
            f"gradients of single rows add up to another than that of all, relative distance {distance:.2g}",
            fix="divide the sum of the losses by the targets of the whole step",
        )


def check_path(model: Transformer, batch: Targets, precision: str, *, fresh: bool = True) -> None:
    """Loss and gradients of the way that trains must be those of plain blocks in fp32 with the math kernel.

    That way is the number format, the attention kernel chosen, the fused loss, and compiled blocks. Those serve the
    shape of a micro-batch alone, so rows are repeated until there are as many, without further targets. A micro-batch
    that does not fit into memory is left to the first step, which halves it.
    """
    device, how = batch.ids_BT.device, getattr(model.model.layers[0], "how", None)
    if model.head_weight.device != device or (device.type == "cpu" and precision == "fp32" and how is None):
        return  # sharded, so this model is not the one that trains; or plain blocks in fp32 themselves
    count, T = batch.ids_BT.shape
    rows = max((rows for rows, _ in getattr(how, "rows_tokens", ())), default=count)
    inside_N = batch.where_N < rows * T
    batch = batch._replace(where_N=batch.where_N[inside_N], next_N=batch.next_N[inside_N])
    row_B = torch.arange(rows, device=device) % count
    document_BT = None if batch.document_BT is None else batch.document_BT[row_B]
    repeated = batch._replace(ids_BT=batch.ids_BT[row_B], document_BT=document_BT)
    if batch.starts_M is not None:
        numbers_BT = torch.zeros(rows, T) if document_BT is None else document_BT.cpu()
        starts_M = torch.from_numpy(varlen.document_starts(numbers_BT.numpy()))
        repeated, batch = repeated._replace(starts_M=starts_M.to(device)), batch._replace(starts_M=None)
    probe = copy.deepcopy(model).float()
    tune_blocks([probe], compiled=None, recompute=True)  # the scores of one block at a time
    try:
        with attention("math", device):
            expected = probe_gradients(probe, batch)
        reference = [weight.grad.cpu() for weight in probe.parameters() if weight.grad is not None]
        del probe
        with products(precision, device):
            with autocast(precision, device):
                loss = training_loss(model, repeated, len(batch.where_N))
            gradients = torch.autograd.grad(loss * _PATH_SCALE, list(model.parameters()))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return
    pairs = zip(gradients, reference, strict=True)
    both = [((ours.cpu() / _PATH_SCALE - other).norm(), other.norm()) for ours, other in pairs]
    errors, norms = (torch.stack(each) for each in zip(*both, strict=True))
    of_gradient = (errors / norms).max() if fresh else errors.norm() / norms.norm()
    found, limits = (abs(loss.item() / expected - 1), of_gradient.item()), PATH_TOLERANCES[precision]
    if not (found[0] <= limits[0] and found[1] <= limits[1]):
        raise GateError(
            "training path",
            f"in {precision}, as the blocks will train, loss and worst gradient of a weight differ from those of plain "
            f"blocks in fp32 by {found[0]:.2g} and {found[1]:.2g} (limits {limits})",
            fix="in machine.yaml compile: off, then attention: math; or another torch, or precision: fp32",
        )


def probe_gradients(model: Transformer, batch: Targets) -> float:
    """Every parameter must get a finite gradient that is not all zero; returns the loss."""
    model.zero_grad(set_to_none=True)
    loss = token_losses(model, batch).mean()
    loss.backward()
    for name, weight in model.named_parameters():
        if weight.grad is None or not bool(weight.grad.any()):
            raise GateError("gradients", f"parameter {name} gets none", fix="connect it to the loss or remove it")
        if not bool(torch.isfinite(weight.grad).all()):
            raise GateError("gradients", f"parameter {name} gets one that is not finite", fix="check the batch")
    return float(loss.detach())


def check_reach(model: Transformer, ids_BT: Tensor) -> None:
    """No position may depend on a later one, nor on another document; on every earlier one of its own it must."""
    ids_1T = ids_BT[:1, :_PROBE_TOKENS]
    T = ids_1T.shape[1]
    border, position = T // 2, T - T // 4 - 1
    document_1T = (torch.arange(T, device=ids_1T.device) >= border).long()[None]
    for document, first in ((None, 0), (document_1T, border)):
        reached_T = _influence(model, ids_1T, document, position)
        if bool(reached_T[position + 1 :].any()):
            raise GateError("causality", f"position {position} depends on later ids", fix="check the attention mask")
        if bool(reached_T[:first].any()):
            raise GateError(
                "document mask", f"position {position} depends on the document before", fix="check the block mask"
            )
        if not bool(reached_T[first : position + 1].all()):
            raise GateError("attention", f"position {position} cannot see all ids before it", fix="check the mask")


def _influence(model: Transformer, ids_1T: Tensor, document_1T: Tensor | None, position: int) -> Tensor:
    """Which input positions have a gradient to the hidden state at `position`: bool [T]."""
    embeddings: list[Tensor] = []

    def keep(_module: object, _inputs: object, out: Tensor) -> Tensor:
        embeddings.append(out.detach().requires_grad_(True))
        return embeddings[0]

    hook = model.model.embed_tokens.register_forward_hook(keep)
    try:
        h_1TD = model.hidden(ids_1T, document_BT=document_1T)
    finally:
        hook.remove()
    # Uneven weights: a plain sum of a normed vector could lose a direction.
    direction_D = torch.arange(1.0, h_1TD.shape[-1] + 1, device=ids_1T.device)
    (gradient_1TD,) = torch.autograd.grad((h_1TD[0, position] * direction_D).sum(), embeddings[0])
    return gradient_1TD[0].ne(0).any(-1)


def narrowed(batch: Targets) -> Targets:
    """The first ids of each row: enough to learn by heart, and quick."""
    ids_BT = batch.ids_BT[:, :_PROBE_TOKENS]
    row_N = batch.where_N // batch.ids_BT.shape[1]
    column_N = batch.where_N % batch.ids_BT.shape[1]
    inside_N = column_N < ids_BT.shape[1]
    where_N = (row_N * ids_BT.shape[1] + column_N)[inside_N]
    document_BT = None if batch.document_BT is None else batch.document_BT[:, :_PROBE_TOKENS]
    return Targets(ids_BT, document_BT, where_N, batch.next_N[inside_N])


def check_overfits(model: Transformer, batch: Targets) -> tuple[float, float]:
    """Half of the loss on one small batch must be gone after a few steps, and not without looking at the inputs.

    With inputs in another order and the same targets the loss must be higher,
    soon if not at once. Returns the loss that is left, and that one. Steps along the gradient's sign: as good as Adam here, and without its
    memory. Trains `model`, so pass a copy.
    """
    lr = min(0.02, 0.4 / model.config.dim)  # what a step does to an output grows with the width
    first = loss = shuffled = math.inf
    reordered = batch._replace(ids_BT=batch.ids_BT.flatten().roll(batch.ids_BT.numel() // 3).view_as(batch.ids_BT))
    alike = torch.equal(reordered.ids_BT, batch.ids_BT)
    for step in range(2 * OVERFIT_STEPS):
        loss = probe_gradients(model, batch)
        first = loss if step == 0 else first
        if loss <= OVERFIT_SHARE * first:
            with torch.no_grad():
                shuffled = float(token_losses(model, reordered).mean())
            if alike or shuffled >= INPUTS_MATTER * loss:
                return loss, shuffled
        elif step >= OVERFIT_STEPS:
            break
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(weight.grad.sign(), alpha=lr * max(0.25, 1 - step / OVERFIT_STEPS))
    if loss <= OVERFIT_SHARE * first:
        raise GateError(
            "inputs matter",
            f"the loss on one small batch is {loss:.3f}, and {shuffled:.3f} with the inputs in another order",
            fix="check that the ids reach the blocks",
        )
    raise GateError(
        "overfit",
        f"the loss on one small batch is still {loss:.3f} after {OVERFIT_STEPS} steps from {first:.3f}",
        fix="check targets, loss and gradients",
    )
