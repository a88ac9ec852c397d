"""The `grpo_data` section of params.yaml, and the weights of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from athanor.base.errors import ParamsError, suggest
from athanor.base.strict import param

KIND, VERSION = "grpo-data", 1  # of the folder with the questions
REWARDS = ("correct", "format", "brevity")


@dataclass(frozen=True)
class GrpoDataParams:
    """Questions for training by reward, drawn from those that the battery does not hold out."""

    seed: int = param(
        min=0, max=2**32 - 1
    )  # as that of instruct: then what that keeps for validation is kept here, too
    categories: dict[str, int]  # training questions per category of exercises
    validation_per_category: int = param(
        min=0, max=100_000
    )  # questions to choose by, of other keys than those trained on

    def __post_init__(self) -> None:
        if not self.categories:
            raise ParamsError("no category is trained", where="categories", fix="copy them from presets/default.yaml")
        for name, count in self.categories.items():
            if count < 1:
                raise ParamsError(f"{count} is out of range", where=f"categories.{name}", fix="use a value ≥ 1")


def check_weights(weights: Mapping[str, float]) -> None:
    """ParamsError for a reward that does not exist, and unless a right answer is paid more than any wrong one."""
    for name, weight in weights.items():
        if name not in REWARDS:
            raise ParamsError("unknown reward", where=f"rewards.{name}", fix=suggest(name, REWARDS))
        if weight < 0:
            raise ParamsError(f"{weight} is out of range", where=f"rewards.{name}", fix="use a value ≥ 0")
    if not weights.get("correct"):
        raise ParamsError("a right answer is paid nothing", where="rewards.correct", fix="use a value > 0")
