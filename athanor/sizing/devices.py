"""Devices that are not at hand: memory, power, and the share of their sheet's rate that training reached for others.

The table is devices.tsv beside this file: `counted` says how the figure that an efficiency comes from was counted, `source`
whose it is, `sheet` where memory, bandwidth and power stand. Efficiencies are of causal operations, as `training_flops` has
them. Rates are those of hardware/peaks.tsv. What a card reaches depends on the width of the model, as small products do not
fill it: share = efficiency · width / (width + HALF). The figures are of compiled and fused code; what ours moves through
memory beyond that takes its time by the bandwidth.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from pathlib import Path

import torch

from athanor.base.errors import ParamsError, suggest
from athanor.hardware.peaks import Peak
from athanor.hardware.peaks import find as peak_of
from athanor.hardware.policy import AUTO, Requested, footprint, resolve
from athanor.model.config import ModelConfig
from athanor.model.flops import training_flops
from athanor.model.gpu_family import Architecture
from athanor.training.activations import ACCELERATOR
from athanor.training.memory import RUNTIME_BYTES_ACCELERATOR, StepFootprint

HALF = 256  # width at which half of a card's share is reached
# Bytes that a token's training moves beyond fused code, estimated for Plasma 1.1 (bf16, width 1280, MLP 3584, T 1024) to within
# 20 % and not measured: of a layer, per unit of width and MLP (760 kB eager, 120 kB fused; 150 kB with separate products for
# query, key, value, gate and up); of a logit (85 by the eager loss, 6 fused); of a layer's scores, per width and position (a
# mask as a dense bias).
BYTES = {"eager": (132, 79, 0.084), "compiled": (6, 0, 0)}
BANDWIDTH = 0.8  # of the sheet's, that elementwise kernels reach
FP32 = 0.8  # efficiency of fp32 products, in which eval measures
SEVERAL = 0.92  # of the speed, for each device when there are more than one
HOST_WATTS = 100
ROOM = 22  # bytes for each parameter that a device must have free, before activations are counted
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """A row of the table, as a `Speed` of the solver."""

    name: str
    memory_gib: float
    gb_per_second: float
    card_watts: float
    efficiency: float
    code: str
    counted: str
    source: str
    sheet: str
    count: int = 1
    machine: float = 0.6
    cores: int = 8
    device: torch.device = ACCELERATOR

    @property
    def watts(self) -> float:
        return self.count * self.card_watts + HOST_WATTS

    @property
    def peak(self) -> Peak:
        peak = peak_of(self.name)
        assert peak is not None  # a test holds that each row has one
        return peak

    @property
    def tflops(self) -> float:
        return self.peak.bf16 or self.peak.fp16 or self.peak.fp32

    @property
    def fp32(self) -> float:
        """How many times slower than in training a product is in eval: on one device, in fp32 without units for bf16."""
        return (
            self.count * 1.0
            if self.peak.bf16
            else self.count * max(1.0, self.efficiency * self.tflops / (FP32 * self.peak.fp32))
        )

    def seconds(self, config: ModelConfig, batch: int) -> float:
        share = self.efficiency * config.dim / (config.dim + HALF)
        products = training_flops(config, config.context_tokens) / (share * self.tflops * 1e12)
        layer, logit, score = BYTES[self.code]
        layer_bytes = layer * (config.dim + config.ffn_dim) + score * config.dim * config.context_tokens
        moved = config.layers * layer_bytes + logit * config.vocab_size
        several = self.count if self.count == 1 else self.count * SEVERAL
        return (products + moved / (BANDWIDTH * self.gb_per_second * 1e9)) / several

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
        Device(name, float(memory), float(rate), float(watts), float(share), *words)
        for name, memory, rate, watts, share, *words in rows
    )


def names() -> list[str]:
    return [device.name for device in table()]


def known(name: str) -> Device | None:
    """The device that torch or a person calls so: of the same row of peaks, or the only one with these words."""
    wanted = re.sub(r"[\s_-]+", " ", name).strip()
    peak, words = peak_of(wanted), set(wanted.lower().split())
    fitting = [
        device
        for device in table()
        if (device.peak is peak if peak else words and words <= set(device.name.lower().split()))
    ]
    return fitting[0] if len(fitting) == 1 else None


def find(name: str, count: int = 1) -> Device:
    """The device that a person means; ParamsError with the nearest names."""
    if device := known(name):
        return dataclasses.replace(device, count=count)
    raise ParamsError(f"no device '{name}' in the table", where="--device", fix=suggest(name.upper(), names()))
