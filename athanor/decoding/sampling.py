"""The one sampler: how the next id is chosen, for battery, chat and server.

No banned n-grams, and no repetition penalty unless asked for: answers have to
repeat digits, names and punctuation, and such rules once hid what a model
knew. The penalty is there to show that: it is one of the battery's conditions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from athanor.base.errors import InputError

TOP_IDS = 64
MIN_TEMPERATURE, MAX_PENALTY = 1e-6, 100.0


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
        temperature, penalty = self.temperature, self.repetition_penalty
        filters_valid = self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1
        # Beyond these a logit overflows, and nothing is left to choose from.
        if not (
            filters_valid
            and (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf)
            and 1 / MAX_PENALTY <= penalty <= MAX_PENALTY
        ):
            raise InputError(
                f"impossible sampling settings {asdict(self)}",
                fix=f"use temperature 0 or ≥ {MIN_TEMPERATURE:g}, top_k ≥ 0, 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1 and "
                f"repetition_penalty from {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sampling:
        """From a mapping with more keys than needed, such as a generation_config.json."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


GREEDY = Sampling()


def penalise(logits_V: Tensor, generated: Collection[int], penalty: float) -> None:
    """Make the ids `generated` less likely, in place."""
    ids = torch.tensor(sorted(generated), device=logits_V.device)
    chosen_logits = logits_V[ids]
    logits_V[ids] = torch.where(chosen_logits > 0, chosen_logits / penalty, chosen_logits * penalty)


def pick(logits_BV: Tensor, sampling: Sequence[Sampling], draws: Sequence[random.Random]) -> list[int]:
    """The next id of every row; a row that samples takes one number from its own generator."""
    tokens = logits_BV.argmax(-1).tolist()
    sampled_rows = [row for row, setting in enumerate(sampling) if setting.temperature > 0]
    if not sampled_rows:
        return tokens
    sampled_BV = logits_BV if len(sampled_rows) == len(tokens) else logits_BV[sampled_rows]
    # Sorting a whole vocabulary took twice as long as the model; nearly always the likeliest ids decide.
    top = sampled_BV.topk(min(TOP_IDS + 1, sampled_BV.shape[-1]))
    device = "cpu" if logits_BV.device.type == "mps" else logits_BV.device  # the former has no fp64
    temperature_B1 = torch.tensor(
        [[sampling[row].temperature] for row in sampled_rows], dtype=torch.float64, device=device
    )
    log_norm_B1 = sampled_BV.to(device).to(torch.float64, copy=True).div_(temperature_B1).logsumexp(-1, keepdim=True)
    probs_BK = top.values.to(device).to(torch.float64, copy=True).div_(temperature_B1).sub_(log_norm_B1).exp_()
    for row, probs, ids in zip(sampled_rows, probs_BK.tolist(), top.indices.tolist(), strict=True):
        draw = draws[row].random()
        token = _among_likeliest(probs, ids, logits_BV.shape[-1], sampling[row], draw)
        tokens[row] = _sample(logits_BV[row], sampling[row], draw) if token is None else token
    return tokens


def _among_likeliest(probs: list[float], ids: list[int], size: int, setting: Sampling, draw: float) -> int | None:
    """The id that `_sample` would choose, from the likeliest ids alone; None where the others matter.

    `probs` descend. The last one only tells where the rest begins, unless there is no rest.
    """
    complete = len(ids) == size
    known_count = size if complete else len(ids) - 1
    if not complete and probs[known_count - 1] == probs[known_count]:
        return None  # which of two equal ones came in was chance
    ranked = sorted((-p, i) for p, i in zip(probs[:known_count], ids[:known_count], strict=True))
    if setting.top_k:
        if setting.top_k > known_count and not complete:
            return None
        ranked, complete = ranked[: setting.top_k], True
    if setting.top_p < 1:
        target_mass, mass = setting.top_p * _mass(ranked, complete), 0.0
        for index, (p, _) in enumerate(ranked):
            mass -= p
            if mass >= target_mass:
                ranked, complete = ranked[: index + 1], True
                break
    min_prob = setting.min_p * -ranked[0][0]
    if -ranked[-1][0] < min_prob:
        ranked, complete = [pair for pair in ranked if -pair[0] >= min_prob], True
    if not complete and (setting.top_p < 1 or setting.min_p > 0):
        return None  # a filter reaches beyond the likeliest ids
    target_mass, mass = draw * _mass(ranked, complete), 0.0
    for p, token in ranked:
        mass -= p
        if mass > target_mass:
            return token
    return ranked[-1][1] if complete else None


def _mass(ranked: list[tuple[float, int]], complete: bool) -> float:
    """Probability mass of the ids that are left; 1 while it is not known which ids the filters cut off."""
    return -math.fsum(p for p, _ in ranked) if complete else 1.0


def filtered(logits_V: Tensor, setting: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature and filters, likeliest first, with their ids (equal ones by id)."""
    # fp64: the same draw gives the same id on every device.
    scaled_V = logits_V.cpu().double() / setting.temperature  # in this order: not every device has fp64
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
    index = int(torch.searchsorted(probs_V.cumsum(0), torch.tensor(draw, dtype=torch.float64), right=True))
    return int(ids_V[min(index, len(ids_V) - 1)])
