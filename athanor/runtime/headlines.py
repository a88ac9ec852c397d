"""The few numbers that a run is judged by: DVC's only metrics, and those of the parent run in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from athanor.runtime.facts import flatten

# Stage to short name to dotted path in the stage's metrics.
HEADLINES: dict[str, dict[str, str]] = {
    "pretrain": {"bits_per_byte": "validation.all.bpb", "parameters": "parameters"},
    "sft": {"loss": "validation.loss"},
    "eval": {
        "base_bits_per_byte": "bpb.all.base.bpb",
        "sft_bits_per_byte": "bpb.all.sft.bpb",
        "battery": "battery.sft.all.score",
    },
}


def headlines(stage: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a stage, less the ones that this run did not measure; none for a stage that has no headlines."""
    measured = dict(flatten(metrics))
    return {name: measured[path] for name, path in HEADLINES.get(stage, {}).items() if path in measured}
