"""The one sampler: how the next id is chosen, for battery, chat and server.

No banned n-grams, and no repetition penalty unless asked for: answers have to
repeat digits, names and punctuation, and such rules once hid what a model
knew. The penalty is there to show that: it is one of the battery's conditions.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from athanor.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen: penalty, temperature, then top-k, top-p and min-p on what it leaves.

    temperature 0 is greedy and ignores the filters. top_k 0, top_p 1 and min_p 0
    switch a filter off. top-p keeps the id that crosses p; min-p drops ids
    less likely than min_p times the likeliest. A repetition penalty above 1
    divides positive logits of ids generated before in this answer and
    multiplies negative ones (Keskar et al. 2019); ids of the prompt and exempt
    ids are left alone, and 1 switches it off. Equal seeds give equal text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        good = self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1
        if not good or not self.repetition_penalty > 0:
            raise InputError(
                f"impossible sampling settings {asdict(self)}",
                fix="use temperature ≥ 0, top_k ≥ 0, 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1 and repetition_penalty > 0",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sampling:
        """From a mapping with more keys than needed, such as a generation_config.json."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


GREEDY = Sampling()


def penalise(logits_V: Tensor, said: Collection[int], penalty: float) -> None:
    """Make the ids `said` less likely, in place."""
    ids = torch.tensor(sorted(said), device=logits_V.device)
    found = logits_V[ids]
    logits_V[ids] = torch.where(found > 0, found / penalty, found * penalty)


def pick(logits_BV: Tensor, sampling: Sequence[Sampling], draws: Sequence[random.Random]) -> list[int]:
    """The next id of every row; a row that samples takes one number from its own generator."""
    tokens = logits_BV.argmax(-1).tolist()
    for row, (setting, draw) in enumerate(zip(sampling, draws, strict=True)):
        if setting.temperature > 0:
            tokens[row] = _sample(logits_BV[row], setting, draw.random())
    return tokens


def filtered(logits_V: Tensor, setting: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature and filters, likeliest first, with their ids (equal ones by id)."""
    # fp64 on the CPU: the same draw gives the same id on every device.
    scaled_V = logits_V.double().cpu() / setting.temperature
    probs_V, ids_V = torch.sort(scaled_V.softmax(-1), descending=True, stable=True)
    if setting.top_k:
        probs_V, ids_V = probs_V[: setting.top_k], ids_V[: setting.top_k]
    if setting.top_p < 1:
        probs_V = probs_V / probs_V.sum()
        count = int((probs_V.cumsum(0) - probs_V < setting.top_p).sum())
        probs_V, ids_V = probs_V[:count], ids_V[:count]
    count = int((probs_V >= setting.min_p * probs_V[0]).sum())
    probs_V, ids_V = probs_V[:count], ids_V[:count]
    return probs_V / probs_V.sum(), ids_V


def _sample(logits_V: Tensor, setting: Sampling, draw: float) -> int:
    probs_V, ids_V = filtered(logits_V, setting)
    place = int(torch.searchsorted(probs_V.cumsum(0), torch.tensor(draw, dtype=torch.float64), right=True))
    return int(ids_V[min(place, len(ids_V) - 1)])
