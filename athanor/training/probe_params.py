"""The `probe_lr` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param


@dataclass(frozen=True)
class ProbeLrParams:
    """`athanor probe lr`: short runs of the pretrain recipe at several learning rates around pretrain.lr."""

    tokens: int = param(min=1)  # of each run, at most pretrain.tokens; its warmup and cooldown keep their shares
    points: int = param(min=5, max=25, default=5)  # rates to begin with
    ratio: float = param(min=1.1, max=10.0, default=2.0)  # of one rate to the next
    max_points: int = param(
        min=5, max=50, default=9
    )  # with those added where the best rate is the lowest or the highest

    def __post_init__(self) -> None:
        if self.max_points < self.points:
            raise ParamsError(
                f"{self.max_points} is less than points", where="max_points", fix=f"use {self.points} or more"
            )
