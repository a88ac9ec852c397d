"""Fine-tune the base model on packed conversations, supervising what the assistant says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.base.errors import ParamsError
from athanor.data import rows as packed
from athanor.data.sampler import SftSampler
from athanor.model.transformer import Transformer
from athanor.model.validation import conversation_loss
from athanor.model.weights import load_config, load_model, save_model
from athanor.runtime import choices
from athanor.runtime.hooks import hooks, with_rates
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.training.best import by_stops_and_loss
from athanor.training.loop import train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.preflight import preflight
from athanor.training.schedule import Schedule, round_down_to_steps
from athanor.training.settings import LoopSettings
from athanor.training.setup import DeviceSpec, setup_device, tuned
from athanor.training.sft_params import SCRATCH, SftParams
from athanor.training.step import probe_batch
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
    sampler = SftSampler(DATA, config.context_tokens, params.seed)
    held_out, stop = packed.held_out(DATA, params.validation_max_conversations)
    total = round_down_to_steps(int(params.epochs * sampler.tokens_per_epoch), params.batch_tokens)
    schedule = Schedule(
        params.schedule,
        params.lr,
        params.lr * params.final_lr_fraction,
        int(total * params.warmup_fraction),
        int(total * params.cooldown_fraction),
        total,
    )
    per_epoch = params.validations_per_epoch
    parents = {"base": manifest_digest(BASE), "sft": sampler.manifest, "tokenizer": manifest_digest(TOKENIZER)}
    slot = run.slot(dataclasses.asdict(params), parents)
    world = init_world(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    execution = choices.chosen(run, (slot,), config, params.precision, params.batch_tokens, total, world)
    device_spec = DeviceSpec(local.device, local.threads, "sft", params.seed)
    device, footprint = setup_device(
        config, execution, device_spec, params.batch_tokens, params.optimizer, params.select == "best"
    )
    settings = LoopSettings.of(
        params,
        local,
        total_tokens=total,
        precision=execution.precision,
        document_mask=True,  # conversations that share a row must not see each other
        validation_every_tokens=max(1, int(sampler.tokens_per_epoch / per_epoch)) if per_epoch else 0,
        sample_every_tokens=0,
        micro_batch_rows=footprint.micro_batch_rows,
        footprint=footprint,
    )
    with slot, run.progress(total, "sft", "tokens") as bar:
        run.watch_health(schedule, params.batch_tokens, vocabulary.size, precision=execution.precision)

        def validate(model: Transformer) -> dict[str, Any]:
            options = {"precision": execution.precision, "threads": local.threads, "world": world}
            return dataclasses.asdict(conversation_loss(model, held_out, config.context_tokens, stop, **options))

        def before_first_step(model: Transformer) -> None:
            batch = probe_batch(sampler.batch(0, params.batch_tokens), True)
            run.fact(preflight=str(preflight(model, batch.to(device), fresh=False)))

        loop_hooks = hooks(
            run,
            bar,
            sampler,
            params.batch_tokens,
            validate=validate,
            scalars=lambda score: {"val_loss": score["loss"]},
            before_first_step=before_first_step,
        )
        world.choose_strategy(config, footprint, device, slot.identity, check=not slot.done)
        model, _ = load_model(BASE, device)
        adam = OptimizerSettings.of(params)
        with tuned(model, execution, footprint, settings, loop_hooks, run.anchor / choices.COMPILED, not slot.done):
            selection_key = by_stops_and_loss(params.min_stop_rate) if params.select == "best" else None
            result = train(
                model,
                sampler,
                adam,
                schedule,
                settings,
                slot.path,
                loop_hooks,
                world=world,
                selection_key=selection_key,
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
