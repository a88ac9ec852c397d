"""The `grpo_data` section of params.yaml, and the weights of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param

KIND, VERSION = "grpo-data", 2  # of the folder with the questions
OWN = "rewards/mine.py"


@dataclass(frozen=True)
class GrpoDataParams:
    """Questions for training by reward: exercises that the battery does not hold out, or rows of your own files."""

    seed: int = param(min=0)  # as that of instruct: then what that keeps for validation is kept here, too
    categories: dict[str, int] | None = None  # questions per category of exercises
    files: str | None = None  # a glob of JSON lines with a column prompt, in place of categories
    validation_rows: int = param(min=0, default=200)  # the most to choose by, of the tenth that is not trained on

    def __post_init__(self) -> None:
        if bool(self.categories) == bool(self.files) or min((self.categories or {"": 1}).values()) < 1:
            fix = "name categories with a count ≥ 1 each, or files, and not both"
            raise ParamsError("one kind of questions is needed", where="categories", fix=fix)


def check_weights(weights: Mapping[str, float]) -> None:
    """ParamsError for a negative weight, and unless something besides the form of an answer is paid."""
    paid = {name for name in weights if weights[name]}
    if min(weights.values(), default=0) < 0 or paid <= {"format", "brevity"}:
        fix = "use weights ≥ 0, and one > 0 for correct, exact or a reward of your own"
        raise ParamsError("a right answer is paid nothing", where="rewards", fix=fix)
