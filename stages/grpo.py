"""Train a base by reward, by TRL: it answers questions, and answers above the average of their group become likelier."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.model.device import prepare
from athanor.rewards.params import KIND, VERSION
from athanor.rewards.rewards import functions
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tuning import model, trainer
from athanor.tuning.params import GrpoParams, SideParams
from athanor.tuning.rows import Template

DATA, OUT = Path("data/grpo"), Path("models/grpo")
SHOWN = 8  # answers kept for reading, at each save


def run(run: Run) -> None:
    side, params = run.params("side", SideParams), run.params("grpo", GrpoParams)
    model.libraries("transformers", "peft", "datasets", "trl")
    read_manifest(DATA, KIND, VERSION)
    parents = {"base": model.base_digest(side.base), "data": manifest_digest(DATA)}
    recipe = {"side": {**dataclasses.asdict(side), "base": ""}, "grpo": dataclasses.asdict(params)}
    local = machine()
    device = prepare(local.device, local.threads)

    def build(folder: Path) -> Any:
        from datasets import load_dataset
        from trl import GRPOConfig

        from athanor.tuning.policy import PolicyTrainer, rollout

        tokenizer = Template(model.load_tokenizer(side.base), side.base).tokenizer
        causal = model.load_model(side)
        rows = params.questions_per_step * params.answers_per_question
        settings = trainer.arguments(params, side, rows, params.steps, folder, device.type)
        ends = causal.generation_config.eos_token_id
        stop_ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        rewards, weights = functions(params.rewards, stop_ids=stop_ids)
        data = load_dataset("json", data_files={s: str(DATA / f"{s}.jsonl") for s in ("train", "val")})
        options = GRPOConfig(
            **settings,
            num_generations=params.answers_per_question,
            num_generations_eval=1,
            steps_per_generation=settings["gradient_accumulation_steps"] * params.steps_per_round,
            max_completion_length=params.max_new_tokens,
            temperature=params.temperature,
            beta=params.kl_coefficient,
            epsilon=params.clip_low,
            epsilon_high=params.clip_high,
            loss_type=params.loss,
            reward_weights=weights,
            disable_dropout=True,  # the trainer's chances of a token are the sampler's then
            router_aux_loss_coef=0.0,
        )
        return PolicyTrainer(
            causal,
            rewards,
            options,
            data["train"],
            data["val"],
            tokenizer,
            peft_config=model.lora_config(side, causal),
            rollout_func=rollout,
        )

    trainer.train(run, "grpo", OUT, side, params, recipe, parents, params.steps, build)


if __name__ == "__main__":
    stage_main("grpo", run, several=True)
