"""AdamW, with Muon for the matrices where asked for; gradient clipping; steps that are skipped on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from athanor.base.errors import InputError
from athanor.training.muon import Muon, ParallelMap, ShardedParams


@dataclass(frozen=True)
class OptimizerSettings:
    """`name`: adamw, or muon for matrices with AdamW for the rest. `momentum` is Muon's, the others are AdamW's.

    The factors are times the learning rate.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    name: str = "adamw"
    momentum: float = 0.95
    embedding_lr_factor: float = 1.0
    head_lr_factor: float = 1.0

    @classmethod
    def of(cls, params: Any) -> OptimizerSettings:
        """From the parameters of a stage that trains."""
        adamw = (params.beta1, params.beta2, params.eps, params.weight_decay)
        factors = (params.embedding_lr_factor, params.head_lr_factor)
        return cls(*adamw, params.optimizer, params.muon_momentum, *factors)

    def lr_factor(self, name: str) -> float:
        """Of a weight that AdamW changes. A tied output matrix is the embedding."""
        if "embed_tokens" in name:
            return self.embedding_lr_factor
        return self.head_lr_factor if "lm_head" in name else 1.0


def decays(name: str, weight: Tensor) -> bool:
    """The blocks' matrices decay. Gains do not, nor embedding and output matrix: rows of rare ids would shrink to nothing."""
    return weight.dim() >= 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))


class Named(Protocol):
    """A model, or anything else that has named weights."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class Optimizer:
    """The optimiser of a run: AdamW for all weights, or Muon for the matrices that decay and AdamW for the rest.

    fp32 weights only: an update is far below one bf16 step. `parallel_map` runs Muon's matrices side by
    side; `sharded` gathers the full matrices where the weights are shards of them.
    """

    def __init__(
        self,
        model: Named,
        settings: OptimizerSettings,
        parallel_map: ParallelMap | None = None,
        sharded: ShardedParams | None = None,
    ) -> None:
        self.settings, self.weights = settings, dict(model.named_parameters())
        for name, weight in self.weights.items():
            if weight.dtype != torch.float32:
                raise InputError(
                    f"parameter {name} is {weight.dtype}; master weights must be float32", where="optimizer"
                )
        self.optimizers: list[AdamW | Muon] = [AdamW(self.weights, settings)]
        if settings.name == "muon":
            matrices = {name: weight for name, weight in self.weights.items() if decays(name, weight)}
            others = {name: weight for name, weight in self.weights.items() if name not in matrices}
            muon = Muon(matrices, settings.momentum, settings.weight_decay, parallel_map, sharded)
            self.optimizers = [muon, AdamW(others, settings)]

    def step_unless(self, skip: Tensor, lr: float) -> None:
        """One update at learning rate `lr`, or nothing at all where `skip` is true; decided on the device.

        But on MPS, where torch's fused kernel took no notice of `found_inf` (pytorch#186360): a step that is
        refused would be learned from, so its verdict is waited for.
        """
        if skip.device.type == "mps" and bool(skip):
            return
        for optimizer in self.optimizers:
            optimizer.step_unless(skip, lr)

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.<key>` tensors."""
        return {name: tensor for optimizer in self.optimizers for name, tensor in optimizer.tensors().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`, on each parameter's own device."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])


class AdamW:
    """AdamW over named weights, in groups of one weight decay and learning rate, by torch's fused kernel on each parameter's device.

    `torch.optim.AdamW` gives the same bytes, but loads torch's compiler when it is
    made, 1.0 to 1.7 s of every stage that trains; the function behind it does not.
    """

    def __init__(self, weights: Mapping[str, Tensor], settings: OptimizerSettings) -> None:
        self.settings, self.weights = settings, dict(weights)
        self.steps = {name: torch.zeros((), device=weight.device) for name, weight in self.weights.items()}
        self.exp_avg = {name: torch.zeros_like(weight.detach()) for name, weight in self.weights.items()}
        self.exp_avg_sq = {name: torch.zeros_like(weight.detach()) for name, weight in self.weights.items()}
        self.groups: dict[tuple[float, float], list[str]] = {}  # by weight decay and factor of the learning rate
        for name, weight in self.weights.items():
            rates = (settings.weight_decay if decays(name, weight) else 0.0, settings.lr_factor(name))
            self.groups.setdefault(rates, []).append(name)

    @torch.no_grad()
    def step_unless(self, skip: Tensor, lr: float) -> None:
        """One update at learning rate `lr`, or nothing at all where `skip` is true.

        The decision stays on the device: the fused kernel leaves weights, moments
        and step counts alone when `found_inf` is 1, as it does for a gradient scaler.
        A parameter without a gradient is left alone too.
        """
        found_inf = skip.float()
        for (weight_decay, lr_factor), group in self.groups.items():
            names = [name for name in group if self.weights[name].grad is not None]
            adamw(
                [self.weights[name] for name in names],
                [self.weights[name].grad for name in names],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                [self.steps[name] for name in names],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.settings.beta1,
                beta2=self.settings.beta2,
                lr=lr * lr_factor,
                weight_decay=weight_decay,
                eps=self.settings.eps,
                maximize=False,
            )

    def tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.<key>` tensors."""
        return {
            f"{name}.{key}": values[name]
            for name in self.weights
            for key, values in (("step", self.steps), ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))
        }


def clip_gradients(
    weights: Iterable[Tensor], max_norm: float, joint: Callable[[Tensor], Tensor] = lambda norm: norm
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, on the device.

    `joint` computes the norm of all processes' gradients from that of these weights, where they are shards.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = joint(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
