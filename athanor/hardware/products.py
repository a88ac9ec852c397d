"""Matrix products of a model's own shapes, in every number format and all three layouts of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from athanor.hardware.timing import fastest
from athanor.model.config import ModelConfig
from athanor.model.precision import AUTOCAST

LAYOUTS = ("forward", "input_gradient", "weight_gradient")
# Operations of one pass over all shapes: slow units shall not take minutes.
_MOST_FLOPS = {"cpu": 30e9, "mps": 1e12, "cuda": 2e13}
_LEAST_TOKENS = 64


def shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """(outputs, inputs) of the model's linear layers, with how often a forward pass uses each."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: Counter[tuple[int, int]] = Counter()
    for outputs, inputs, times in (
        (queries, config.dim, 1),
        (keys, config.dim, 2),
        (config.dim, queries, 1),
        (config.ffn_dim, config.dim, 2),
        (config.dim, config.ffn_dim, 1),
    ):
        found[outputs, inputs] += times * config.layers
    found[config.vocab_size, config.dim] += 1
    return found


def rows_for(config: ModelConfig, tokens: int, device: torch.device) -> int:
    """Tokens of a product: those of a micro-batch, fewer where that would take too long."""
    weights = sum(outputs * inputs for outputs, inputs in shapes(config))
    while tokens > _LEAST_TOKENS and 2 * len(LAYOUTS) * weights * tokens > _MOST_FLOPS[device.type]:
        tokens //= 2
    return tokens


def product(layout: str, outputs: int, inputs: int, tokens: int, **how: Any) -> Callable[[], torch.Tensor]:
    """One of the three products of a linear layer Y = X Wᵀ, with transposes as training has them."""
    x_TI, w_OI, dy_TO = (_drawn(*shape, **how) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: x_TI @ w_OI.t(),
        "input_gradient": lambda: dy_TO @ w_OI,
        "weight_gradient": lambda: dy_TO.t() @ x_TI,
    }
    return calls[layout]


def _drawn(rows: int, columns: int, **how: Any) -> torch.Tensor:
    """Numbers as a model has them: constant ones take less power, so a chip that is warm works faster on them."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=draw).to(**how)


def measure(
    config: ModelConfig,
    tokens: int,
    device: torch.device,
    budget_seconds: float,
    formats: tuple[str, ...] = tuple(AUTOCAST),
) -> dict[str, Any]:
    """GFLOPS by format: of each layout, and of all together weighted by the time they take (`ceiling`).

    The ceiling is what a model made of nothing but these products would reach.
    """
    tokens = rows_for(config, tokens, device)
    wanted = shapes(config)
    each = budget_seconds / (len(formats) * len(LAYOUTS) * len(wanted))
    made: dict[str, Any] = {}
    for name in formats:
        how = {"dtype": AUTOCAST[name] or torch.float32, "device": device}
        flops, seconds = dict.fromkeys(LAYOUTS, 0.0), dict.fromkeys(LAYOUTS, 0.0)
        try:
            for (outputs, inputs), times in wanted.items():
                for layout in LAYOUTS:
                    took = fastest(product(layout, outputs, inputs, tokens, **how), device, each)
                    flops[layout] += 2.0 * outputs * inputs * tokens * times
                    seconds[layout] += took * times
        except RuntimeError:  # a format that this device has no products for
            continue
        made[name] = {layout: flops[layout] / seconds[layout] / 1e9 for layout in LAYOUTS}
        made[name]["ceiling"] = sum(flops.values()) / sum(seconds.values()) / 1e9
    return {"tokens": tokens, "gflops": made}
