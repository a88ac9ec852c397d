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
from athanor.pipeline.machine import machine
from athanor.pipeline.run import Run, stage_main
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import AdamWSettings
from athanor.training.preflight import preflight
from athanor.training.schedule import Schedule, whole_steps
from athanor.training.settings import LoopSettings
from athanor.training.setup import place
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
    world = join(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    device, load = place(
        config,
        device=local.device,
        threads=local.threads,
        micro_batch_tokens=local.micro_batch_tokens,
        batch_tokens=params.batch_tokens,
        precision=params.precision,
        section="sft",
        seed=params.seed,
    )
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
    settings = LoopSettings(
        total_tokens=total,
        batch_tokens=params.batch_tokens,
        grad_clip=params.grad_clip,
        z_loss=params.z_loss,
        precision=params.precision,
        document_mask=True,  # conversations that share a row must not see each other
        validation_every_tokens=max(1, int(sampler.tokens_per_epoch / per_epoch)) if per_epoch else 0,
        sample_every_tokens=0,
        micro_batch_rows=load.micro_batch_rows,
        threads=local.threads,
        log_every_steps=local.log_every_steps,
        save_every_seconds=local.save_every_seconds,
    )
    parents = {"base": manifest_digest(BASE), "sft": sampler.manifest, "tokenizer": manifest_digest(TOKENIZER)}
    with run.slot(dataclasses.asdict(params), parents) as slot, run.progress(total, "sft", "tokens") as bar:

        def validate(model: Transformer) -> dict[str, Any]:
            how = {"precision": params.precision, "threads": local.threads, "world": world}
            return dataclasses.asdict(conversation_loss(model, held_out, config.context_tokens, **how))

        def before_first_step(model: Transformer) -> None:
            batch = probe_batch(sampler.batch(0, params.batch_tokens), True)
            run.fact(preflight=str(preflight(model, batch.to(device), fresh=False)))

        def on_replay(row: dict[str, float]) -> None:
            run.log(int(row["step"]), **{key: value for key, value in row.items() if key != "step"})

        def on_step(row: dict[str, float]) -> None:
            on_replay(row)
            bar.update(params.batch_tokens, f"loss {row['loss']:.3f}")

        hooks = Hooks(
            validate=validate,
            before_first_step=before_first_step,
            on_resume=bar.resume_at,
            on_replay=on_replay,
            on_step=on_step,
            on_validation=lambda step, score: run.log(step, val_loss=score["loss"]),
            on_note=run.note,
            should_stop=run.stop_requested,
        )
        world.settle(config, load, device, slot.fingerprint, check=not slot.done)
        model, _ = load_model(BASE, device)
        adam = AdamWSettings(params.beta1, params.beta2, params.eps, params.weight_decay)
        result = train(model, sampler, adam, schedule, settings, slot.path, hooks, world=world)
        if not world.main:
            return
        facts = {"tokenizer_digest": vocabulary.digest, "template_hash": vocabulary.template_hash}
        save_model(OUT, model, config, facts, parents=parents)
        slot.mark_done()
    run.metrics({**result.metrics(config), "epochs": sampler.epoch(result.tokens)})
    run.plot("sft", result.curve)
    run.plot("sft_validation", result.validation_rows(lambda score: {"loss": score["loss"]}))
    run.fact(**result.timings(config))


def held_out_conversations(most: int) -> list[Any]:
    """(ids, mask) of held-out conversations, a fixed mixed choice of at most `most`."""
    rows = packed.PackedRows(DATA, "val")
    return [rows.conversation(number) for number in permutation(rows.conversation_count, "validation")[:most].tolist()]


if __name__ == "__main__":
    stage_main("sft", run, several=True)
