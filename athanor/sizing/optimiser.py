"""What batch, learning rate, weight decay and betas mean together, in tokens.

Pure functions. The numbers of a recipe only mean something relative to each
other: a beta is a memory in steps, and a step is as long as the batch; weight
decay forgets at the rate lr * weight_decay. `measures` puts all of them on one
scale, `check` says which are out of line, `derive` carries a recipe to another
batch or length.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

# Half-lives of beta2. Tuned recipes of billions of tokens have 5 to 50 million tokens (Marek et al. 2025,
# arXiv:2507.07101), 0.1 % to 1 % of the run; a short run needs a larger share to average over a few steps at all.
MIN_HALF_LIFE, MAX_HALF_LIFE = 0.005, 0.10  # of the run
ENOUGH_TOKENS, MANY_TOKENS = 5_000_000, 50_000_000
FEW_STEPS = 14  # 0.95, which is usual at large batches, is never called too long
# Timescales of weight decay, of the run. The best one falls as tokens per parameter rise, with an exponent of about a
# half (Bergsma et al. 2025, arXiv:2505.13738): from USUAL_TOKENS per parameter on the lower limit falls with it.
MIN_TAU, MAX_TAU, USUAL_TOKENS = 0.1, 3.0, 20
MAX_WARMUP = 0.2
MIN_STEPS = 100
# At one batch the best learning rate falls with the length of the run (Bjorck et al. 2025, arXiv:2409.19913).
LR_TOKENS = -0.32


@dataclass(frozen=True)
class Recipe:
    """A pretraining run as far as the optimiser goes; `parameters` 0 where the model's size is not known."""

    tokens: int
    batch_tokens: int
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    warmup_tokens: int
    parameters: int = 0

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch_tokens)


@dataclass(frozen=True)
class Measures:
    """A recipe in tokens, or as a share of the run where the name says so; infinite where nothing is forgotten."""

    steps: int
    beta2_half_life: float
    beta2_share: float
    tau: float
    tau_share: float
    warmup: int
    warmup_share: float


def half_life(beta: float, batch_tokens: int) -> float:
    """Tokens after which a gradient counts half in a moving average: a step is `batch_tokens` long."""
    if beta <= 0.0:
        return 0.0
    return batch_tokens * math.log(2) / -math.log(beta) if beta < 1.0 else math.inf


def beta_for(half_life_tokens: float, batch_tokens: int) -> float:
    """The beta with this half-life in tokens at this batch: the inverse of `half_life`."""
    return 2.0 ** (-batch_tokens / half_life_tokens) if half_life_tokens > 0.0 else 0.0


def timescale(lr: float, weight_decay: float, batch_tokens: int) -> float:
    """Tokens over which AdamW's weights average its updates (Wang & Aitchison 2024, arXiv:2405.13698)."""
    rate = lr * weight_decay
    return batch_tokens / rate if rate > 0.0 else math.inf


def measures(recipe: Recipe) -> Measures:
    beta2 = half_life(recipe.beta2, recipe.batch_tokens)
    tau = timescale(recipe.lr, recipe.weight_decay, recipe.batch_tokens)
    return Measures(
        steps=recipe.steps,
        beta2_half_life=beta2,
        beta2_share=beta2 / recipe.tokens,
        tau=tau,
        tau_share=tau / recipe.tokens,
        warmup=recipe.warmup_tokens,
        warmup_share=recipe.warmup_tokens / recipe.tokens,
    )


def half_life_range(recipe: Recipe) -> tuple[float, float]:
    """Half-lives of beta2, in tokens, that fit the run's length and its batch."""
    low = min(MIN_HALF_LIFE * recipe.tokens, ENOUGH_TOKENS)
    return low, max(min(MAX_HALF_LIFE * recipe.tokens, MANY_TOKENS), FEW_STEPS * recipe.batch_tokens)


def min_tau(recipe: Recipe) -> float:
    """The shortest timescale of weight decay that is not out of line, as a share of the run."""
    ratio = recipe.tokens / recipe.parameters if recipe.parameters else USUAL_TOKENS
    return MIN_TAU * min(1.0, math.sqrt(USUAL_TOKENS / ratio))


def derive(recipe: Recipe, *, batch_tokens: int | None = None, tokens: int | None = None) -> Recipe:
    """The recipe for another batch or length, with what the optimiser remembers kept in tokens.

    Batch: lr by the square root (Malladi et al. 2022, arXiv:2205.10092), beta2 by its half-life in tokens and beta1
    as it is (Marek et al. 2025). Length: lr by a power of its ratio; warmup keeps its share, and beta2's half-life what
    it is as far as that fits the run. Weight decay follows from all of them, so that tau stays the same share of the run
    (Wang & Aitchison 2024). A place to start a probe from, not an end: the exponents were fitted on models of 50 million
    parameters and more.
    """
    batch, length = batch_tokens or recipe.batch_tokens, tokens or recipe.tokens
    lr = recipe.lr * math.sqrt(batch / recipe.batch_tokens) * (length / recipe.tokens) ** LR_TOKENS
    measured = measures(recipe)
    derived = dataclasses.replace(
        recipe,
        tokens=length,
        batch_tokens=batch,
        lr=lr,
        weight_decay=batch / (lr * measured.tau_share * length) if math.isfinite(measured.tau_share) else 0.0,
        warmup_tokens=round(recipe.warmup_tokens * length / recipe.tokens),
    )
    half_life_tokens = measured.beta2_half_life
    if length != recipe.tokens:
        low, high = half_life_range(derived)
        half_life_tokens = min(max(half_life_tokens, low), high)
    return dataclasses.replace(derived, beta2=beta_for(half_life_tokens, batch))


def check(recipe: Recipe) -> list[str]:
    """What is out of line, in words that name the parameter and a value that is not; empty when nothing is."""
    measured = measures(recipe)
    if measured.steps < MIN_STEPS:  # a little text, or a trial: too short for any of this to mean anything
        return []
    problems = []
    low, high = half_life_range(recipe)
    if not low <= measured.beta2_half_life <= high:
        target = max(math.sqrt(low * high), FEW_STEPS * recipe.batch_tokens)
        short = "short: the second moment follows the noise of a few batches"
        problems.append(
            f"beta2 {recipe.beta2:.6g} has a half-life of {_count(measured.beta2_half_life)} tokens, "
            f"{_share(measured.beta2_share)} of the run, which is {short if measured.beta2_half_life < low else 'long'}. "
            f"{_count(low)} to {_count(high)} fit, beta2 {_beta(beta_for(target, recipe.batch_tokens))} for instance"
        )
    lowest = min_tau(recipe)
    # Above MAX_TAU it hardly acts, which does no harm in a short run; forgetting does.
    if recipe.weight_decay and measured.tau_share < lowest:
        fitting = recipe.batch_tokens / (recipe.lr * lowest * recipe.tokens)
        problems.append(
            f"weight_decay {recipe.weight_decay:.3g} forgets most of the run at this lr and batch (timescale "
            f"{measured.tau_share:.2g} of the run, {lowest:.2g} to {MAX_TAU:g} fit): lower it to {fitting:.2g}"
        )
    if measured.warmup_share > MAX_WARMUP:
        problems.append(
            f"warmup_tokens {_count(measured.warmup)} are {_share(measured.warmup_share)} of the run (more than "
            f"{MAX_WARMUP:.0%}): lower it to {_count(MAX_WARMUP * recipe.tokens)}"
        )
    elif measured.warmup < measured.beta2_half_life <= MAX_WARMUP * recipe.tokens:
        problems.append(
            f"warmup_tokens {_count(measured.warmup)} are fewer than beta2's half-life of "
            f"{_count(measured.beta2_half_life)}: the full rate comes before the second moment has settled; raise it"
        )
    return problems


def _count(tokens: float) -> str:
    """A number of tokens as text with three digits and a unit, such as 1.25 M."""
    if not math.isfinite(tokens):
        return "never"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.3g} {unit}"
    return f"{tokens:.3g}"


def _share(value: float) -> str:
    if value > 2:
        return f"{value:.3g} times the run"
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.0f} %"


def _beta(beta: float) -> str:
    """A beta as text, with enough digits to tell it from 1."""
    return f"{beta:.{max(2, 1 - math.floor(math.log10(1 - beta)))}f}"
