"""Fine-tune the base model on packed conversations, supervising what the assistant says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.base.errors import ParamsError
from athanor.data import rows as packed
from athanor.model.transformer import Transformer
from athanor.model.weights import load_config, load_model, save_model
from athanor.runtime import choices
from athanor.runtime.hooks import bases, hooks, with_rates
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.training.finetuning import FineTuning
from athanor.training.loop import train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.preflight import preflight
from athanor.training.setup import tuned
from athanor.training.sft_params import SCRATCH, SftParams
from athanor.training.vocabulary import check_same, load_vocabulary
from athanor.training.world import init_world

BASE, DATA, TOKENIZER, OUT = Path("models/base"), Path("data/sft"), Path("models/tokenizer"), Path("models/sft")


def run(run: Run) -> None:
    params, vocabulary, local = run.params("sft", SftParams), load_vocabulary(TOKENIZER), machine()
    if params.base != SCRATCH:
        raise ParamsError(
            f"'{params.base}' is not what this stage tunes", where="sft.base", fix="athanor repro runs what is"
        )
    check_same(vocabulary, read_manifest(DATA, packed.KIND, packed.VERSION), str(DATA), "sft-data", template=True)
    config, base_facts = load_config(BASE)
    check_same(vocabulary, base_facts, str(BASE), "pretrain", template=False)
    tuning = FineTuning(params, DATA, config.context_tokens)
    sampler, schedule = tuning.sampler, tuning.schedule
    total = schedule.total_tokens
    parents = {"base": manifest_digest(BASE), "sft": sampler.manifest, "tokenizer": manifest_digest(TOKENIZER)}
    slot = run.slot(dataclasses.asdict(params), parents)
    world = init_world(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    execution = choices.chosen(
        run, (slot,), config, params.precision, params.batch_tokens, total, world, params.optimizer
    )
    plan = tuning.execution_plan(local, world, execution, config)
    device, footprint, settings = plan.device, plan.footprint, plan.settings
    with slot, run.progress(total, "sft", "tokens") as bar:
        run.watch_health(schedule, params.batch_tokens, vocabulary.size, precision=execution.precision)

        def validate(model: Transformer) -> dict[str, Any]:
            return tuning.validate(model, plan)

        def before_first_step(model: Transformer) -> None:
            run.fact(
                preflight=str(preflight(model, tuning.probe_batch(device), fresh=False, precision=execution.precision))
            )

        loop_hooks = hooks(
            run,
            bar,
            sampler,
            params.batch_tokens,
            validate=validate,
            scalars=lambda score: {"val_loss": score["loss"]},
            before_first_step=before_first_step,
            bases=bases(device, execution.precision),
        )
        world.choose_strategy(config, footprint, device, slot.identity, check=not slot.done)
        model, _ = load_model(BASE, device)
        adam = OptimizerSettings.of(params)
        with tuned(model, execution, footprint, settings, loop_hooks, run.anchor / choices.COMPILED, not slot.done):
            result = train(
                model,
                sampler,
                adam,
                schedule,
                settings,
                slot.path,
                loop_hooks,
                world=world,
                selection_key=tuning.selection_key,
            )
        if not world.main:
            return
        facts = {"tokenizer_digest": vocabulary.digest, "template_hash": vocabulary.template_hash}
        save_model(
            OUT,
            model,
            config,
            {**facts, "skipped_ranges": result.skipped_ranges},
            parents=parents,
            history=result.trained_by,
        )
        slot.mark_done()
    chosen = {"epochs": sampler.epoch(result.tokens), "chosen_step": result.chosen_step}
    run.metrics({**result.metrics(config), **chosen})
    run.plot("sft", result.curve)
    run.plot(
        "sft_validation", result.validation_rows(lambda score: {name: score[name] for name in ("loss", "stop_rate")})
    )
    run.fact(**result.trained_by, **with_rates(result.timings(config), device, footprint.precision))


if __name__ == "__main__":
    stage_main("sft", run, several=True)
