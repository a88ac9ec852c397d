"""The `pretrain` section of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param


@dataclass(frozen=True, kw_only=True)
class PretrainParams:
    seed: int = param(min=0)  # of the weights and of the order of windows
    bigram_tokens: int = param(min=0, default=0)  # whose pairs the first weights know; 0: random weights
    tokens: int = param(min=1)  # to train on, rounded down to whole steps; may pass the data several times
    batch_tokens: int = param(min=16)  # per optimiser step, a multiple of the context
    lr: float = param(min=1e-7, max=0.1)
    final_lr_fraction: float = param(min=0.0, max=1.0, default=0.0)  # of lr, reached exactly at the last step
    schedule: str = param(choices=("wsd", "cosine"))
    warmup_tokens: int = param(min=0)
    cooldown_fraction: float = param(min=0.01, max=1.0)  # of tokens, at the end; wsd only
    cooldown_shape: str = param(choices=("sqrt", "linear"), default="sqrt")  # the rate falls with 1 - sqrt(x), or 1 - x
    optimizer: str = param(choices=("adamw", "muon"))  # muon: for the matrices in the blocks, AdamW for the rest
    muon_momentum: float = param(min=0.0, max=0.9999, default=0.95)
    embedding_lr_factor: float = param(min=0.0, max=100.0, default=1.0)  # times lr; of a tied output matrix, too
    head_lr_factor: float = param(min=0.0, max=100.0, default=1.0)  # times lr; of an output matrix of its own
    beta1: float = param(min=0.0, max=0.9999, default=0.9)
    beta2: float = param(min=0.0, max=0.99999)
    eps: float = param(min=1e-15, max=1e-3, default=1e-8)
    weight_decay: float = param(min=0.0, max=1.0)  # of the blocks' matrices; nothing else decays
    spike_guard: bool = True  # refuse a step whose loss or gradient norm is far above those before
    max_rollbacks: int = param(
        min=0, max=100, default=3
    )  # after a spike that stays: go back and leave its data out; 0: never
    grad_clip: float = param(min=1e-3, default=1.0)  # joint norm of all gradients
    z_loss: float = param(min=0.0, max=0.1, default=0.0)  # weight of the squared log-sum-exp of the logits; 0 is off
    document_mask: bool = True  # attention stays inside a document
    precision: str = param(choices=("fp32", "bf16", "fp16", "auto"))  # of forward and backward; weights are fp32 always
    validation_every_tokens: int = param(min=0)  # 0: at the end only
    validation_max_bytes: int = param(min=1)  # of held-out text per source; the eval stage scores all of it
    sample_every_tokens: int = param(min=0)  # text for the eye; 0: at the end only
    sample_prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < self.batch_tokens:
            fix = f"use a value ≥ {self.batch_tokens}"
            raise ParamsError(f"{self.tokens} is less than one step", where="tokens", fix=fix)
        if self.warmup_tokens >= self.trunk_tokens:
            raise ParamsError(
                f"{self.warmup_tokens} leaves no step at full rate before {self.trunk_tokens}",
                where="warmup_tokens",
                fix="shorten the warmup",
            )
        if any(not prompt for prompt in self.sample_prompts):
            raise ParamsError("a prompt is empty", where="sample_prompts", fix="write some text or remove it")

    @property
    def cooldown_tokens(self) -> int:
        return int(self.tokens * self.cooldown_fraction) if self.schedule == "wsd" else 0

    @property
    def trunk_tokens(self) -> int:
        """Tokens before the rate begins to fall for good."""
        return self.tokens - self.cooldown_tokens
