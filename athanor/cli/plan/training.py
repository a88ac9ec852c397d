"""What the stages that train will do: without torch, because a plan must come at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.cli.plan.simulate import Step
from athanor.model.flops import training_flops
from athanor.sizing.reference import TOKEN_FLOPS
from athanor.training.schedule import Schedule, round_down_to_steps

STAGES = ("pretrain", "sft")


@dataclass(frozen=True)
class Training:
    """What a stage will train; `trunk_steps` are shared with runs of another length, `tokens` None when not known."""

    tokens: int | None
    batch_tokens: int
    flops_per_token: float
    parameters: int
    trunk_steps: int = 0
    epochs: float = 1.0

    @property
    def steps(self) -> int:
        return (self.tokens or 0) // self.batch_tokens

    def work(self, tokens: float) -> float:
        """What so many tokens cost: small models take more time for their operations."""
        return tokens * (self.flops_per_token + TOKEN_FLOPS)


def training_of(step: Step, root: Path, built: Mapping[str, Any]) -> Training | None:
    """The training that a stage of this pipeline will do; None for any other stage."""
    if step.stage not in STAGES or not built:
        return None
    params, model = built[step.stage], built["model"]
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    tokens = params.tokens if step.stage == "pretrain" else _sft_tokens(step, root, params.epochs)
    if tokens is not None:
        tokens = round_down_to_steps(tokens, params.batch_tokens)
    trunk = 0
    if step.stage == "pretrain" and params.schedule == "wsd":
        cooldown = int(tokens * params.cooldown_fraction)
        schedule = Schedule("wsd", params.lr, 0.0, params.warmup_tokens, cooldown, tokens)
        trunk = min(schedule.cooldown_start, tokens - params.batch_tokens) // params.batch_tokens
    flops = training_flops(config, config.context_tokens)
    epochs = getattr(params, "epochs", 1.0)
    return Training(tokens, params.batch_tokens, flops, config.parameter_count(), trunk, epochs)


def _sft_tokens(step: Step, root: Path, epochs: float) -> int | None:
    """The training tokens of the packed rows in the workspace; None when these rows will change."""
    path = root / "data" / "sft" / "manifest.json"
    if step.inputs.get("data/sft") is None or not path.is_file():
        return None
    manifest = read_json(path)
    return int(epochs * manifest["counts"]["train"]["rows"] * manifest["context_tokens"])
