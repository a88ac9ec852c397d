"""Reinforcement learning on questions whose answers can be checked: GRPO, from the fine-tuned model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.model.transformer import Transformer
from athanor.model.weights import load_config, load_model, save_model
from athanor.policy.objectives import Grpo
from athanor.policy.params import GrpoParams
from athanor.policy.rollouts import Asker, Rollouts, scores
from athanor.rewards.params import KIND, VERSION
from athanor.rewards.shipped import item_of
from athanor.runtime import choices
from athanor.runtime.hooks import bases, hooks, with_rates
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tokenizer.chat import check_made_with
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.loop import train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.schedule import Schedule
from athanor.training.setup import ExecutionPlan, tuned
from athanor.training.world import SINGLE

BASE, DATA, TOKENIZER, OUT = Path("models/sft"), Path("data/grpo"), Path("models/tokenizer"), Path("models/grpo")


def run(run: Run) -> None:
    params, local, tokenizer = run.params("grpo", GrpoParams), machine(), Tokenizer.load(TOKENIZER)
    read_manifest(DATA, KIND, VERSION)
    items, held_out = (
        [item_of(json.loads(line)["item"]) for line in (DATA / f"{split}.jsonl").read_text("utf-8").splitlines()]
        for split in ("train", "val")
    )
    config, base_facts = load_config(BASE)
    check_made_with(base_facts, tokenizer, where=str(BASE), fix="dvc repro")
    parents = {"base": manifest_digest(BASE), "data": manifest_digest(DATA), "tokenizer": manifest_digest(TOKENIZER)}
    slot = run.slot(dataclasses.asdict(params), parents)
    # A position in training counts a whole context for each answer, as it does for the rows of fine-tuning.
    batch = params.questions_per_step * params.answers_per_question * config.context_tokens
    # Its loss lies around 0 and says nothing about the data, so nothing is refused or left out for it.
    recipe = SimpleNamespace(
        **dataclasses.asdict(params), batch_tokens=batch, z_loss=0.0, spike_guard=False, max_rollbacks=0
    )
    total = params.steps * batch
    schedule = Schedule(
        "cosine", params.lr, params.lr * params.final_lr_fraction, int(total * params.warmup_fraction), 0, total
    )
    execution = choices.chosen(run, (slot,), config, params.precision, batch, total, optimizer=params.optimizer)
    plan = ExecutionPlan.of(
        "grpo",
        recipe,
        local,
        SINGLE,
        execution,
        config,
        keeps_best=params.select == "best",
        total_tokens=total,
        document_mask=True,
        validation_every_tokens=-(-params.steps // params.validations) * batch,
        sample_every_tokens=0,
    )
    settings = dataclasses.replace(plan.settings, overlap=False)  # a round needs the weights of the step before it
    asker = Asker(tokenizer, params, local.workers, local.threads)
    with slot, run.progress(total, "grpo", "tokens") as bar:
        run.watch_health(schedule, batch, tokenizer.vocab_size, precision=execution.precision)
        model, reference = (load_model(BASE, plan.device)[0] for _ in range(2))
        rollouts = Rollouts(asker, items, model, reference, slot.path, batch, execution.precision)

        def validate(model: Transformer) -> dict[str, Any]:
            return scores(asker.greedy(model, held_out), held_out)

        loop_hooks = hooks(
            run,
            bar,
            rollouts,
            batch,
            validate=validate,
            scalars=scalars,
            before_first_step=lambda model: run.log(0, **scalars(validate(model))),
            bases=bases(plan.device, execution.precision),
        )
        with tuned(
            model, execution, plan.footprint, settings, loop_hooks, run.anchor / choices.COMPILED, not slot.done
        ):
            result = train(
                model,
                rollouts,
                OptimizerSettings.of(params),
                schedule,
                settings,
                slot.path,
                loop_hooks,
                selection_key=(lambda score: [score["reward"]]) if params.select == "best" else None,
                objective=Grpo(params.kl_coefficient, params.clip_low, params.clip_high),
            )
        facts = {"tokenizer_digest": tokenizer.digest, "template_hash": base_facts["template_hash"]}
        save_model(OUT, model, config, facts, parents=parents, history=result.trained_by)
        rollouts.clear()
        slot.mark_done()
    run.metrics({**result.metrics(config), "questions": len(items), "chosen_step": result.chosen_step})
    run.plot("grpo", result.curve)
    run.plot("grpo_validation", result.validation_rows(lambda row: {n: row[n] for n in ("reward", "correct")}))
    run.fact(**result.trained_by, **with_rates(result.timings(config), plan.device, plan.footprint.precision))


def scalars(score: dict[str, Any]) -> dict[str, float | None]:
    return {"val_reward": score["reward"], "val_correct": score["correct"]}


if __name__ == "__main__":
    stage_main("grpo", run)
