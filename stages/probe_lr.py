"""Try several learning rates on short runs of the pretrain recipe. Only people read the result: athanor probe lr."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

from athanor.base.artifacts import read_json, write_json
from athanor.base.errors import GateError, Interrupted, ParamsError
from athanor.runtime import choices
from athanor.runtime.process import stage_main
from athanor.runtime.progress import Progress
from athanor.runtime.run import Run
from athanor.runtime.slots import Slot
from athanor.training import checkpoint
from athanor.training.bigrams import first_model
from athanor.training.loop import Hooks, train
from athanor.training.pretrain_params import PretrainParams
from athanor.training.pretraining import Prepared
from athanor.training.probe import Point, diverged, fit, search, shortened
from athanor.training.probe_params import ProbeLrParams
from athanor.training.setup import tuned
from stages.pretrain import NOT_IN_RESULT, SHARDS, execution_plan, prepare

POINT = "point.json"
MIN_STEPS = 10


def run(run: Run) -> None:
    recipe, probe = run.params("pretrain", PretrainParams), run.params("probe_lr", ProbeLrParams)
    tokens, warmup = shortened(probe.tokens, recipe.tokens, recipe.batch_tokens, recipe.warmup_tokens)
    if tokens < MIN_STEPS * recipe.batch_tokens:
        advice = f"use {MIN_STEPS * recipe.batch_tokens} or more, here and in pretrain.tokens"
        raise ParamsError(f"{tokens // recipe.batch_tokens} steps are too few", where="probe_lr.tokens", fix=advice)
    unvalidated: dict[str, Any] = {"validation_every_tokens": 0, "sample_every_tokens": 0, "sample_prompts": ()}
    short_params = dataclasses.replace(recipe, tokens=tokens, warmup_tokens=warmup, **unvalidated)
    prepared = prepare(run, short_params)
    slot = run.slot({**_recipe(prepared, short_params), "probe_lr": dataclasses.asdict(probe)}, prepared.inputs)
    with slot, run.progress(0.0, "probe-lr", "tokens") as bar:
        bar.expect(tokens * probe.points)
        points = search(
            lambda lr: measure_lr(run, dataclasses.replace(short_params, lr=lr), bar),
            recipe.lr,
            probe.ratio,
            probe.points,
            probe.max_points,
        )
        slot.mark_done()
    fitted = fit(points)
    fields = ("optimum", "lowest", "highest", "inside", "extend", "tolerance")
    run.metrics(
        {
            **{name: getattr(fitted, name) for name in fields},
            "best": {"lr": fitted.best.lr, "bpb": fitted.best.bpb},
            "parabola": {"a": fitted.a, "b": fitted.b, "c": fitted.c},
            "points": [dataclasses.asdict(point) for point in points],
            "tokens": tokens,
        }
    )
    rows = [(p.lr, "" if p.bpb is None else p.bpb, fitted.at(p.lr) if fitted.a else "") for p in points]
    run.plot("probe_lr", [dict(zip(("lr", "bpb", "parabola"), row, strict=True)) for row in rows])


def _recipe(prepared: Prepared, params: PretrainParams) -> dict[str, Any]:
    """The parameters that decide the result of a run."""
    chosen = {key: value for key, value in dataclasses.asdict(params).items() if key not in NOT_IN_RESULT}
    return {"model": prepared.config.to_dict(), "pretrain": chosen}


def measure_lr(run: Run, params: PretrainParams, bar: Progress) -> Point:
    """The score of one learning rate: read from its slot, which other grids share, or trained on from its checkpoint."""
    if run.stop_requested():
        raise Interrupted("stopped between two rates; the same command goes on from there")
    prepared = prepare(run, params)
    if bar.done >= (bar.total or 0.0):
        bar.expect(params.tokens)
    slot = run.sub_slot(f"lr_{params.lr:g}", "stages.probe_lr", _recipe(prepared, params), prepared.inputs)
    with slot:
        if slot.done:
            bar.update(params.tokens)
        else:
            done_before = bar.done
            point = train_at_lr(run, params, prepared, slot, bar)
            bar.update(done_before + params.tokens - bar.done)  # a run that diverged may have ended early
            write_json(slot.path / POINT, dataclasses.asdict(point))
            slot.mark_done()
        for path in checkpoint.steps(slot.path):  # as large as the model's own, and of no use beside a score
            shutil.rmtree(path)
        point = Point(**read_json(slot.path / POINT))
    score = f"{point.bpb:.4f} bits per byte" if point.bpb is not None else f"the worst, because {point.diverged}"
    run.note(f"lr {params.lr:g}: {score}")
    return point


def train_at_lr(run: Run, params: PretrainParams, prepared: Prepared, slot: Slot, bar: Progress) -> Point:
    """Train to the end of the cooldown and score. A run that breaks off is a result, too: the rate is too high."""
    # Seeds the generators, too: every run starts as if it were alone.
    world, device, footprint, settings, execution = execution_plan(
        run, (slot,), params, prepared.config, prepared.schedule.total_tokens
    )
    world.choose_strategy(prepared.config, footprint, device, slot.identity, check=True)
    curve = f"loss.lr_{params.lr:g}"

    def on_replay(row: dict[str, float]) -> None:
        run.log(int(row["step"]), **{curve: row["loss"]})

    def on_step(row: dict[str, float]) -> None:
        on_replay(row)
        bar.update(params.batch_tokens, f"lr {params.lr:g}, loss {row['loss']:.3f}")

    hooks = Hooks(
        validate=lambda model: prepared.held_out.scores(model, execution.precision, settings.threads),
        on_resume=bar.update,
        on_replay=on_replay,
        on_step=on_step,
        on_note=run.note,
        should_stop=run.stop_requested,
    )
    model = first_model(prepared.config, params.seed, SHARDS, params.bigram_tokens).to(device)
    try:
        with tuned(model, execution, footprint, settings, hooks, run.anchor / choices.COMPILED):
            result = train(model, prepared.sampler, prepared.adam, prepared.schedule, settings, slot.path, hooks)
    except GateError as error:
        return Point(params.lr, None, error.what)
    bpb = result.validations[-1]["scores"]["all"]["bpb"]
    first_and_last_loss = (result.curve[0]["loss"], result.curve[-1]["loss"])
    reason = diverged(*first_and_last_loss, bpb, result.skipped_steps / result.steps)
    return Point(params.lr, None if reason else bpb, reason)


if __name__ == "__main__":
    stage_main("probe-lr", run)
