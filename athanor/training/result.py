"""The result of a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from athanor.model.config import ModelConfig
from athanor.model.flops import run_flops, training_flops
from athanor.training.meter import STEP_PARTS


@dataclass
class TrainResult:
    """`curve`: at most 200 rows of means; `validations`: {step, tokens, scores} each, the last one at the end.

    `pairs`: pairs of query and key that the documents of all steps allowed.
    `trained_tokens` and `seconds` (by part, see `Meter.summary`) are of this
    process only.
    """

    steps: int
    tokens: int
    skipped_steps: int
    supervised_tokens: int
    curve: list[dict[str, float | None]]
    validations: list[dict[str, Any]]
    trained_tokens: int
    pairs: int
    seconds: dict[str, float]
    chosen_step: int  # of the weights; the last one where nothing was selected
    skipped_ranges: list[dict[str, Any]] = field(default_factory=list)  # see skipped_ranges.py
    codes: list[tuple[str, int]] = field(default_factory=list)  # digests of the code, each with the step it began at

    def flops(self, config: ModelConfig) -> float:
        """Operations of the whole run, counted for the documents that were really in its rows."""
        return float(run_flops(config, self.tokens, self.pairs, self.supervised_tokens))

    def metrics(self, config: ModelConfig) -> dict[str, Any]:
        """The run's size and its final scores, without anything that differs between equal runs."""
        return {
            "parameters": config.parameter_count(),
            "steps": self.steps,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "flops": self.flops(config),
            "skipped_steps": self.skipped_steps,
            "skipped_ranges": self.skipped_ranges,
            "train_loss": self.curve[-1]["loss"],
            "validation": self.chosen["scores"],
        }

    @property
    def trained_by(self) -> dict[str, Any]:
        """For the manifest: which code trained which steps, where it was more than one."""
        ends = [begin for _, begin in self.codes[1:]] + [self.steps]
        rows = [{"code": c, "after_step": a, "to_step": b} for (c, a), b in zip(self.codes, ends, strict=True)]
        return {"trained_by": rows} if len(rows) > 1 else {}

    @property
    def chosen(self) -> dict[str, Any]:
        """The validation of the weights that were kept."""
        return next(row for row in self.validations if row["step"] == self.chosen_step)

    def timings(self, config: ModelConfig) -> dict[str, Any]:
        """Speed of this process, without evaluation, samples and checkpoints; empty when nothing was left to train."""
        train_seconds = sum(self.seconds.get(part, 0.0) for part in STEP_PARTS)
        if not train_seconds:
            return {}
        speed = self.trained_tokens / train_seconds
        return {
            "train_seconds": train_seconds,
            "trained_tokens": self.trained_tokens,
            "tokens_per_second": speed,
            "model_gflops": speed * self.flops(config) / self.tokens / 1e9,
            # What `athanor plan` counts for as many tokens in whole rows; it cannot know the documents.
            "planned_flops": self.tokens * training_flops(config, config.context_tokens),
            "seconds": self.seconds,
        }

    def validation_rows(self, values: Callable[[dict[str, Any]], dict[str, float]]) -> list[dict[str, float]]:
        """A row for each validation: its tokens and what `values` takes from its scores."""
        return [{"tokens": row["tokens"], **values(row["scores"])} for row in self.validations]
