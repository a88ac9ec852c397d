"""Fine-tune the base model on packed conversations, supervising what the assistant says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from athanor.artifacts import manifest_digest, read_manifest
from athanor.data import rows as packed
from athanor.data.order import permutation
from athanor.data.sampler import SftSampler
from athanor.model.transformer import Transformer
from athanor.params.sft import SftParams
from athanor.pipeline import choices
from athanor.pipeline.machine import machine
from athanor.pipeline.process import stage_main
from athanor.pipeline.run import Run
from athanor.pipeline.speed import gauge
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.preflight import preflight
from athanor.training.schedule import Schedule, whole_steps
from athanor.training.settings import LoopSettings
from athanor.training.setup import Place, place, tuned
from athanor.training.step import probe_batch
from athanor.training.validation import conversation_loss
from athanor.training.vocabulary import check_same, load_vocabulary
from athanor.training.weights import load_config, load_model, save_model
from athanor.training.world import join

BASE, DATA, TOKENIZER, OUT = Path("models/base"), Path("data/sft"), Path("models/tokenizer"), Path("models/sft")


def run(run: Run) -> None:
    params, vocabulary, local = run.params("sft", SftParams), load_vocabulary(TOKENIZER), machine()
    check_same(vocabulary, read_manifest(DATA, packed.KIND, packed.VERSION), str(DATA), "sft-data", template=True)
    config, base_facts = load_config(BASE)
    check_same(vocabulary, base_facts, str(BASE), "pretrain", template=False)
    sampler = SftSampler(DATA, config.context_tokens, params.seed)
    held_out = held_out_conversations(params.validation_max_conversations)
    total = whole_steps(int(params.epochs * sampler.tokens_per_epoch), params.batch_tokens)
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
    world = join(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    how = choices.chosen(run, (slot,), config, params.precision, params.batch_tokens, total, world)
    where = Place(local.device, local.threads, "sft", params.seed)
    device, load = place(config, how, where, params.batch_tokens, params.optimizer)
    settings = LoopSettings.of(
        params,
        local,
        total_tokens=total,
        precision=how.precision,
        document_mask=True,  # conversations that share a row must not see each other
        validation_every_tokens=max(1, int(sampler.tokens_per_epoch / per_epoch)) if per_epoch else 0,
        sample_every_tokens=0,
        micro_batch_rows=load.micro_batch_rows,
    )
    with slot, gauge(device, load.precision) as told, run.progress(total, "sft", "tokens") as bar:
        run.watch_health(schedule, params.batch_tokens, vocabulary.size)

        def validate(model: Transformer) -> dict[str, Any]:
            with_ = {"precision": how.precision, "threads": local.threads, "world": world}
            return dataclasses.asdict(conversation_loss(model, held_out, config.context_tokens, **with_))

        def before_first_step(model: Transformer) -> None:
            batch = probe_batch(sampler.batch(0, params.batch_tokens), True)
            run.fact(preflight=str(preflight(model, batch.to(device), fresh=False)))

        def on_replay(row: dict[str, float]) -> None:
            run.log(int(row["step"]), **{key: value for key, value in row.items() if key != "step"})

        def on_step(row: dict[str, float]) -> None:
            on_replay(row)
            bar.update(params.batch_tokens, f"loss {row['loss']:.3f}")

        hooks = Hooks(
            validate=run.lasting("validation", validate),
            before_first_step=before_first_step,
            on_resume=bar.resume_at,
            on_replay=on_replay,
            on_step=on_step,
            on_validation=lambda step, score: run.log(step, val_loss=score["loss"]),
            on_rollback=lambda step, facts: run.rewind(step, bar, params.batch_tokens, **facts),
            on_event=lambda name, facts: run.journal.event(name, **facts),
            name_document=sampler.document_name,
            on_note=run.note,
            should_stop=run.stop_requested,
            should_save=run.save_requested,
        )
        world.settle(config, load, device, slot.fingerprint, check=not slot.done)
        model, _ = load_model(BASE, device)
        adam = OptimizerSettings.of(params)
        with tuned(model, how, load, settings, hooks, run.anchor / choices.COMPILED, not slot.done):
            result = train(model, sampler, adam, schedule, settings, slot.path, hooks, world=world)
        if not world.main:
            return
        facts = {"tokenizer_digest": vocabulary.digest, "template_hash": vocabulary.template_hash}
        save_model(OUT, model, config, {**facts, "skipped_ranges": result.skipped_ranges}, parents=parents)
        slot.mark_done()
    run.metrics({**result.metrics(config), "epochs": sampler.epoch(result.tokens)})
    run.plot("sft", result.curve)
    run.plot("sft_validation", result.validation_rows(lambda score: {"loss": score["loss"]}))
    run.fact(**told(result.timings(config)))


def held_out_conversations(most: int) -> list[Any]:
    """(ids, mask) of held-out conversations, a fixed mixed choice of at most `most`."""
    rows = packed.PackedRows(DATA, "val")
    return [rows.conversation(number) for number in permutation(rows.conversation_count, "validation")[:most].tolist()]


if __name__ == "__main__":
    stage_main("sft", run, several=True)
