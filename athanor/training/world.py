"""The processes that train one model together, and what they have to agree on.

They come from torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT). Every process works out the whole batch, which is
cheap because the sampler is stateless, and takes its share of the rows. One
of them is `main`: it alone reads and writes files. With one process there is
nothing to agree on, and torch.distributed is not even imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from athanor.base.errors import AthanorError, GateError, InputError
from athanor.model.config import ModelConfig
from athanor.model.device import set_environment
from athanor.training.memory import USABLE, StepFootprint, available_bytes, check_memory, training_bytes

STRATEGIES = ("auto", "ddp", "fsdp", "hsdp")
_POLL = (0.001, 0.2)  # s, from the first look for another process to the later ones


class World:
    """One process. `ProcessGroup` has the same methods for several, which all of them must call in the same order."""

    rank, size, main = 0, 1, True
    sharded = False  # weights, gradients and optimiser cut up over processes (FSDP, HSDP), or whole on each (DDP)
    shards = 1  # how many processes have one model between them: all (FSDP), or those of a node (HSDP)

    def choose_strategy(
        self, config: ModelConfig, footprint: StepFootprint, device: torch.device, fingerprint: str, *, check: bool
    ) -> None:
        """Choose the strategy where it was left open, and (with `check`) refuse what does not fit into memory.

        GateError unless the `fingerprint` of what decides the result is the same in all processes.
        """
        if check:
            check_memory(config, footprint, device)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is true in any process."""
        return flags

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast the main process's JSON value to all; they wait for it, however long it takes."""
        return value

    def barrier(self) -> None:
        """Wait until the main process has reached this call, however long it takes."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the processes, in place."""
        return tensor

    def tensors(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The main process's tensors in every process; each lookup broadcasts that one tensor."""
        assert tensors is not None
        return tensors

    def destroy(self) -> None:
        """End the communication between the processes."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, an error that says in one line that another process was lost replaces the library's own."""
        yield


SINGLE = World()


class ProcessGroup(World):
    """Several processes; each of them has made one of these."""

    def __init__(self, strategy: str, device: str, timeout_s: float, main: bool) -> None:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self.dist, self.main, self.strategy = dist, main, strategy
        self.sharded = strategy in ("fsdp", "hsdp")
        backend = "gloo"
        if device in ("auto", "cuda") and torch.cuda.is_available():
            set_environment("cuda")  # before CUDA starts
            torch.cuda.set_device(_own_device(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()))
            backend = "cpu:gloo,cuda:nccl"  # what the hosts agree on never waits for the devices
        # Everything that waits for another process is bounded by this, except for the main process's own work.
        self.timeout = timedelta(seconds=timeout_s)
        self.store, self.rank, self.size = next(rendezvous("env://", timeout=self.timeout))
        self.store.set_timeout(self.timeout)
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=self.timeout)
        self.meetings = 0
        mains = torch.zeros(self.size)
        mains[self.rank] = main
        dist.all_reduce(mains)
        if int(mains.sum()) != 1:
            raise InputError(
                f"{int(mains.sum())} of {self.size} processes are the first of node 0, exactly one must be",
                where="launch",
                fix="give every node its own ATHANOR_LAUNCH_NODE_RANK, from 0",
            )
        self.main_rank = int(mains.argmax())
        self.shards = self._node_size() if strategy == "hsdp" else self.size
        if self.shards == 1:
            raise InputError(
                "hsdp divides a model over the processes of a node, and no node has several, or not each as many",
                where="machine.parallel",
                fix="set parallel: fsdp, or the same launch.processes on each node",
            )

    def choose_strategy(
        self, config: ModelConfig, footprint: StepFootprint, device: torch.device, fingerprint: str, *, check: bool
    ) -> None:
        self.same("what decides the result", fingerprint)
        check = self.broadcast_object(check)
        free = available_bytes(device)
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
        if free is not None:
            free = int(free * USABLE / neighbours)

        def too_large(shards: int) -> bool:
            return free is not None and training_bytes(config, footprint, device, shards=shards) > free

        short = too_large(1)
        if self.strategy == "auto":
            (self.sharded,) = self.any(short)
            # A node's processes reach each other faster than the other nodes: HSDP where a node has room for a model.
            node = self._node_size()
            self.shards = node if node > 1 and not self.any(too_large(node))[0] else self.size
        if not check:
            return
        if not self.sharded and self.any(short)[0]:
            fix = "parallel: fsdp in machine.yaml, or a smaller micro_batch_tokens"
        elif self.sharded and self.any(too_large(self.shards))[0]:
            fix = "more processes, a smaller micro_batch_tokens, or a smaller model"
        else:
            return
        needed = training_bytes(config, footprint, device, shards=self.shards if self.sharded else 1)
        raise InputError(
            f"a process needs about {needed / 2**30:.1f} GiB, {(free or 0) / 2**30:.1f} GiB are free for it"
            f" on {device.type} of process {self.rank}",
            where="model",
            fix=fix,
        )

    def _node_size(self) -> int:
        """How many processes each node has; 1 where they differ in that, or are not numbered node by node."""
        size, number = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
        largest = torch.tensor([size, -size, self.rank % size != number])
        self.dist.all_reduce(largest, op=self.dist.ReduceOp.MAX)
        return 1 if largest[0] != -largest[1] or largest[2] else size

    def any(self, *flags: bool) -> tuple[bool, ...]:
        raised = torch.tensor(flags, dtype=torch.int32)
        self.dist.all_reduce(raised, op=self.dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in raised)

    def broadcast_object(self, value: Any) -> Any:
        if self.main:
            self.store.set(f"shared{self.meetings}", json.dumps(value))
        name = f"shared{self.meetings}"
        self.barrier()
        return value if self.main else json.loads(self.store.get(name))

    def barrier(self) -> None:
        # Asked for again and again, not a collective: the main process may be writing a checkpoint, or waiting for the
        # slot's lock. Should it die, the store's connection or whoever started this process ends the wait.
        name, pause = f"met{self.meetings}", _POLL[0]
        self.meetings += 1
        if self.main:
            self.store.set(name, "")
        while not self.main and not self.store.check([name]):
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])
        # The store ends with the main process, which therefore goes on only when every process has seen the name.
        self.any(True)

    def same(self, subject: str, value: str) -> None:
        """GateError if `value` differs between processes."""
        if self.any(self.broadcast_object(value) != value)[0]:
            raise GateError(
                "one model",
                f"{subject} is not the same in all {self.size} processes ({value} in process {self.rank})",
                fix="bring code, params.yaml and data of the nodes into step, or use a shared file system",
            )

    def sum_(self, tensor: Tensor) -> Tensor:
        self.dist.all_reduce(tensor)
        return tensor

    def tensors(self, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        kinds = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in (tensors or {}).items()}
        return _Sent(self, tensors, self.broadcast_object(kinds))

    def destroy(self) -> None:
        self.barrier()
        self.dist.destroy_process_group()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except AthanorError:
            raise
        except RuntimeError as error:
            if not isinstance(error, self.dist.DistError) and "gloo" not in str(error):
                raise
            raise InputError(
                f"process {self.rank} of {self.size} lost another one ({str(error).splitlines()[0]:.200})",
                where="training",
                fix="see what that one said; the same command goes on from the last checkpoint",
            ) from None


class _Sent(Mapping[str, Tensor]):
    """Tensors of the main process: a lookup is a broadcast, so every process must look up the same ones in order."""

    def __init__(self, world: ProcessGroup, main_tensors: Mapping[str, Tensor] | None, kinds: dict[str, Any]) -> None:
        self.world, self.main_tensors, self.kinds = world, main_tensors, kinds

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.kinds[name]
        if self.main_tensors is not None:
            tensor = self.main_tensors[name].cpu().contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        self.world.dist.broadcast(tensor, self.world.main_rank)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def _own_device(local_rank: int, count: int) -> int:
    """The accelerator of a process: its number on the node, unless the scheduler shows it no more than its own."""
    if count == 1:
        return 0
    if local_rank >= count:
        raise InputError(
            f"process {local_rank} of this node has no accelerator of its own, there are {count}",
            where="launch.processes",
            fix=f"use {count}, or 0 for as many as there are",
        )
    return local_rank


def init_world(strategy: str, *, device: str, timeout_s: float, main: bool) -> World:
    """Join the processes that the environment describes; call it before any work on the device.

    `device` is the machine setting; `main` says that this process is the one to read and write files.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return SINGLE
    return ProcessGroup(strategy, device, timeout_s, main)
