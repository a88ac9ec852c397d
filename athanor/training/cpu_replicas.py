"""Forward and backward of a step's micro-batches, several at once on a CPU.

Small models gain little from splitting each operation over cores, and lose
everything to barriers when another program wants one of the cores. Here every
micro-batch runs on one core from end to end, and its gradients are added in a
fixed order. So the sum has the same bits for any number of threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor, nn

from athanor.model.config import ModelConfig
from athanor.model.loss import Targets
from athanor.model.transformer import Transformer

MAX_REPLICAS = 8
_GRADIENT_BYTES = 1 << 30  # that all replicas together may hold
_T = TypeVar("_T")
_R = TypeVar("_R")


def replica_count(config: ModelConfig, device: torch.device) -> int:
    """Replicas for a model: decided by its size, never by the machine's cores, which must not change results.

    One replica means the usual way: one micro-batch after the other, each
    operation on all threads or on the accelerator. So does a model that only
    has adapters to train: its layers are wide, and their replicas not ours.
    """
    if device.type != "cpu" or config.adapters:
        return 1
    return max(1, min(MAX_REPLICAS, _GRADIENT_BYTES // (4 * config.parameter_count())))


class CpuReplicas:
    """Replicas of a model that share its weights and have gradients of their own.

    Use as a context manager. On a CPU with more than one replica it sets torch to
    one thread per operation, for the pool of `threads` to run side by side.
    """

    def __init__(self, model: Transformer, threads: int) -> None:
        self.model = model
        self.count = replica_count(model.config, model.head_weight.device)
        self.models = [model, *(_share(model) for _ in range(self.count - 1))]
        if self.count > 1:
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(min(threads, self.count), initializer=_flush_denormals)

    def __enter__(self) -> CpuReplicas:
        return self

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            self._pool.shutdown()

    def backward(self, batches: Sequence[Targets], loss_of: Callable[[Transformer, Targets], Tensor]) -> Tensor:
        """Add up gradients of `loss_of` over all batches in the model's `.grad`; returns the summed loss.

        Gradients start from nothing. `loss_of` runs forward and backward of one
        batch on the replica it is given and returns the loss, detached, or a
        row of numbers that are to be summed.
        """
        for replica in self.models:
            replica.zero_grad(set_to_none=True)

        def run(index: int) -> Tensor:
            total = torch.zeros((), device=self.model.head_weight.device)
            for batch in batches[index :: self.count]:
                total = total + loss_of(self.models[index], batch)
            return total

        active = min(self.count, len(batches))
        if active <= 1:
            return run(0)
        futures = [self._pool.submit(run, index) for index in range(active)]
        wait(futures)  # all of them, also when one fails: a step that is tried again must find the replicas idle
        losses = [future.result() for future in futures]
        self._add_up(active)
        return torch.stack(losses, -1).sum(-1)

    def _add_up(self, active: int) -> None:
        """Add the gradients of the first `active` replicas up in the model's, a share of the weights on each core."""
        gradients = [[weight.grad for weight in replica.parameters()] for replica in self.models[:active]]

        def add(share: slice) -> None:
            for others in gradients[1:]:
                torch._foreach_add_(gradients[0][share], others[share])

        self.parallel_map(add, [slice(start, None, self.count) for start in range(self.count)])
        for replica in self.models[1:active]:
            replica.zero_grad(set_to_none=True)

    def parallel_map(self, function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Results of `function` for all items in order, each on one core; for replicas that run side by side."""
        futures = [self._pool.submit(function, item) for item in items]
        wait(futures)  # see `backward`
        return [future.result() for future in futures]


def _share(model: Transformer) -> Transformer:
    """A copy of the module tree whose parameters and buffers are the same memory."""
    memo: dict[int, object] = {id(weight): nn.Parameter(weight.detach()) for weight in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _flush_denormals() -> None:
    torch.set_flush_denormal(True)  # a mode of the thread, not of the process
