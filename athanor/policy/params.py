"""The sections of params.yaml for training after fine-tuning: grpo and dpo."""

from __future__ import annotations

from dataclasses import dataclass

from athanor.base.errors import ParamsError
from athanor.base.strict import param
from athanor.rewards.params import check_weights


@dataclass(frozen=True, kw_only=True)
class UpdateParams:
    """What both have: how the weights change, and which are kept."""

    seed: int = param(min=0)  # of questions and answers, or of the order of pairs
    lr: float = param(min=1e-7, max=0.1)
    final_lr_fraction: float = param(min=0.0, max=1.0, default=0.0)  # of lr, reached exactly at the last step
    warmup_fraction: float = param(min=0.0, max=0.9, default=0.1)  # of all steps
    optimizer: str = param(choices=("adamw", "muon"))
    muon_momentum: float = param(min=0.0, max=0.9999, default=0.95)
    embedding_lr_factor: float = param(min=0.0, max=100.0, default=1.0)  # times lr; of a tied output matrix, too
    head_lr_factor: float = param(min=0.0, max=100.0, default=1.0)  # times lr; of an output matrix of its own
    beta1: float = param(min=0.0, max=0.9999, default=0.9)
    beta2: float = param(min=0.0, max=0.99999, default=0.99)
    eps: float = param(min=1e-15, max=1e-3, default=1e-8)
    weight_decay: float = param(min=0.0, max=1.0, default=0.0)
    grad_clip: float = param(min=1e-3, default=1.0)
    precision: str = param(choices=("fp32", "bf16", "fp16", "auto"))
    select: str = param(choices=("best", "last"), default="best")  # the weights kept: most reward, or lowest loss


@dataclass(frozen=True, kw_only=True)
class GrpoParams(UpdateParams):
    steps: int = param(min=1)
    questions_per_step: int = param(min=1)
    answers_per_question: int = param(min=2)  # a group: an answer's advantage is its reward beside the others'
    steps_per_round: int = param(min=1)  # answers for so many steps are drawn at once; in the later ones clipping acts
    question_tries: float = param(
        min=1.0, max=100.0
    )  # questions tried for each one used, whose answers differ in reward
    max_new_tokens: int = param(min=1)
    rewards: dict[str, float]  # weights of correct, format and brevity
    mean_over: str = param(choices=("tokens", "answers"), default="tokens")  # answers: a short one counts as a long one
    kl_coefficient: float = param(min=0.0, max=10.0)
    clip_low: float = param(min=0.0, max=1.0, default=0.2)
    clip_high: float = param(min=0.0, max=10.0, default=0.28)  # DAPO, arXiv:2503.14476: room for unlikely answers
    validations: int = param(min=1, default=5)  # of the held-out questions, the last one at the end

    def __post_init__(self) -> None:
        check_weights(self.rewards)
        if self.steps % self.steps_per_round:
            fix = f"use a multiple of {self.steps_per_round}"
            raise ParamsError(
                f"{self.steps} steps are not whole rounds of {self.steps_per_round}", where="steps", fix=fix
            )


@dataclass(frozen=True, kw_only=True)
class DpoParams(UpdateParams):
    epochs: float = param(min=0.01, max=1000)  # passes over the packed pairs, rounded down to whole steps
    batch_tokens: int = param(min=16)  # per optimiser step, padding included; a multiple of the context
    beta: float = param(min=1e-3, max=100.0)  # how strongly answers are held to the reference; times log ratios
    normalised: bool = True  # log ratios per token: a long answer weighs as a short one; beta is about ten times larger
    validations_per_epoch: float = param(min=0.0, max=1000, default=2.0)  # 0: at the end only
