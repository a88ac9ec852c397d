"""Prepares the device, sizes the micro-batches, and tunes the model, from parameters, machine settings and choices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from athanor.base.errors import ParamsError
from athanor.model.config import ModelConfig
from athanor.model.device import micro_batch, prepare
from athanor.model.gpu_family import identify
from athanor.model.transformer import Transformer
from athanor.training.attention import DEFAULT, attention
from athanor.training.compiling import Shapes, checkpoint_blocks, compile_blocks, untune, use_cache
from athanor.training.cpu_replicas import replica_count
from athanor.training.heap import keep_heap
from athanor.training.loop import Hooks
from athanor.training.memory import StepFootprint, training_bytes
from athanor.training.settings import LoopSettings
from athanor.training.world import World


@dataclass(frozen=True)
class Choices:
    """How a machine works, with every `auto` resolved. All but `precision` only change the rounding of sums.

    micro_batch_tokens: 0 for the trainer's own rule. memory_fraction: of the
    device's memory that may be taken (device.prepare sees to it), 1 for no limit.
    """

    precision: str
    attention: str = DEFAULT
    compile: bool = False
    checkpointing: bool = False
    micro_batch_tokens: int = 0
    memory_fraction: float = 1.0


class DeviceSpec(NamedTuple):
    """Machine settings of the device; the parameter section that trains there, and its seed."""

    device: str
    threads: int
    section: str
    seed: int
    deterministic: bool = False


def check_batch(config: ModelConfig, batch_tokens: int, section: str) -> None:
    """ParamsError names `section`.batch_tokens when a batch is not whole rows."""
    if batch_tokens % config.context_tokens:
        raise ParamsError(
            f"{batch_tokens} is not a multiple of model.context_tokens",
            where=f"{section}.batch_tokens",
            fix=f"use a multiple of {config.context_tokens}",
        )


def setup_device(
    config: ModelConfig, choices: Choices, spec: DeviceSpec, batch_tokens: int, optimizer: str, keeps_best: bool = False
) -> tuple[torch.device, StepFootprint]:
    """Prepare the device and size its micro-batches; `keeps_best`: the host holds a copy of the best weights.

    It also seeds the global generators: torch starts them at random, and their
    state is part of every checkpoint.
    """
    check_batch(config, batch_tokens, spec.section)
    device = prepare(spec.device, spec.threads, spec.deterministic)
    torch.manual_seed(spec.seed)
    rows = micro_batch(device, choices.micro_batch_tokens, config.context_tokens, batch_tokens)
    micro_batches = -(-batch_tokens // (rows * config.context_tokens))
    replicas = min(replica_count(config, device), micro_batches)
    return device, StepFootprint(
        rows,
        config.context_tokens,
        choices.precision,
        replicas,
        min(replicas, spec.threads),
        accumulates=micro_batches > replicas,
        checkpointing=choices.checkpointing,
        optimizer=optimizer,
        keeps_best=keeps_best and device.type == "cpu",  # elsewhere the host's memory is another
        math_attention=device.type == "cuda" and (choices.attention == "math" or not identify(device).fused_attention),
    )


class ExecutionPlan(NamedTuple):
    """How one machine or several run a training."""

    world: World
    device: torch.device
    footprint: StepFootprint
    settings: LoopSettings
    execution: Choices

    @classmethod
    def of(
        cls,
        section: str,
        params: Any,
        machine: Any,
        world: World,
        execution: Choices,
        config: ModelConfig,
        *,
        keeps_best: bool = False,
        **loop_settings: Any,
    ) -> ExecutionPlan:
        """From the parameters of `section`, the machine's settings and the choices; seeds the global generators.

        `loop_settings`: what of LoopSettings neither the parameters nor the machine name alike in all stages.
        """
        deterministic = machine.deterministic == "on"
        spec = DeviceSpec(machine.device, machine.threads, section, params.seed, deterministic)
        device, footprint = setup_device(config, execution, spec, params.batch_tokens, params.optimizer, keeps_best)
        settings = LoopSettings.of(
            params,
            machine,
            precision=execution.precision,
            micro_batch_rows=footprint.micro_batch_rows,
            footprint=footprint,
            overlap=machine.overlap == "on" or machine.overlap == "auto" and device.type != "cpu",
            **loop_settings,
        )
        return cls(world, device, footprint, settings, execution)


@contextlib.contextmanager
def tuned(
    model: Transformer,
    choices: Choices,
    footprint: StepFootprint,
    settings: LoopSettings,
    hooks: Hooks,
    cache: Path,
    active: bool = True,
) -> Iterator[None]:
    """Inside the block, `model` and its copies run as chosen; compiled code is kept in `cache`.

    On a CPU the process keeps its heap from here on.

    `active` is False where nothing is left to train: compiling takes a minute.
    """
    if not active:
        yield
        return
    device = model.head_weight.device
    if device.type == "cpu":
        keep_heap(training_bytes(model.config, footprint, device))
    else:
        use_cache(cache)  # of the loss, which is compiled in any case
    try:
        with attention(choices.attention, device):
            if choices.compile:
                several = torch.distributed.is_available() and torch.distributed.is_initialized()
                shapes = Shapes.of(
                    footprint.micro_batch_rows,
                    footprint.row_tokens,
                    settings.batch_tokens,
                    settings.document_mask,
                    torch.distributed.get_world_size() if several else 1,
                )
                compile_blocks(
                    [model],
                    shapes,
                    precision=footprint.precision,
                    cache=cache,
                    one_thread=replica_count(model.config, device) > 1,
                    note=hooks.on_note,
                    kernel=choices.attention,
                    should_stop=hooks.should_stop,
                )
            if choices.checkpointing:
                checkpoint_blocks([model])
            yield
    finally:
        untune([model])
