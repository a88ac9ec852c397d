"""From hours, tokens, parameters or disk to one recipe: shape, length, batch, rates, and what they will take.

Every rung of the ladder gets the longest training that the wish leaves room
for; the one whose forecast of bits per byte is lowest is taken. What a device
does in a second comes from outside (`Speed`), measured or from a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from athanor.base.errors import ParamsError
from athanor.model.config import ModelConfig
from athanor.sizing.data import Data
from athanor.sizing.laws import TOKENS_PER_WEIGHT, batch_tokens, learning_rate, matrix_weights
from athanor.sizing.shapes import CONTEXTS, LADDER, VOCABULARIES, Shape
from athanor.sizing.speeds import DATA_SECONDS, DATA_SECONDS_PER_MB, SFT_COST, START_SECONDS, with_model
from athanor.training.memory import StepFootprint

SFT_SHARE = (
    0.6  # of the time for training, at most: the default's exercises need three epochs, and a tenth of one is heard
)
SFT_SHARE_OF_HUB = 0.15  # of conversations by people, which teach a tone and not facts
SFT_EPOCHS = 3.0
MIN_EPOCHS, MIN_STEPS = 1.0, 200  # less is no training
STATE_BYTES = 12  # of a weight in a checkpoint, of which three are kept
DISK_COPIES = 4  # of the text: raw, clean, in tokens, and DVC's cache of what is not linked


@dataclass(frozen=True)
class Wish:
    """What was asked for; None leaves it open. `parameters` and `disk_bytes` are upper bounds for the recipe."""

    hours: float | None = None
    tokens: int | None = None
    parameters: int | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.hours is None and self.tokens is None and self.parameters is None:
            raise ParamsError(
                "say --hours, --tokens or --params", fix="for a quarter of an hour: athanor recipe --hours 0.25"
            )


class Speed(Protocol):
    """A device: `seconds` for a token of training; `machine` is how slow the rest is, 1 as the reference.

    fp32: how many times slower than in training a product is in fp32, in which eval reads.
    """

    name: str
    machine: float
    cores: int
    watts: float
    device: torch.device

    @property
    def fp32(self) -> float: ...

    def seconds(self, config: ModelConfig, batch: int) -> float: ...

    def fits(self, config: ModelConfig, batch: int) -> bool: ...

    def footprint(self, config: ModelConfig, batch: int) -> StepFootprint: ...


@dataclass(frozen=True)
class Recipe:
    """A training, and its forecast; `seconds` by stage, the stages before the training as `data`."""

    shape: Shape
    config: ModelConfig
    tokens: int
    batch_tokens: int
    lr: float
    sft_epochs: float
    sft_batch_tokens: int
    seconds: dict[str, float]
    bits_per_byte: float
    disk_bytes: int

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def choose(wish: Wish, data: Data, speed: Speed) -> Recipe:
    """The best recipe within the wish; ParamsError when even the smallest shape is too much."""
    found = [recipe for shape in LADDER if (recipe := _longest(shape, wish, data, speed))]
    # The smallest remains for a text that is too small for any.
    found = [each for each in found if matrix_weights(each.config) <= data.most_weights] or found[:1]
    if not found:
        raise ParamsError(
            "no model of the ladder can be trained within that",
            fix="more hours, or the preset micro (half a minute on two cores): athanor preset use micro",
        )
    if wish.hours is not None:
        return min(found, key=lambda recipe: recipe.bits_per_byte)
    if wish.parameters is not None:
        return max(found, key=lambda recipe: recipe.config.parameter_count())
    wanted = math.log((wish.tokens or 0) / TOKENS_PER_WEIGHT)
    return min(found, key=lambda recipe: abs(math.log(matrix_weights(recipe.config)) - wanted))


def _longest(shape: Shape, wish: Wish, data: Data, speed: Speed) -> Recipe | None:
    """The longest training of a shape that the wish allows; None where it is none."""
    config = shape.config(data.vocab_size or shape.by_weights(VOCABULARIES), shape.by_weights(CONTEXTS))
    weights = matrix_weights(config)
    if wish.parameters is not None and config.parameter_count() > wish.parameters:
        return None
    bounds = [float(wish.tokens) if wish.tokens else math.inf, data.law.most_tokens(weights, data.unique_tokens)]
    if wish.disk_bytes is not None:
        room = wish.disk_bytes - 3 * STATE_BYTES * config.parameter_count()
        bounds.append(room / (DISK_COPIES * data.bytes_per_token))
    if wish.hours is None and not wish.tokens:
        bounds.append(TOKENS_PER_WEIGHT * weights)
    guess = min(*bounds, TOKENS_PER_WEIGHT * weights)
    epochs, rest = SFT_EPOCHS, math.inf
    for _ in range(4):  # the batch depends on the length, the time on the batch
        batch = batch_tokens(max(guess, 1.0), config.context_tokens)
        if not speed.fits(config, batch):
            return None
        each = speed.seconds(config, batch)
        if wish.hours is not None:
            fixed = sum(_other_seconds(each, guess, data, speed).values()) + 2 * START_SECONDS * speed.machine
            rest = 3600 * wish.hours - fixed
            share = SFT_SHARE_OF_HUB if data.cuttable else SFT_SHARE
            epochs = min(SFT_EPOCHS, share * rest / (each * SFT_COST * max(data.sft_tokens, 1)))
            if epochs <= 0 or epochs < MIN_EPOCHS and not data.cuttable:
                return None
            rest = rest / each - epochs * SFT_COST * data.sft_tokens
        guess = min(*bounds, rest)
        if guess < MIN_STEPS * config.context_tokens:
            return None
    tokens = int(guess) // batch * batch
    sft_batch = min(batch, batch_tokens(epochs * data.sft_tokens, config.context_tokens))
    if tokens < MIN_STEPS * batch:
        return None
    epochs = math.floor(epochs * 20) / 20 if epochs > 1 else epochs
    seconds = {
        **_other_seconds(each, tokens, data, speed),
        "pretrain": START_SECONDS * speed.machine + each * tokens,
        "sft": START_SECONDS * speed.machine + each * SFT_COST * epochs * data.sft_tokens,
    }
    order = ("data", "pretrain", "sft", "eval", "export")
    return Recipe(
        shape, config, tokens, batch, learning_rate(weights, tokens), epochs, sft_batch,
        {name: seconds[name] for name in order},
        data.law.bits_per_byte(weights, tokens, data.unique_tokens),
        int(3 * STATE_BYTES * config.parameter_count() + DISK_COPIES * data.bytes_per_token * _read(tokens, data)),
    )  # fmt: skip


def _read(tokens: float, data: Data) -> float:
    return min(tokens, data.unique_tokens)


def _other_seconds(each: float, tokens: float, data: Data, speed: Speed) -> dict[str, float]:
    """Seconds of the stages that train nothing; those on data run on all cores."""
    megabytes = _read(tokens, data) * data.bytes_per_token / 1e6
    return {
        "data": speed.machine * (DATA_SECONDS + DATA_SECONDS_PER_MB * megabytes * 2 / max(2, speed.cores)),
        "eval": with_model("eval", speed.machine, each, data.eval_tokens * speed.fp32),
        "export": with_model("export", speed.machine, each),
    }
