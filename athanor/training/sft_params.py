"""The `sft` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param

SCRATCH = "scratch"


@dataclass(frozen=True, kw_only=True)
class SftParams:
    base: str  # scratch: the model that pretrain makes; or a Hugging Face directory, for a LoRA on it
    seed: int = param(min=0)  # of the order of rows
    epochs: float = param(min=0.01, max=1000)  # passes over the packed rows, rounded down to whole steps
    batch_tokens: int = param(min=16)  # per optimiser step, padding included; a multiple of the context
    lr: float = param(min=1e-7, max=0.1)
    final_lr_fraction: float = param(min=0.0, max=1.0, default=0.0)  # of lr, reached exactly at the last step
    schedule: str = param(choices=("wsd", "cosine"))
    warmup_fraction: float = param(min=0.0, max=0.9)  # of all steps
    cooldown_fraction: float = param(min=0.01, max=1.0)  # of all steps, at the end; wsd only
    cooldown_shape: str = param(choices=("sqrt", "linear"), default="sqrt")  # the rate falls with 1 - sqrt(x), or 1 - x
    optimizer: str = param(choices=("adamw", "muon"))  # muon: for the matrices in the blocks, AdamW for the rest
    muon_momentum: float = param(min=0.0, max=0.9999, default=0.95)
    embedding_lr_factor: float = param(min=0.0, max=100.0, default=1.0)  # times lr; of a tied output matrix, too
    head_lr_factor: float = param(min=0.0, max=100.0, default=1.0)  # times lr; of an output matrix of its own
    beta1: float = param(min=0.0, max=0.9999, default=0.9)
    beta2: float = param(min=0.0, max=0.99999)
    eps: float = param(min=1e-15, max=1e-3, default=1e-8)
    weight_decay: float = param(min=0.0, max=1.0)
    spike_guard: bool = True  # refuse a step whose loss or gradient norm is far above those before
    max_rollbacks: int = param(
        min=0, max=100, default=3
    )  # after a spike that stays: go back and leave its data out; 0: never
    grad_clip: float = param(min=1e-3, default=1.0)
    z_loss: float = param(min=0.0, max=0.1, default=0.0)
    precision: str = param(choices=("fp32", "bf16", "fp16", "auto"))
    validations_per_epoch: float = param(min=0.0, max=1000)  # 0: at the end only
    validation_max_conversations: int = param(min=1)
    select: str = param(choices=("best", "last"))  # the validation whose weights are kept
    min_stop_rate: float = param(min=0.0, max=1.0)  # best: lowest loss among those that end so many answers

    def __post_init__(self) -> None:
        if self.schedule == "wsd" and self.warmup_fraction + self.cooldown_fraction > 1:
            raise ParamsError(
                "warmup and cooldown together are longer than the run",
                where="cooldown_fraction",
                fix=f"use ≤ {1 - self.warmup_fraction:g}",
            )
