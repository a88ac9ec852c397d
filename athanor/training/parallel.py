"""Gradient backends of a step: one process, replicated processes (DDP), or everything sharded (FSDP2, HSDP).

All three are given micro-batches and a function that runs forward and backward
of one, and leave the gradient of the whole batch, summed over all processes,
where the optimiser finds it. The loss is divided by the targets of the whole
batch beforehand, so sums are all there is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from athanor.base.errors import GateError, InputError
from athanor.model.loss import Targets
from athanor.model.transformer import Transformer
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.world import ProcessGroup, World

BUCKET_BYTES = 25 << 20  # of gradients that travel together: as DDP (Li et al. 2020, arXiv:2006.15704)
LossOf = Callable[[Transformer, Targets], Tensor]


class Single:
    """One process: the replicas' own sum."""

    def __init__(self, replicas: CpuReplicas) -> None:
        self.replicas = replicas

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What the optimiser works on: parameters, or this process's shards of them."""
        return self.replicas.model.named_parameters()

    def gradients(self) -> list[Tensor]:
        return [weight.grad for _, weight in self.named_parameters() if weight.grad is not None]

    def backward(self, batches: Sequence[Targets], loss_of: LossOf) -> Tensor:
        """Leave the summed gradient of all batches (of all processes); returns the summed loss."""
        return self.replicas.backward(batches, loss_of)

    def joint_norm(self, norm: Tensor) -> Tensor:
        """Norm of the whole gradient from that of `gradients()`."""
        return norm

    def model(self) -> Transformer:
        """The full model with its present weights."""
        return self.replicas.model

    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """The full tensor of a shard that belongs to parameter `name`: of the weight itself or of its optimiser state."""
        return tensor

    def shard_of(self, name: str, full: Tensor) -> Tensor:
        """This process's shard of such a full tensor."""
        return full

    def check_same(self) -> None:
        """GateError when processes that must hold the same weights do not."""


class Replicated(Single):
    """Each process has the whole model, and gradients are added up.

    Not torch's DistributedDataParallel: that needs the loss to come out of one
    module's `forward`, and knows nothing of replicas. What makes it fast is here,
    too: gradients travel in buckets while backward still makes others, without
    a second copy of them (they become views of the bucket), and only in the
    last micro-batch.
    """

    def __init__(self, replicas: CpuReplicas, world: ProcessGroup) -> None:
        super().__init__(replicas)
        self.world = world
        self.weights = list(replicas.model.parameters())[::-1]  # about the order in which backward comes to them
        with torch.no_grad():
            for weight in self.weights:
                world.dist.broadcast(weight, world.main_rank)
        self.buckets: list[list[nn.Parameter]] = [[]]
        size = 0
        for weight in self.weights:
            if size + weight.nbytes > BUCKET_BYTES and self.buckets[-1]:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(weight)
            size += weight.nbytes
        self.waiting: list[set[int]] = []  # ids of weights that a bucket still waits for, while armed
        self.sent: list[tuple[Tensor, Any]] = []
        if replicas.count == 1:  # replicas add up their gradients at the end: nothing could travel earlier
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self._ready)

    def backward(self, batches: Sequence[Targets], loss_of: LossOf) -> Tensor:
        remaining = len(batches)

        def counted(model: Transformer, batch: Targets) -> Tensor:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                self.waiting = [{id(weight) for weight in bucket} for bucket in self.buckets]
            return loss_of(model, batch)

        self.sent = []
        total = self.replicas.backward(batches, counted if self.replicas.count == 1 else loss_of)
        self.waiting = []
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            pieces = flat.split([weight.numel() for weight in bucket])
            for weight, piece in zip(bucket, pieces, strict=True):
                weight.grad = piece.view_as(weight)
        self.sent = []
        return self.world.sum_(total)

    def _ready(self, weight: Tensor) -> None:
        for ids in self.waiting:
            ids.discard(id(weight))
        # In the order of the buckets, whichever is ready first: the processes must send the same one.
        while self.waiting and len(self.sent) < len(self.buckets) and not self.waiting[len(self.sent)]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        gradients = []
        for weight in self.buckets[len(self.sent)]:
            gradients.append(torch.zeros_like(weight).flatten() if weight.grad is None else weight.grad.flatten())
            weight.grad = None
        flat = torch.cat(gradients)
        self.sent.append((flat, self.world.dist.all_reduce(flat, async_op=True)))

    def check_same(self) -> None:
        _check_same(self.weights, self.world, None)


def _check_same(weights: Sequence[Tensor], world: ProcessGroup, group: Any) -> None:
    """Compare the sums of weights bit for bit within the group, so that its processes cannot drift apart unnoticed."""
    sums = torch.stack([weight.detach().double().sum() for weight in weights])
    low, high = sums.clone(), sums.clone()
    world.dist.all_reduce(low, op=world.dist.ReduceOp.MIN, group=group)
    world.dist.all_reduce(high, op=world.dist.ReduceOp.MAX, group=group)
    if world.any(not torch.equal(low.nan_to_num(), high.nan_to_num()))[0]:
        raise GateError(
            "one model",
            f"the weights differ between the {world.size} processes by {float((high - low).abs().max()):.3g}",
            fix="use one kind of processor for all processes; the last checkpoint is whole",
        )


class Sharded(Single):
    """Each process keeps a share of every weight, gradient and moment (Zhao et al. 2023, arXiv:2304.11277).

    The shares of all processes make one model (FSDP), or those of each node do, and gradients are then added up
    over the nodes (HSDP): what is gathered twice in each micro-batch stays within a node.

    Blocks are gathered just before they are needed. Weights travel in fp32,
    because autocast rounds inside the blocks as it does in one process: the
    result is the same but for the order of sums.

    The model that the caller gave stays whole and unsharded. It gets the
    present weights when someone asks for it, which takes 4 bytes per parameter
    on the device for as long as it is looked at.
    """

    def __init__(self, replicas: CpuReplicas, world: ProcessGroup) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        super().__init__(replicas)
        self.world, self.plain = world, replicas.model
        self.device = self.plain.head_weight.device
        with torch.no_grad():
            for weight in self.plain.parameters():
                world.dist.broadcast(weight, world.main_rank)
        self._offload()
        # Models, and shares of each; processes are numbered node by node.
        models = world.size // world.shards
        names = ("model", "share")
        whole = init_device_mesh(self.device.type, (models, world.shards), mesh_dim_names=names)
        self.shares, self.twins = (whole.get_group(name) for name in ("share", "model"))
        self.mesh = whole if models > 1 else whole["share"]
        self.working = copy.deepcopy(self.plain)
        for block in self.working.model.layers:
            fully_shard(block, mesh=self.mesh)
        # Last, for what is left: the loss needs the output matrix after `hidden`, so it has to stay while a step lasts.
        fully_shard(self.working, mesh=self.mesh)
        for module in (*self.working.model.layers, self.working):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(self.working, "hidden")
        if self.device.type == "cuda":
            self.working.rotary = self.working.rotary.to(self.device)
        self.shards = {name: weight.to_local().detach() for name, weight in self.working.named_parameters()}
        if world.any(not any(shard.numel() for shard in self.shards.values()))[0]:
            raise InputError(
                f"the model is too small to give each of {world.shards} processes a part",
                where="machine.parallel",
                fix="use ddp",
            )

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.shards.items())

    def backward(self, batches: Sequence[Targets], loss_of: LossOf) -> Tensor:
        self._offload()
        self.working.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            self.working.set_requires_gradient_sync(number == len(batches))
            total = total + loss_of(self.working, batch)
        for name, weight in self.working.named_parameters():
            # An empty share (fewer rows than processes) has nothing to update.
            shard = self.shards[name]
            shard.grad = weight.grad.to_local() if weight.grad is not None and shard.numel() else None
        return self.world.sum_(total)

    def joint_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        self.world.dist.all_reduce(square, group=self.shares)
        return square.sqrt()

    @torch.no_grad()
    def model(self) -> Transformer:
        self.plain.to(self.device)
        for name, weight in self.plain.named_parameters():
            weight.copy_(self.gathered(name, self.shards[name]))
        return self.plain

    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """One tensor at a time is whole on every device; only the main process keeps it."""
        from torch.distributed.tensor import DTensor

        like = dict(self.working.named_parameters())[name]
        if tensor.shape != self.shards[name].shape:
            # A count of steps. Where a process has no rows of the parameter, it has made none.
            max_count = tensor.clone()
            self.world.dist.all_reduce(max_count, op=self.world.dist.ReduceOp.MAX)
            return max_count
        return DTensor.from_local(
            tensor, self.mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()

    def shard_of(self, name: str, full: Tensor) -> Tensor:
        like = dict(self.working.named_parameters())[name]
        if full.shape != like.shape:
            return full
        rows, number = full.chunk(self.world.shards), self.world.rank % self.world.shards
        return rows[number] if number < len(rows) else full[:0]

    def check_same(self) -> None:
        _check_same(list(self.shards.values()), self.world, self.twins)

    def _offload(self) -> None:
        """Move the full model off the accelerator, which has no room for it."""
        if self.device.type != "cpu":
            self.plain.to("cpu")


def gradient_backend(replicas: CpuReplicas, world: World) -> Single:
    """The backend that computes gradients in this world."""
    if not isinstance(world, ProcessGroup):
        return Single(replicas)
    return Sharded(replicas, world) if world.sharded else Replicated(replicas, world)
