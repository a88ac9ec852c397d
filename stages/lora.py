"""Fine-tune a foreign base with a LoRA, on packed conversations, supervising what the assistant says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from athanor.adapters import foreign, lora
from athanor.adapters.foreign import Foreign
from athanor.adapters.foreign_files import base_digests
from athanor.adapters.params import LoraParams
from athanor.base.artifacts import digest, new_dir, read_manifest, write_manifest
from athanor.base.errors import InputError
from athanor.data import rows as packed
from athanor.runtime import choices
from athanor.runtime.hooks import bases, hooks, with_rates
from athanor.runtime.machine import machine
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.training.finetuning import FineTuning
from athanor.training.loop import train
from athanor.training.optimizer import OptimizerSettings
from athanor.training.setup import check_batch
from athanor.training.sft_params import SftParams
from athanor.training.world import init_world

DATA, OUT = Path("data/lora"), Path("models/lora")
KIND, VERSION = "lora", 1


def run(run: Run) -> None:
    params, local = run.params("sft", SftParams), machine()
    settings = lora.LoraSettings(**dataclasses.asdict(run.params("lora", LoraParams)))
    rows, digests = read_manifest(DATA, packed.KIND, packed.VERSION), base_digests(params.base)
    if rows["tokenizer"] != digests.get("tokenizer.json"):
        raise InputError("made with another tokenizer", where=str(DATA), fix="athanor repro")
    shape = foreign.shape(params.base, settings, rows["context_tokens"])
    check_batch(shape, params.batch_tokens, "sft")
    check_ids(shape.vocab_size, params.base)
    tuning = FineTuning(params, DATA, shape.context_tokens)
    sampler, schedule = tuning.sampler, tuning.schedule
    total = schedule.total_tokens
    parents = {"base": digest(digests), "sft": sampler.manifest}
    # The base counts by its content and not by its path.
    sft_recipe = {name: value for name, value in dataclasses.asdict(params).items() if name != "base"}
    recipe = {"sft": sft_recipe, "lora": dataclasses.asdict(settings)}
    slot = run.slot(recipe, parents)
    world = init_world(local.parallel, device=local.device, timeout_s=local.launch.timeout_s, main=run.main)
    execution = choices.chosen(
        run, (slot,), shape, params.precision, params.batch_tokens, total, world, params.optimizer
    )
    execution, notes = foreign.adjust_precision(execution, params.base, requested=params.precision)
    for note in notes:
        run.note(note)
    plan = tuning.execution_plan(local, world, execution, shape)
    device, footprint = plan.device, plan.footprint
    config = foreign.with_half_storage(shape, execution.precision, device)
    with slot, run.progress(total, "lora", "tokens") as bar:
        run.watch_health(schedule, params.batch_tokens, config.vocab_size, precision=execution.precision)

        def validate(model: Foreign) -> dict[str, Any]:
            return tuning.validate(model, plan)

        def before_first_step(model: Foreign) -> None:
            run.fact(preflight=str(foreign.preflight(model, tuning.probe_batch(device), execution.precision)))

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
        if world.sharded:
            fix = "parallel: ddp in machine.yaml, and checkpointing: on if memory is short"
            raise InputError("a LoRA is trained with the base whole in each process", where="machine.parallel", fix=fix)
        model = foreign.load_foreign(
            params.base, settings, config.context_tokens, params.seed, execution.precision, device
        )
        adam = OptimizerSettings.of(params)
        with foreign.tuned(model, execution, footprint):
            with model.without_adapters():
                base_validation = run.long_operation("validation", validate)(model)
            result = train(
                model,
                sampler,
                adam,
                schedule,
                plan.settings,
                slot.path,
                loop_hooks,
                world=world,
                selection_key=tuning.selection_key,
            )
        if not world.main:
            return
        with new_dir(OUT) as folder:
            lora.save_adapter(folder, dict(model.named_parameters()), settings, params.base)
            counts = {"base": config.base_count, "adapters": config.adapters}
            facts = {"files_of_base": digests, "template_hash": rows["template_hash"], **recipe}
            facts |= {"skipped_ranges": result.skipped_ranges, **result.trained_by}
            write_manifest(folder, kind=KIND, version=VERSION, counts=counts, parents=parents, **facts)
        slot.mark_done()
    selection = {"epochs": sampler.epoch(result.tokens), "chosen_step": result.chosen_step, "adapters": config.adapters}
    run.metrics({**result.metrics(config), **selection, "base_validation": base_validation})
    run.plot("lora", result.curve)
    run.plot("lora_validation", result.validation_rows(lambda row: {name: row[name] for name in ("loss", "stop_rate")}))
    run.fact(**result.trained_by, **with_rates(result.timings(config), device, footprint.precision))


def check_ids(vocab_size: int, base: str) -> None:
    """Raise InputError for a token without a row in the embedding, because on a device it would end the process."""
    splits = [packed.PackedRows(DATA, split) for split in ("train", "val")]
    largest = max(int(s.conversation(n)[0].max()) for s in splits for n in range(s.conversation_count))
    if max(largest, splits[0].pad) >= vocab_size:
        what = f"token {max(largest, splits[0].pad)} has no row in the embedding, which has {vocab_size}"
        fix = "resize the embeddings: model.resize_token_embeddings(len(tokenizer)), then save both again"
        raise InputError(what, where=base, fix=fix)


if __name__ == "__main__":
    stage_main("lora", run, several=True)
