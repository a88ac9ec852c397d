"""What a training run gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from athanor.model.config import ModelConfig
from athanor.model.flops import training_flops


@dataclass
class TrainResult:
    """`curve`: at most 2000 rows of means; `validations`: {step, tokens, scores} each, the last one at the end.

    `seconds` and `trained_tokens` are of this process only, without
    validation, samples and checkpoints.
    """

    steps: int
    tokens: int
    skipped_steps: int
    supervised_tokens: int
    curve: list[dict[str, float | None]]
    validations: list[dict[str, Any]]
    seconds: float
    trained_tokens: int
    skipped_ranges: list[dict[str, Any]] = field(default_factory=list)  # see ledger.py

    def metrics(self, config: ModelConfig) -> dict[str, Any]:
        """What the run was and ended with; nothing that differs between equal runs."""
        return {
            "parameters": config.parameter_count(),
            "steps": self.steps,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "flops": training_flops(config, config.context_tokens) * self.tokens,
            "skipped_steps": self.skipped_steps,
            "skipped_ranges": self.skipped_ranges,
            "train_loss": self.curve[-1]["loss"],
            "validation": self.validations[-1]["scores"],
        }

    def timings(self, config: ModelConfig) -> dict[str, float]:
        """Speed of this process; empty when there was nothing left to train."""
        if not self.seconds:
            return {}
        speed = self.trained_tokens / self.seconds
        gflops = speed * training_flops(config, config.context_tokens) / 1e9
        return {
            "train_seconds": self.seconds,
            "trained_tokens": self.trained_tokens,
            "tokens_per_second": speed,
            "model_gflops": gflops,
        }

    def validation_rows(self, values: Callable[[dict[str, Any]], dict[str, float]]) -> list[dict[str, float]]:
        """A row for each validation: its tokens and what `values` takes from its scores."""
        return [{"tokens": row["tokens"], **values(row["scores"])} for row in self.validations]
