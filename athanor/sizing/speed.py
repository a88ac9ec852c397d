"""How fast a device trains: measured on the one that is here, by the step that trains; from a table for others."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from athanor.base.host import load
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.device import prepare
from athanor.model.transformer import Transformer
from athanor.runtime.choices import COMPILED, choose
from athanor.runtime.machine import Machine, anchor, machine
from athanor.sizing import devices, speeds
from athanor.training.cpu_replicas import CpuReplicas
from athanor.training.loop import Hooks
from athanor.training.memory import StepFootprint, available_bytes
from athanor.training.optimizer import OptimizerSettings
from athanor.training.pretrain_params import PretrainParams
from athanor.training.settings import LoopSettings
from athanor.training.setup import Choices, DeviceSpec, setup_device, tuned
from athanor.training.step import Stepper

WARM_STEPS, MIN_STEPS = 2, 4
SAME = 0.1  # from what was timed before: the difference is taken for noise, so that a recipe stays the same
_LONG_RUN = 10_000  # steps: choices as for a training that compiling pays for
DOCUMENT_TOKENS = 600  # of a made-up row's documents, about the default's mean
REFERENCE_LOOP_SECONDS = 0.0328  # of `_loop_seconds` on the machine of sizing/solve.py
CPU_WATTS = 45  # of a laptop or a small server under load
CARD_WATTS = 400  # of a card that is not in the table, with its host


class Measured:
    """The device of the machine settings; a shape is measured when `measure` is called, and estimated until then."""

    budget_seconds = 4.0  # for the steps of a shape

    def __init__(self, settings: Machine, pretrain: PretrainParams) -> None:
        self.settings, self.pretrain = settings, pretrain
        self.cores = settings.threads
        self._before = speeds.load(anchor()) or speeds.Speeds(0.0, 0, {})
        self.machine = _kept(_loop_seconds() / REFERENCE_LOOP_SECONDS, self._before.machine)
        self.load = load()  # before anything is timed
        self._measured: dict[ModelConfig, float] = {}
        self.device = prepare(settings.device, settings.threads)
        self.name = (
            f"{gpu_family.name(self.device)}, {settings.threads} threads"
            if self.on_cpu
            else gpu_family.name(self.device)
        )
        self.accelerator = not self.on_cpu
        card = devices.known(self.name)
        self.watts = card.watts if card else CPU_WATTS if self.on_cpu else CARD_WATTS
        self.fp32 = card.fp32 if card else 1.0

    @property
    def on_cpu(self) -> bool:
        return bool(self.device.type == "cpu")

    def measure(self, config: ModelConfig, batch: int) -> float:
        """Seconds for a token, measured by real steps of this shape; what was measured before, if it is nearly that."""
        if config not in self._measured:
            found = seconds_per_step(config, batch, self) / batch
            self._measured[config] = _kept(found, self._before.seconds.get(config, 0.0))
        return self._measured[config]

    def is_measured(self, config: ModelConfig) -> bool:
        return config in self._measured

    def seconds(self, config: ModelConfig, batch: int) -> float:
        return self._measured.get(config) or speeds.scaled(self._measured, config)

    def fits(self, config: ModelConfig, batch: int) -> bool:
        free = available_bytes(self.device)
        return free is None or devices.ROOM * config.parameter_count() < free

    def footprint(self, config: ModelConfig, batch: int) -> StepFootprint:
        """Of a step as a training that begins now would make it."""
        spec = DeviceSpec(self.settings.device, self.cores, "pretrain", 0)
        return setup_device(config, self.choices(config, batch), spec, batch, self.pretrain.optimizer)[1]

    def choices(self, config: ModelConfig, batch: int) -> Choices:
        """As for a training that begins now, with no `auto` left."""
        with tempfile.TemporaryDirectory() as folder:
            optimizer, precision = self.pretrain.optimizer, self.pretrain.precision
            return choose([Path(folder)], config, precision, batch, _LONG_RUN, optimizer=optimizer).choices

    def keep(self) -> None:
        """Store what was measured, for `athanor plan` on this machine."""
        speeds.save(anchor(), speeds.Speeds(self.machine, self.cores, self._measured, self.fp32))


def _kept(found: float, before: float) -> float:
    return before if abs(found - before) <= SAME * before else found


def seconds_per_step(config: ModelConfig, batch: int, of: Measured) -> float:
    """Time an optimiser step as the stage would make it, on rows of several made-up documents.

    Other programs only add time, so a quarter of the steps is faster than the result.
    """
    with _stepper(config, batch, of) as step:
        for _ in range(WARM_STEPS):
            step()
        times: list[float] = []
        while len(times) < MIN_STEPS or sum(times) < of.budget_seconds:
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
    return statistics.quantiles(times, n=4)[0]


@contextlib.contextmanager
def _stepper(config: ModelConfig, batch: int, of: Measured) -> Iterator[Callable[[], object]]:
    """A function that makes one optimiser step, on the device and with the choices of a training that begins now."""
    local, pretrain = of.settings, of.pretrain
    choices = of.choices(config, batch)
    spec = DeviceSpec(local.device, local.threads, "pretrain", 0)
    device, footprint = setup_device(config, choices, spec, batch, pretrain.optimizer)
    settings = LoopSettings.of(
        dataclasses.replace(pretrain, batch_tokens=batch, tokens=batch, warmup_tokens=0),
        local,
        total_tokens=batch,
        precision=choices.precision,
        document_mask=pretrain.document_mask,
        validation_every_tokens=0,
        sample_every_tokens=0,
        micro_batch_rows=footprint.micro_batch_rows,
    )
    model = Transformer.fresh(config, 0).to(device)
    hooks = Hooks(validate=lambda model: {})
    rows = _rows(config, batch)
    with (
        tuned(model, choices, footprint, settings, hooks, anchor() / COMPILED),
        CpuReplicas(model, local.threads) as replicas,
    ):
        stepper = Stepper(replicas, OptimizerSettings.of(pretrain), settings)
        yield lambda: float(stepper.step(rows, 1e-4)[0][0])  # the number is asked for, so that the device is done


def _rows(config: ModelConfig, batch: int) -> SimpleNamespace:
    T = config.context_tokens
    ids_BS = (np.arange(batch // T * (T + 1), dtype=np.int64) * 7919 % config.vocab_size).reshape(-1, T + 1)
    document_BS = (np.arange(ids_BS.size, dtype=np.int64) // DOCUMENT_TOKENS).reshape(ids_BS.shape)
    return SimpleNamespace(tokens_BS=ids_BS, document_BS=document_BS)


def _loop_seconds() -> float:
    """The best of a few runs of what stages on data do: Python's own loop, text, and checksums; on one core."""
    text = "The quick brown fox jumps over the lazy dog; " * 2000
    best = math.inf
    for _ in range(10):
        started = time.perf_counter()
        counts: dict[str, int] = {}
        for word in text.split():
            counts[word.lower()] = counts.get(word.lower(), 0) + zlib.crc32(word.encode()) % 7
        for _ in range(20):
            np.sort(np.frombuffer(text.encode(), np.uint8))
        best = min(best, time.perf_counter() - started)
    return best


def measure_params(built: Mapping[str, Any]) -> tuple[Measured, ModelConfig]:
    """Time steps of the model that a params file asks for, for plans on this machine."""
    model, speed = built["model"], Measured(machine(), built["pretrain"])
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    speed.measure(config, built["pretrain"].batch_tokens)
    speed.keep()
    return speed, config
