"""Spike detection: a guard on the device that refuses single steps, and rules on the host that look at the history.

The guard compares a step with the steps accepted before it, like the
skip-step optimizer of OLMo-core (mean + 6 sigma over 128 steps): a batch that
is far out is not learned from. Its window is a tensor of a few numbers on the
device, so a step never waits for the host, and part of the checkpoint.

`detect_divergence` looks at what the guard let through: a loss that went up and stays
up. It is a pure function of the history, so an interrupted run finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Row = tuple[float, float, float]  # loss, gradient norm, skipped


@dataclass(frozen=True)
class Rules:
    """Numbers of steps and factors; none depends on the length of the run, which the trunk must not know."""

    window: int = 128  # accepted steps that a later one is compared with
    minimum: int = 64  # of them before anything is called far out
    sigmas: float = 6.0
    norm_factor: float = 10.0  # the guard asks for both: so many sigmas, and a factor over the mean (of logarithms)
    loss_factor: float = 1.5
    spike_factor: float = 1.3  # over the median; a spike is so high, and outside the band, in
    spike_hits: int = 24  # of the last
    spike_steps: int = 32  # accepted steps. One that recovers sooner is left alone
    drift_factor: float = 1.15  # of the median of the last two blocks over the best block before
    block: int = 32
    blocks: int = 8
    refused: int = 24  # skipped steps in a row
    margin: int = 16  # steps before a spike that are skipped too: its cause often lies before it
    anchor_every: int = 256  # steps from an anchor to the next, or more (Overlap.anchor_due); two are kept

    @property
    def reach(self) -> int:
        """Rows that `detect_divergence` may need to look at."""
        return 2 * max(self.window + self.spike_steps, self.block * self.blocks)


class Divergence(NamedTuple):
    """Why a run must go back, and `onset`, the index of the first row that it must go back to before."""

    reason: str
    onset: int


class SpikeGuard:
    """Refuses steps whose loss or gradient norm is far above those of the accepted steps before, on the device."""

    def __init__(self, rules: Rules, device: torch.device, *, active: bool) -> None:
        self.rules, self.active = rules, active
        self.judged = 0  # calls in this process
        self._index_W = torch.arange(rules.window, device=device)
        self._min_excess_2 = torch.tensor([math.log(rules.loss_factor), math.log(rules.norm_factor)], device=device)
        self.seen_2W = torch.zeros(2, rules.window, device=device)  # logarithms, a ring
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def refuses(self, loss: Tensor, norm: Tensor, nonfinite: Tensor) -> Tensor:
        """Whether to skip this step: it is `nonfinite`, or far above the steps before it. Remembers a step that is neither."""
        self.judged += 1
        if not self.active:
            return nonfinite
        new_2 = torch.stack((loss, norm)).float().log()
        filled_W = self._index_W < self.count
        number = self.count.clamp(1, self.rules.window)
        mean_2 = torch.where(filled_W, self.seen_2W, 0.0).sum(1) / number
        std_2 = torch.where(filled_W, self.seen_2W - mean_2[:, None], 0.0).square().sum(1).div(number).sqrt()
        outlier = (new_2 > mean_2 + torch.maximum(self.rules.sigmas * std_2, self._min_excess_2)).any()
        skipped = nonfinite | (outlier & (self.count >= self.rules.minimum))
        # A batch without targets has a loss and a norm of 0: nothing to compare others with.
        accepted = ~skipped & torch.isfinite(new_2).all()
        target_W = (self._index_W == self.count % self.rules.window) & accepted
        self.seen_2W = torch.where(target_W, new_2[:, None], self.seen_2W)
        self.count = self.count + accepted
        return skipped

    def reset(self) -> None:
        """Empty the window, where other data begins."""
        self.count = torch.zeros_like(self.count)

    def tensors(self) -> dict[str, Tensor]:
        return {"seen": self.seen_2W, "count": self.count}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.seen_2W = tensors["seen"].to(self.seen_2W.device)
        self.count = tensors["count"].to(self.count.device)


def detect_divergence(rows: Sequence[Row], rules: Rules, step: int) -> Divergence | None:
    """The divergence that is visible after `step`, whose row is the last of `rows`; None if there is none.

    `rows` has at least `rules.reach` rows if the run has as many. Skipped steps changed
    nothing, so their loss says nothing about the weights; only that many of
    them in a row do.
    """
    if len(rows) >= rules.refused and all(skipped for _, _, skipped in rows[-rules.refused :]):
        return Divergence(f"{rules.refused} steps in a row were skipped", len(rows) - rules.refused)
    accepted = [index for index, (loss, _, skipped) in enumerate(rows) if not skipped and math.isfinite(loss)]
    divergence = _spike(rows, accepted, rules)
    if divergence is None and step % rules.block == 0:  # not at every step: the blocks overlap, and medians take time
        divergence = _drift(rows, accepted, rules)
    return divergence


def _spike(rows: Sequence[Row], accepted: Sequence[int], rules: Rules) -> Divergence | None:
    """A spike: most of the last steps lie above the earlier median by a factor, and outside the earlier noise."""
    recent = accepted[-rules.spike_steps :]
    before = accepted[-rules.spike_steps - rules.window : -rules.spike_steps]
    if len(before) < rules.minimum or len(recent) < rules.spike_steps:
        return None
    median, noise = median_and_noise([rows[index][0] for index in before])
    limit = max(rules.spike_factor * median, median + rules.sigmas * noise)
    above = [index for index in recent if rows[index][0] > limit]
    if len(above) < rules.spike_hits:
        return None
    height = median_and_noise([rows[index][0] for index in above])[0]
    reason = f"loss {height:.3g} in {len(above)} of {len(recent)} steps, {median:.3g} before: it does not recover"
    return Divergence(reason, above[0])


def _drift(rows: Sequence[Row], accepted: Sequence[int], rules: Rules) -> Divergence | None:
    """Divergence without a spike: the last two blocks of steps lie above the best block before them."""
    recent = accepted[-rules.block * rules.blocks :]
    if len(recent) < max(rules.block * rules.blocks, rules.minimum):
        return None
    blocks = [recent[start : start + rules.block] for start in range(0, len(recent), rules.block)]
    levels = [median_and_noise([rows[index][0] for index in block]) for block in blocks]
    best = min(range(len(levels) - 2), key=lambda number: levels[number][0])
    median, noise = levels[best]
    limit = max(rules.drift_factor * median, median + rules.sigmas / 2 * noise)
    if min(levels[-1][0], levels[-2][0]) <= limit:
        return None
    reason = f"loss rose from {median:.3g} to {levels[-1][0]:.3g} without a spike and stays there"
    return Divergence(reason, blocks[best + 1][0])


def median_and_noise(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the noise from one value to the next as a standard deviation (robust: from the median distance).

    Deviations from the median would not do: a loss that falls steeply is not noisy.
    """
    steps = [abs(later - value) for value, later in zip(values, values[1:], strict=False)]
    return _median(values), 1.4826 * _median(steps) / math.sqrt(2)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
