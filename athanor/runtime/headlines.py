"""The few numbers that a run is judged by: DVC's only metrics, and those of the parent run in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from athanor.runtime.facts import flatten

# Stage to short name to dotted path in the stage's metrics. The names are the columns of `dvc exp show`, hence so short;
# none may be that of a dependency (`battery`), which has a column, too: DVC would mix the two up.
HEADLINES: dict[str, dict[str, str]] = {
    "pretrain": {"bpb": "validation.all.bpb", "parameters": "parameters"},
    "sft": {"loss": "validation.loss"},
    "eval": {
        "base_bpb": "bpb.all.base.bpb",
        "sft_bpb": "bpb.all.sft.bpb",
        "accuracy": "battery.sft.all.score",
    },
}


def headlines(stage: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a stage, less the ones that this run did not measure; none for a stage that has no headlines."""
    measured = dict(flatten(metrics))
    return {name: measured[path] for name, path in HEADLINES.get(stage, {}).items() if path in measured}
