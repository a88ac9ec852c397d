"""The `lora` section of params.yaml: how a foreign base is adapted. Only read where sft.base names one."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.strict import param


@dataclass(frozen=True)
class LoraParams:
    """`W x + (alpha / rank) · B A dropout(x)`; the recipe of the run itself stands in `sft`."""

    rank: int = param(min=1, max=1024)  # of B A, usually 8 to 32
    alpha: float = param(min=0.01, max=65536)  # usually twice the rank
    dropout: float = param(min=0.0, max=0.9)  # of what goes into A
    targets: str = param(choices=("all", "attention"))  # all: every matrix of the blocks
