"""Train the base model on the token shards, from random weights or from where an earlier run stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from athanor.artifacts import manifest_digest
from athanor.data.order import permutation
from athanor.data.sampler import PretrainSampler
from athanor.data.shards import TokenStream, open_val, read_shards_manifest
from athanor.model.transformer import Transformer
from athanor.params.model import ModelParams
from athanor.params.pretrain import PretrainParams
from athanor.pipeline import observe
from athanor.pipeline.machine import machine
from athanor.pipeline.run import Run, stage_main
from athanor.training.loop import Hooks, train
from athanor.training.optimizer import AdamWSettings
from athanor.training.preflight import preflight
from athanor.training.schedule import Schedule, whole_steps
from athanor.training.settings import LoopSettings
from athanor.training.setup import place
from athanor.training.step import probe_batch
from athanor.training.validation import bits_per_byte, pooled
from athanor.training.vocabulary import Vocabulary, check_same, load_vocabulary
from athanor.training.weights import save_model
from athanor.training.world import join

SHARDS, TOKENIZER, OUT = Path("data/shards"), Path("models/tokenizer"), Path("models/base")
# They shape what is shown or how long it takes, never the weights or a metric.
NOT_IN_RESULT = ("sample_every_tokens", "sample_prompts")
# They shape the cooldown of a wsd run and nothing before it.
NOT_IN_TRUNK = ("tokens", "cooldown_fraction", "final_lr_fraction")


def run(run: Run) -> None:
    params, vocabulary, local = run.params("pretrain", PretrainParams), load_vocabulary(TOKENIZER), machine()
    check_same(vocabulary, read_shards_manifest(SHARDS), str(SHARDS), "shard", template=False)
    config = run.params("model", ModelParams).config(vocabulary.size)
    world = join(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    device, load = place(
        config,
        device=local.device,
        threads=local.threads,
        micro_batch_tokens=local.micro_batch_tokens,
        batch_tokens=params.batch_tokens,
        precision=params.precision,
        section="pretrain",
        seed=params.seed,
    )
    total = whole_steps(params.tokens, params.batch_tokens)
    lowest, cooling = params.lr * params.final_lr_fraction, int(total * params.cooldown_fraction)
    schedule = Schedule(params.schedule, params.lr, lowest, params.warmup_tokens, cooling, total)
    settings = LoopSettings(
        total_tokens=total,
        batch_tokens=params.batch_tokens,
        grad_clip=params.grad_clip,
        z_loss=params.z_loss,
        precision=params.precision,
        document_mask=params.document_mask,
        validation_every_tokens=params.validation_every_tokens,
        sample_every_tokens=params.sample_every_tokens,
        micro_batch_rows=load.micro_batch_rows,
        threads=local.threads,
        log_every_steps=local.log_every_steps,
        save_every_seconds=local.save_every_seconds,
    )
    wsd, step = params.schedule == "wsd", params.batch_tokens
    # Where the trunk ends: the first step that ends with a lower rate.
    cooldown = min(schedule.cooldown_start, total - step) // step * step if wsd else None
    sampler = PretrainSampler(SHARDS, config.context_tokens, params.seed, cooldown)
    if (rounds := sampler.epochs(total)["epochs"]) > 1:
        run.note(f"the shards' stream is read {rounds:.1f} times: multiply the epochs of each source by that")
    held_out = {n: held_out_documents(s, params.validation_max_bytes, vocabulary) for n, s in open_val(SHARDS).items()}
    chosen = {key: value for key, value in dataclasses.asdict(params).items() if key not in NOT_IN_RESULT}
    inputs = {"tokenizer": vocabulary.digest, "shards": sampler.manifest}
    shared = {key: value for key, value in chosen.items() if key not in NOT_IN_TRUNK}
    trunk_inputs = {**inputs, "shards": sampler.trunk_manifest}
    trunk = run.trunk({"model": config.to_dict(), "pretrain": shared}, trunk_inputs) if wsd else None
    slot = run.slot({"model": config.to_dict(), "pretrain": chosen}, inputs)
    with slot, run.progress(total, "pretrain", "tokens") as bar:

        def validate(model: Transformer) -> dict[str, Any]:
            how = {"precision": params.precision, "threads": local.threads, "world": world}
            scores = {
                name: bits_per_byte(model, documents, vocabulary.token_bytes, config.context_tokens, **how)
                for name, documents in held_out.items()
            }
            return {name: dataclasses.asdict(score) for name, score in {**scores, "all": pooled(scores)}.items()}

        def before_first_step(model: Transformer) -> None:
            batch = probe_batch(sampler.batch(0, params.batch_tokens), params.document_mask)
            run.fact(preflight=str(preflight(model, batch.to(device))))

        def on_replay(row: dict[str, float]) -> None:
            run.log(int(row["step"]), **{key: value for key, value in row.items() if key != "step"})

        def on_step(row: dict[str, float]) -> None:
            on_replay(row)
            bar.update(params.batch_tokens, f"loss {row['loss']:.3f}")

        def on_sample(step: int, model: Transformer) -> None:
            texts = observe.sampler(TOKENIZER, params.sample_prompts)(model) if params.sample_prompts else []
            run.journal.event("sample", step=step, texts=texts)

        hooks = Hooks(
            validate=validate,
            before_first_step=before_first_step,
            on_resume=bar.resume_at,
            on_replay=on_replay,
            on_step=on_step,
            on_validation=lambda step, scores: run.log(step, **{f"val_bpb.{k}": v["bpb"] for k, v in scores.items()}),
            on_sample=on_sample,
            on_note=run.note,
            should_stop=run.stop_requested,
        )
        adam = AdamWSettings(params.beta1, params.beta2, params.eps, params.weight_decay)
        world.settle(config, load, device, slot.fingerprint, check=not slot.done)
        model = Transformer.fresh(config, params.seed).to(device)
        result = train(model, sampler, adam, schedule, settings, slot.path, hooks, trunk, world)
        if not world.main:
            return
        facts = {"tokenizer_digest": vocabulary.digest, "template_hash": vocabulary.template_hash}
        parents = {"shards": sampler.manifest, "tokenizer": manifest_digest(TOKENIZER)}
        save_model(OUT, model, config, facts, parents=parents)
        slot.mark_done()
    run.metrics({**result.metrics(config), **sampler.epochs(result.tokens)})
    run.plot("pretrain", result.curve)
    names = sorted(result.validations[-1]["scores"])  # a resumed run has them sorted
    run.plot("pretrain_validation", result.validation_rows(lambda scores: {n: scores[n]["bpb"] for n in names}))
    run.fact(**result.timings(config))


def held_out_documents(stream: TokenStream, max_bytes: int, vocabulary: Vocabulary) -> list[np.ndarray]:
    """Documents of one source's validation split in a fixed mixed order, until `max_bytes` of text."""
    documents, taken = [], 0
    for number in permutation(stream.documents, "validation").tolist():
        documents.append(stream.document(number))
        taken += int(vocabulary.token_bytes[documents[-1]].sum())
        if taken >= max_bytes:
            break
    return documents


if __name__ == "__main__":
    stage_main("pretrain", run, several=True)
