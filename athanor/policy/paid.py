"""What training pays for an answer: small functions of a rollout, each from 0 to 1, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from athanor.evaluation.scoring import score_many
from athanor.rewards.form import MAX_LENGTH_FACTOR, has_form, longest
from athanor.text.conversations import Item


@dataclass(frozen=True)
class Rollout:
    """An answer that the model gave to an item."""

    item: Item
    text: str
    ended: bool  # the model ended it with its stop token
    fake_turn: bool  # it ended by opening another speaker's turn


class Reward(NamedTuple):
    """The parts of what a rollout is paid, and their weighted sum."""

    correct: float
    format: float
    brevity: float
    total: float


def total(rollouts: Sequence[Rollout], weights: Mapping[str, float], workers: int = 2) -> list[Reward]:
    """The rewards of rollouts, in their order. A part that has no weight counts nothing in the sum."""
    formats = [format_reward(rollout) for rollout in rollouts]
    corrects = correct_rewards(rollouts, formats, workers)
    rewards = []
    for rollout, correct, form in zip(rollouts, corrects, formats, strict=True):
        parts = {"correct": correct, "format": form, "brevity": brevity_reward(rollout, correct)}
        rewards.append(Reward(**parts, total=sum(weights.get(name, 0.0) * value for name, value in parts.items())))
    return rewards


def format_reward(rollout: Rollout) -> float:
    """1 for an answer that the model ended itself and that has the form of the accepted ones, right or wrong."""
    return float(rollout.ended and not rollout.fake_turn and has_form(rollout.item, rollout.text))


def correct_rewards(rollouts: Sequence[Rollout], formats: Sequence[float], workers: int = 2) -> list[float]:
    """1 for an answer that has its form and that the item's own checker takes. Only those with a form are checked."""
    chosen = [rollout for rollout, form in zip(rollouts, formats, strict=True) if form]
    right = iter(score_many([rollout.item for rollout in chosen], [rollout.text for rollout in chosen], workers))
    return [float(bool(form) and next(right)) for form in formats]


def brevity_reward(rollout: Rollout, correct: float) -> float:
    """1 for a right answer as long as the longest accepted one, falling to 0 where its form ends; 0 for a wrong one."""
    limit = longest(rollout.item)
    excess = max(0, len(rollout.text) - limit) / ((MAX_LENGTH_FACTOR - 1) * limit)
    return correct * max(0.0, 1.0 - excess)
