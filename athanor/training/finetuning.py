"""Fine-tuning on packed conversations, whichever model is tuned: what it learns from, how long, and what chooses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from athanor.data import rows as packed
from athanor.data.sampler import SftSampler
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.validation import conversation_loss
from athanor.training.best import SelectionKey, by_stops_and_loss
from athanor.training.schedule import Schedule, round_down_to_steps
from athanor.training.setup import Choices, ExecutionPlan
from athanor.training.sft_params import SftParams
from athanor.training.step import Targets, probe_batch
from athanor.training.world import World


class FineTuning:
    """The `sft` section applied to packed rows of `context_tokens` in the folder `data`."""

    def __init__(self, params: SftParams, data: Path, context_tokens: int) -> None:
        self.params, self.context_tokens = params, context_tokens
        self.sampler = SftSampler(data, context_tokens, params.seed)
        self.held_out, self.stop_id = packed.held_out(data, params.validation_max_conversations)
        total = round_down_to_steps(int(params.epochs * self.sampler.tokens_per_epoch), params.batch_tokens)
        self.schedule = Schedule(
            params.schedule,
            params.lr,
            params.lr * params.final_lr_fraction,
            int(total * params.warmup_fraction),
            int(total * params.cooldown_fraction),
            total,
            params.cooldown_shape,
        )

    def execution_plan(self, machine: Any, world: World, execution: Choices, config: ModelConfig) -> ExecutionPlan:
        """From the machine's settings and the choices; seeds the global generators."""
        per_epoch = self.params.validations_per_epoch
        return ExecutionPlan.of(
            "sft",
            self.params,
            machine,
            world,
            execution,
            config,
            keeps_best=self.params.select == "best",
            total_tokens=self.schedule.total_tokens,
            document_mask=True,  # conversations that share a row must not see each other
            validation_every_tokens=max(1, int(self.sampler.tokens_per_epoch / per_epoch)) if per_epoch else 0,
            sample_every_tokens=0,
        )

    @property
    def selection_key(self) -> SelectionKey | None:
        """Orders validations; None where the last weights are kept."""
        return by_stops_and_loss(self.params.min_stop_rate) if self.params.select == "best" else None

    def validate(self, model: Transformer, plan: ExecutionPlan) -> dict[str, Any]:
        """Loss and stop rate on the held-out conversations, as the fields of ConversationLoss."""
        options: dict[str, Any] = {
            "precision": plan.execution.precision,
            "threads": plan.settings.threads,
            "world": plan.world,
        }
        score = conversation_loss(model, self.held_out, self.context_tokens, self.stop_id, **options)
        return dataclasses.asdict(score)

    def probe_batch(self, device: torch.device) -> Targets:
        """The first batch's head, for the preflight."""
        return probe_batch(self.sampler.batch(0, self.params.batch_tokens), True).to(device)
