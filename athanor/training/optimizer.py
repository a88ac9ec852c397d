"""AdamW over named parameters, gradient clipping, and a step that is skipped on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from athanor.errors import InputError


@dataclass(frozen=True)
class AdamWSettings:
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def decays(name: str, weight: Tensor) -> bool:
    """Matrices decay. Gains do not, nor the embedding: rows of rare ids would shrink towards nothing."""
    return weight.dim() >= 2 and "embed_tokens" not in name


def adamw(model: nn.Module, settings: AdamWSettings) -> torch.optim.AdamW:
    """Fused AdamW with two groups, decayed and not; fp32 weights only, an update is far below one bf16 step."""
    for name, weight in model.named_parameters():
        if weight.dtype != torch.float32:
            raise InputError(f"parameter {name} is {weight.dtype}; master weights must be float32", where="optimizer")
    named = list(model.named_parameters())
    groups = [
        {"params": [w for n, w in named if decays(n, w)], "weight_decay": settings.weight_decay},
        {"params": [w for n, w in named if not decays(n, w)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def clip_gradients(weights: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before, on the device."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def step_unless(optimizer: torch.optim.AdamW, skip: Tensor, rate: float) -> None:
    """One update at learning rate `rate`, or nothing at all where `skip` is true.

    The decision stays on the device: the fused kernel leaves weights, moments
    and step counts alone when `found_inf` is 1, as it does for a gradient scaler.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.grad_scale, optimizer.found_inf = None, skip.float()
    optimizer.step()


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimiser's state as `<parameter>.<key>` tensors."""
    return {
        f"{name}.{key}": value
        for name, weight in model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, on each parameter's own device."""
    for name, weight in model.named_parameters():
        optimizer.state[weight] = {
            key: tensors[f"{name}.{key}"].to(weight.device) for key in ("step", "exp_avg", "exp_avg_sq")
        }
