"""Synthetic runs of GRPO and DPO: answers and pairs are drawn, so that noise is what it is in so small a batch."""

from __future__ import annotations

import functools

import numpy as np

from tests.monitor.curves import Rows, healthy

QUESTIONS, ANSWERS, PAIRS = 12, 8, 16  # of a step, of a question, of a step


@functools.cache  # nothing changes the rows
def policy_run(phase: str, steps: int, seed: int = 0) -> Rows:
    """A healthy run: what every training logs, and the columns of this phase."""
    columns = (_grpo if phase == "grpo" else _dpo)(steps, np.random.default_rng(seed))
    rows = healthy(steps, seed=seed, phase="sft")
    return [{**row, **_at(columns, int(row["step"]) - 1)} if "loss" in row else row for row in rows]


def _at(columns: dict[str, np.ndarray], index: int) -> dict[str, float]:
    return {name: float(values[index]) for name, values in columns.items() if not np.isnan(values[index])}


def _noise(draw: np.random.Generator, scale: float, steps: int) -> np.ndarray:
    return np.exp(scale * draw.normal(size=steps))


def _grpo(steps: int, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Some runs learn much, some nothing; a round of answers serves one, two or four steps."""
    t, per_round = np.arange(steps) / steps, int(draw.choice([1, 2, 4]))
    skill = draw.uniform(-2.0, 0.5) + draw.choice([0.0, 1.0, 3.0]) * (1 - np.exp(-3 * t))
    chance = 1 / (1 + np.exp(-skill[:, None] - 2.0 * draw.normal(size=(steps, QUESTIONS))))
    right = draw.random((steps, QUESTIONS, ANSWERS)) < chance[:, :, None]
    formed = draw.random((steps, QUESTIONS, ANSWERS)) < np.linspace(draw.uniform(0.6, 0.98), 0.98, steps)[:, None, None]
    reward = 1.0 * (right & formed) + 0.1 * formed
    spread = reward.std(axis=2, ddof=1)
    first = np.arange(steps) % per_round == 0
    entropy = draw.uniform(0.05, 0.5) * np.exp(-draw.uniform(0.0, 1.2) * t)
    columns = {
        "policy.reward": reward.mean(axis=(1, 2)),
        "policy.reward_std": reward.std(axis=(1, 2), ddof=1),
        "policy.tied_groups": (spread < 1e-9).mean(axis=1),
        "policy.answer_tokens": draw.uniform(8, 60) * (1 + draw.uniform(-0.3, 0.3) * t) * _noise(draw, 0.08, steps),
        "policy.cut_answers": draw.binomial(QUESTIONS * ANSWERS, draw.uniform(0, 0.15), steps) / (QUESTIONS * ANSWERS),
        "policy.format_share": formed.mean(axis=(1, 2)),
    }
    # What is known of the answers is the same at each step of their round.
    columns = {name: values[np.arange(steps) // per_round * per_round] for name, values in columns.items()}
    tied = columns["policy.tied_groups"] == 1
    return columns | {
        "loss": np.where(tied, 0.0, 0.02 * draw.normal(size=steps)),
        "grad_norm": np.where(tied, 0.0, draw.uniform(0.05, 0.8) * _noise(draw, 0.5, steps)),
        "policy.kl": draw.uniform(0.01, 0.25) * t * _noise(draw, 0.3, steps),
        "policy.sampler_difference": 0.02 * _noise(draw, 0.5, steps),
        "policy.sampler_ratio_min": draw.uniform(0.2, 1.0, steps),
        "policy.entropy": entropy * _noise(draw, 0.12, steps),
        "policy.clip_share": np.where(first, 0.0, 0.02 * _noise(draw, 0.5, steps)),
    }


def _dpo(steps: int, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Margins rise from 0, in some runs until the pairs are known by heart."""
    rise = 1 - np.exp(-4 * np.arange(steps) / steps)
    margin = draw.uniform(0.6, 5.0) * rise[:, None] * draw.normal(1.0, 0.8, (steps, PAIRS))
    weight = 1 / (1 + np.exp(margin))
    rejected = -draw.uniform(0.25, 3.0) * rise * _noise(draw, 0.2, steps)
    return {
        "loss": np.log1p(np.exp(-margin)).mean(axis=1),
        "grad_norm": draw.uniform(0.5, 6.0) * weight.mean(axis=1) * _noise(draw, 0.4, steps),
        "policy.margin": margin.mean(axis=1),
        "policy.accuracy": (margin > 0).mean(axis=1),
        "policy.chosen": rejected * draw.uniform(-0.5, 0.4),
        "policy.rejected": rejected,
    }
