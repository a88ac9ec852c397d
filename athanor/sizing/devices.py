"""Devices that are not at hand: memory, power, and the share of their sheet's rate that training reached for others.

The table is devices.tsv beside this file; rates are those of hardware/peaks.tsv. What a card reaches depends on the width of
the model, as small products do not fill it: share = efficiency · width / (width + HALF).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from pathlib import Path

import torch

from athanor.base.errors import ParamsError, suggest
from athanor.hardware.peaks import find as peak_of
from athanor.hardware.policy import AUTO, Requested, footprint, resolve
from athanor.model.config import ModelConfig
from athanor.model.flops import training_flops
from athanor.model.gpu_family import Architecture
from athanor.training.activations import ACCELERATOR
from athanor.training.memory import RUNTIME_BYTES_ACCELERATOR, StepFootprint

HALF = 256  # width at which half of a card's share is reached
SEVERAL = 0.92  # of the speed, for each device when there are more than one
HOST_WATTS = 100
ROOM = 22  # bytes for each parameter that a device must have free, before activations are counted
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """A row of the table, as a `Speed` of the solver."""

    name: str
    memory_gib: float
    card_watts: float
    efficiency: float
    source: str
    count: int = 1
    machine: float = 0.6
    cores: int = 8
    device: torch.device = ACCELERATOR

    @property
    def watts(self) -> float:
        return self.count * self.card_watts + HOST_WATTS

    @property
    def tflops(self) -> float:
        peak = peak_of(self.name)
        assert peak is not None  # a test holds that each row has one
        return peak.bf16 or peak.fp16 or peak.fp32

    def seconds(self, config: ModelConfig, batch: int) -> float:
        share = self.efficiency * config.dim / (config.dim + HALF)
        several = self.count if self.count == 1 else self.count * SEVERAL
        return training_flops(config, config.context_tokens) / (share * self.tflops * 1e12 * several)

    def fits(self, config: ModelConfig, batch: int) -> bool:
        return ROOM * config.parameter_count() < self.memory_gib * GIB

    def footprint(self, config: ModelConfig, batch: int) -> StepFootprint:
        """The step that a training would choose here, by the same record."""
        architecture = Architecture(self.name, "cuda", fused_attention="MI50" not in self.name)
        share = max(config.context_tokens, batch // self.count)
        asked = Requested("bf16", AUTO, "off", AUTO, 0, share, 0, optimizer="muon")
        free = int(self.memory_gib * GIB) - RUNTIME_BYTES_ACCELERATOR
        return footprint(config, resolve(asked, architecture, config, None, free).choices, asked, architecture)


@functools.cache
def table() -> tuple[Device, ...]:
    with open(Path(__file__).with_suffix(".tsv"), encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    return tuple(
        Device(name, float(memory), float(watts), float(share), source) for name, memory, watts, share, source in rows
    )


def names() -> list[str]:
    return [device.name for device in table()]


def find(name: str, count: int = 1) -> Device:
    """The device that a person means; ParamsError with the nearest names."""
    wanted = re.sub(r"[\s_-]+", " ", name.lower()).strip()
    fitting = [device for device in table() if wanted in device.name.lower() or device.name.lower() in wanted]
    if fitting:
        best = min(fitting, key=lambda device: abs(len(device.name) - len(wanted)))
        return dataclasses.replace(best, count=count)
    raise ParamsError(f"no device '{name}' in the table", where="--device", fix=suggest(wanted.upper(), names()))


def watts(name: str) -> float:
    """Of the device that is here; a usual card's where it is not in the table."""
    return next((device.watts for device in table() if device.name.lower() in name.lower()), 300.0 + HOST_WATTS)
