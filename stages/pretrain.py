"""Train the base model on the token shards, from random weights or from where an earlier run stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest
from athanor.data.sampler import PretrainSampler
from athanor.data.shards import open_val, read_shards_manifest
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import save_model
from athanor.runtime import choices
from athanor.runtime.hooks import bases, hooks, text_sampler, with_rates
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.runtime.slots import Slot
from athanor.training.bigrams import first_model
from athanor.training.loop import train
from athanor.training.model_params import ModelParams
from athanor.training.optimizer import OptimizerSettings
from athanor.training.preflight import preflight
from athanor.training.pretrain_params import PretrainParams
from athanor.training.pretraining import HeldOut, Prepared
from athanor.training.schedule import Schedule, round_down_to_steps
from athanor.training.setup import ExecutionPlan, tuned
from athanor.training.step import probe_batch
from athanor.training.vocabulary import check_same, load_vocabulary
from athanor.training.world import init_world

SHARDS, TOKENIZER, OUT = Path("data/shards"), Path("models/tokenizer"), Path("models/base")
# They shape what is shown or how long it takes, never the weights or a metric.
NOT_IN_RESULT = ("sample_every_tokens", "sample_prompts")
# They shape the cooldown of a wsd run and nothing before it.
NOT_IN_TRUNK = ("tokens", "cooldown_fraction", "cooldown_shape", "final_lr_fraction")


def prepare(run: Run, params: PretrainParams) -> Prepared:
    """Read the inputs, and build from them and the parameters everything that decides the result."""
    vocabulary = load_vocabulary(TOKENIZER)
    check_same(vocabulary, read_shards_manifest(SHARDS), str(SHARDS), "shard", template=False)
    config = run.params("model", ModelParams).config(vocabulary.size)
    total = round_down_to_steps(params.tokens, params.batch_tokens)
    final_lr, cooldown_tokens = params.lr * params.final_lr_fraction, int(total * params.cooldown_fraction)
    ends = (params.warmup_tokens, cooldown_tokens, total)
    schedule = Schedule(params.schedule, params.lr, final_lr, *ends, params.cooldown_shape)
    wsd, batch_tokens = params.schedule == "wsd", params.batch_tokens
    # Where the trunk ends: the first step that ends with a lower rate.
    cooldown_start = min(schedule.cooldown_start, total - batch_tokens) // batch_tokens * batch_tokens if wsd else None
    sampler = PretrainSampler(SHARDS, config.context_tokens, params.seed, cooldown_start)
    held_out = HeldOut(open_val(SHARDS), params.validation_max_bytes, vocabulary.token_bytes)
    adam = OptimizerSettings.of(params)
    inputs = {"tokenizer": vocabulary.digest, "shards": sampler.manifest}
    return Prepared(config, vocabulary, schedule, adam, sampler, held_out, inputs)


def execution_plan(
    run: Run, slots: tuple[Slot | None, ...], params: PretrainParams, config: ModelConfig, total: int
) -> ExecutionPlan:
    """The processes, the choices stored in the slots, and the settings that follow; also seeds the global generators."""
    local = machine()
    world = init_world(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    execution = choices.chosen(
        run, slots, config, params.precision, params.batch_tokens, total, world, params.optimizer
    )
    return ExecutionPlan.of(
        "pretrain",
        params,
        local,
        world,
        execution,
        config,
        total_tokens=total,
        document_mask=params.document_mask,
        validation_every_tokens=params.validation_every_tokens,
        sample_every_tokens=params.sample_every_tokens,
    )


def run(run: Run) -> None:
    params = run.params("pretrain", PretrainParams)
    config, vocabulary, schedule, adam, sampler, held_out, inputs = prepare(run, params)
    total, wsd = schedule.total_tokens, params.schedule == "wsd"
    if (rounds := sampler.epochs(total)["epochs"]) >= 1.05:
        once = f"pretrain.tokens: {round(total / rounds)} reads it once"
        run.note(f"the shards' stream is read {rounds:.1f} times, each source that often times its epochs; {once}")
    result_params = {key: value for key, value in dataclasses.asdict(params).items() if key not in NOT_IN_RESULT}
    trunk_params = {key: value for key, value in result_params.items() if key not in NOT_IN_TRUNK}
    trunk_inputs = {**inputs, "shards": sampler.trunk_manifest}
    trunk = run.trunk({"model": config.to_dict(), "pretrain": trunk_params}, trunk_inputs) if wsd else None
    slot = run.slot({"model": config.to_dict(), "pretrain": result_params}, inputs)
    world, device, footprint, settings, execution = execution_plan(run, (slot, trunk), params, config, total)
    with slot, run.progress(total, "pretrain", "tokens") as bar:
        own_cooldown_data = "cooldown_epochs" in sampler.epochs(total)
        ids = 0 if params.bigram_tokens else vocabulary.size  # the first loss says nothing where pairs are known
        run.watch_health(schedule, params.batch_tokens, ids, own_cooldown_data, execution.precision)

        def validate(model: Transformer) -> dict[str, Any]:
            return held_out.scores(model, execution.precision, settings.threads, world)

        def before_first_step(model: Transformer) -> None:
            batch = probe_batch(sampler.batch(0, params.batch_tokens), params.document_mask)
            how = {"fresh": not params.bigram_tokens, "precision": execution.precision}
            run.fact(preflight=str(preflight(model, batch.to(device), **how)))

        def on_sample(step: int, model: Transformer) -> None:
            texts = text_sampler(TOKENIZER, params.sample_prompts)(model) if params.sample_prompts else []
            run.journal.event("sample", step=step, texts=texts)

        loop_hooks = hooks(
            run,
            bar,
            sampler,
            params.batch_tokens,
            validate=validate,
            scalars=lambda scores: {f"val_bpb.{name}": score["bpb"] for name, score in scores.items()},
            before_first_step=before_first_step,
            bases=bases(device, execution.precision),
            on_sample=on_sample,
        )
        world.choose_strategy(config, footprint, device, slot.identity, check=not slot.done)
        model = first_model(config, params.seed, SHARDS, 0 if slot.done else params.bigram_tokens).to(device)
        with tuned(model, execution, footprint, settings, loop_hooks, run.anchor / choices.COMPILED, not slot.done):
            result = train(model, sampler, adam, schedule, settings, slot.path, loop_hooks, trunk, world)
        if not world.main:
            return
        facts = {"tokenizer_digest": vocabulary.digest, "template_hash": vocabulary.template_hash}
        parents = {"shards": sampler.manifest, "tokenizer": manifest_digest(TOKENIZER)}
        save_model(
            OUT,
            model,
            config,
            {**facts, "skipped_ranges": result.skipped_ranges},
            parents=parents,
            history=result.trained_by,
        )
        slot.mark_done()
    run.metrics({**result.metrics(config), **sampler.epochs(result.tokens)})
    run.plot("pretrain", result.curve)
    names = sorted(result.validations[-1]["scores"])  # a resumed run has them sorted
    run.plot("pretrain_validation", result.validation_rows(lambda scores: {n: scores[n]["bpb"] for n in names}))
    run.fact(**result.trained_by, **with_rates(result.timings(config), device, footprint.precision))


if __name__ == "__main__":
    stage_main("pretrain", run, several=True)
