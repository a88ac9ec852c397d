"""The sections `side`, `tune`, `dpo` and `grpo` of params.yaml: a base, how it is adapted, and the three trainings."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param
from athanor.rewards.params import check_weights


@dataclass(frozen=True, kw_only=True)
class LoraParams:
    """`W x + (alpha / rank) · B A dropout(x)` (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = param(min=1, max=1024)
    alpha: float = param(min=0.01, max=65536)  # usually twice the rank
    dropout: float = param(min=0.0, max=0.9)
    targets: str = param(choices=("all", "attention"))  # all: every linear layer but the head


@dataclass(frozen=True, kw_only=True)
class SideParams:
    """The model that the side graphs begin with, and its form while it is trained."""

    base: str  # a Hugging Face directory: models/export/hf is our own chat model
    method: str = param(choices=("lora", "full"))
    quantise: str = param(
        choices=("none", "nf4")
    )  # nf4: QLoRA, by bitsandbytes (Dettmers et al. 2023, arXiv:2305.14314)
    precision: str = param(choices=("auto", "fp32", "bf16", "fp16"))
    attention: str = param(choices=("sdpa", "eager"))
    checkpointing: bool  # recompute activations in the backward pass: less memory, a third more time
    lora: LoraParams

    def __post_init__(self) -> None:
        if self.quantise != "none" and self.method == "full":
            fix = "side.method: lora, or side.quantise: none"
            raise ParamsError("weights in 4 bits cannot be trained", where="quantise", fix=fix)


@dataclass(frozen=True, kw_only=True)
class TrainerParams:
    """Settings of every training that transformers' Trainer does."""

    seed: int = param(min=0, max=2**32 - 1)  # of the order of rows, dropout, and answers drawn
    lr: float = param(min=1e-8, max=0.1)
    schedule: str = param(choices=("cosine", "linear", "constant"), default="cosine")
    warmup_fraction: float = param(min=0.0, max=0.9)
    weight_decay: float = param(min=0.0, max=1.0, default=0.0)
    grad_clip: float = param(min=1e-3, default=1.0)
    rows_at_once: int = param(min=1)  # of one forward pass in one process; fewer need less memory
    saves: int = param(min=1, default=10)  # checkpoints over the whole training; a held-out score at each


@dataclass(frozen=True, kw_only=True)
class TuneParams(TrainerParams):
    """Supervised training: conversations, or plain text (continued pretraining)."""

    data: str = param(choices=("chats", "text"))  # chats: as sft_data chooses them; text: data/clean
    context_tokens: int = param(min=16)  # a longer conversation loses its last turns, a document is cut in pieces
    max_text_tokens: int = param(min=1)  # of data: text
    epochs: float = param(min=0.01, max=1000)
    rows_per_step: int = param(min=1)  # conversations or pieces of text per optimiser step, over all processes


@dataclass(frozen=True, kw_only=True)
class DpoParams(TrainerParams):
    epochs: float = param(min=0.01, max=1000)
    pairs_per_step: int = param(min=1)
    beta: float = param(min=1e-3, max=100.0)  # strength of the pull to the base
    loss: str = param(choices=("sigmoid", "sigmoid_norm", "ipo", "hinge"))  # TRL's names; sigmoid_norm: per token


@dataclass(frozen=True, kw_only=True)
class GrpoParams(TrainerParams):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) by TRL."""

    steps: int = param(min=1)
    questions_per_step: int = param(min=1)
    answers_per_question: int = param(min=2)  # a group: an answer's advantage is its reward less the group's mean
    steps_per_round: int = param(min=1)  # optimiser steps on the answers of one draw
    max_new_tokens: int = param(min=1)
    temperature: float = param(min=0.01, max=10.0)
    kl_coefficient: float = param(min=0.0, max=10.0)
    clip_low: float = param(min=0.0, max=1.0)
    clip_high: float = param(min=0.0, max=10.0)  # above clip_low leaves room for unlikely answers (arXiv:2503.14476)
    loss: str = param(choices=("dapo", "grpo", "dr_grpo", "bnpo"))  # TRL's names
    rewards: dict[str, float]  # weight of each: shipped ones, and functions of rewards/mine.py

    def __post_init__(self) -> None:
        check_weights(self.rewards)
