"""Train a base by reward, by TRL: it answers questions, and answers above the average of their group become likelier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from athanor.rewards.params import VERSION
from athanor.rewards.rewards import functions
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tuning import trainer
from athanor.tuning.params import GrpoParams, SideParams

SHOWN = 8  # answers kept for reading at each save


def run(run: Run) -> None:
    side, params = run.params("side", SideParams), run.params("grpo", GrpoParams)
    stop_ids: set[int] = set()  # and the last answers: both are TRL's, and known when its trainer is made
    logs: dict[str, Any] = {}

    def make(settings: dict[str, Any], causal: Any, tokenizer: Any, data: Any, lora: Any) -> Any:
        from trl import GRPOConfig

        from athanor.tuning.policy import PolicyTrainer, rollout

        rewards, weights = functions(params.rewards, stop_ids=stop_ids)
        options = GRPOConfig(
            **settings | {"per_device_eval_batch_size": settings["per_device_train_batch_size"]},
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
            router_aux_loss_coef=0.0,
            disable_dropout=True,  # a token's chance is the same when it is drawn and when it is learned from
        )
        policy = PolicyTrainer(
            causal,
            rewards,
            options,
            data["train"],
            data["val"],
            tokenizer,
            peft_config=lora,
            rollout_func=rollout,
        )
        stop_ids.update(policy.eos_token_ids)
        logs.update(policy._logs)
        return policy

    def show(step: int, folder: Path) -> None:
        """Add some of the last answers to a file of the run."""
        file = folder.parent / "completions.jsonl"
        columns = {"prompt": logs["prompt"], "answer": logs["completion"], **logs["rewards"]}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        with file.open("a", encoding="utf-8") as out:
            out.writelines(f"{json.dumps({'step': step, **row})}\n" for row in rows[:: max(1, len(rows) // SHOWN)])
        run.attach(file)

    rows = params.questions_per_step * params.answers_per_question
    trainer.train(run, "grpo", side, params, rows, machine(), make, show, VERSION)


if __name__ == "__main__":
    stage_main("grpo", run, several=True)
