"""Preference optimisation on pairs of answers: DPO, from the fine-tuned model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.data import rows as packed
from athanor.model.transformer import Transformer
from athanor.model.weights import load_config, load_model, save_model
from athanor.policy.objectives import Dpo
from athanor.policy.pairs import PairSampler, validate
from athanor.policy.params import DpoParams
from athanor.runtime import choices
from athanor.runtime.hooks import bases, hooks, with_rates
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.training.loop import train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.schedule import Schedule, round_down_to_steps
from athanor.training.setup import ExecutionPlan, tuned
from athanor.training.vocabulary import check_same, load_vocabulary
from athanor.training.world import SINGLE

BASE, DATA, TOKENIZER, OUT = Path("models/sft"), Path("data/dpo"), Path("models/tokenizer"), Path("models/dpo")


def run(run: Run) -> None:
    params, local, vocabulary = run.params("dpo", DpoParams), machine(), load_vocabulary(TOKENIZER)
    check_same(vocabulary, read_manifest(DATA, packed.KIND, packed.VERSION), str(DATA), "dpo-data", template=True)
    config, base_facts = load_config(BASE)
    check_same(vocabulary, base_facts, str(BASE), "sft", template=True)
    parents = {"base": manifest_digest(BASE), "data": manifest_digest(DATA), "tokenizer": manifest_digest(TOKENIZER)}
    slot = run.slot(dataclasses.asdict(params), parents)
    rows = packed.PackedRows(DATA)
    epoch_tokens = len(rows) * config.context_tokens
    total = round_down_to_steps(int(params.epochs * epoch_tokens), params.batch_tokens)
    warmup = int(total * params.warmup_fraction)
    schedule = Schedule("cosine", params.lr, params.lr * params.final_lr_fraction, warmup, 0, total)
    execution = choices.chosen(
        run, (slot,), config, params.precision, params.batch_tokens, total, optimizer=params.optimizer
    )
    per_epoch = params.validations_per_epoch
    plan = ExecutionPlan.of(
        "dpo",
        SimpleNamespace(**dataclasses.asdict(params), z_loss=0.0, spike_guard=True, max_rollbacks=0),
        local,
        SINGLE,
        execution,
        config,
        keeps_best=params.select == "best",
        total_tokens=total,
        document_mask=True,
        validation_every_tokens=max(1, int(epoch_tokens / per_epoch)) if per_epoch else 0,
        sample_every_tokens=0,
    )
    settings = dataclasses.replace(plan.settings, overlap=False)
    objective = Dpo(params.beta, params.normalised)
    with slot, run.progress(total, "dpo", "tokens") as bar:
        run.watch_health(schedule, params.batch_tokens, vocabulary.size, precision=execution.precision)
        model, reference = (load_model(BASE, plan.device)[0] for _ in range(2))
        sampler, held_out = (
            PairSampler(DATA, reference, execution.precision, params.seed, split) for split in ("train", "val")
        )

        def score(model: Transformer) -> dict[str, Any]:
            return validate(model, held_out, objective, execution.precision)

        loop_hooks = hooks(
            run,
            bar,
            sampler,
            params.batch_tokens,
            validate=score,
            scalars=scalars,
            before_first_step=lambda model: run.log(0, **scalars(score(model))),
            bases=bases(plan.device, execution.precision),
        )
        with tuned(
            model, execution, plan.footprint, settings, loop_hooks, run.anchor / choices.COMPILED, not slot.done
        ):
            result = train(
                model,
                sampler,
                OptimizerSettings.of(params),
                schedule,
                settings,
                slot.path,
                loop_hooks,
                selection_key=(lambda score: [-score["loss"]]) if params.select == "best" else None,
                objective=objective,
            )
        facts = {"tokenizer_digest": vocabulary.digest, "template_hash": vocabulary.template_hash}
        save_model(OUT, model, config, facts, parents=parents, history=result.trained_by)
        slot.mark_done()
    run.metrics(
        {**result.metrics(config), "chosen_step": result.chosen_step, "epochs": sampler.order.epoch(result.tokens)}
    )
    run.plot("dpo", result.curve)
    run.plot("dpo_validation", result.validation_rows(lambda row: {n: row[n] for n in ("loss", "accuracy", "margin")}))
    run.fact(**result.trained_by, **with_rates(result.timings(config), plan.device, plan.footprint.precision))


def scalars(score: dict[str, Any]) -> dict[str, float | None]:
    return {"val_loss": score["loss"], "val_accuracy": score["accuracy"]}


if __name__ == "__main__":
    stage_main("dpo", run)
