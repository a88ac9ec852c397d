"""How long a stage will take, estimated from the finished runs of this machine.

The journals under .athanor/runs hold these runs. A stage's work is what decides
its time: tokens by what one costs for the stages that train, bytes of input
for the others. An input that is made anew first has the size that the change of
parameters and text lets expect (change.py). The forecast is the median time of the past runs nearest in
work, moved along a line to the work at hand; the slope is that between two
past runs if their work differs enough, else that of the training part of the
nearest run, else proportional. How wrong that is, is measured: each past run
is forecast from the runs before it (`error`, the median of |forecast / time - 1|).
No past run, no forecast.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.cli import slots
from athanor.cli.plan.change import Change
from athanor.cli.plan.simulate import Step
from athanor.cli.plan.training import STAGES, Training
from athanor.runtime.closure import file_digests, stage_module
from athanor.runtime.facts import flatten
from athanor.runtime.journal import Record, rows
from athanor.runtime.schema import filled
from athanor.runtime.slots import Code, question
from athanor.sizing.reference import TOKEN_FLOPS

NEAREST = 3
MIN_WORK_RATIO = 1.5  # runs whose work differs less say little about the slope
CHECKPOINTS = 3  # in a slot: two, and a pinned one
CHECKPOINT_BYTES, WEIGHT_BYTES = 12, 4  # per parameter: weights and the two moments of AdamW; weights


@dataclass(frozen=True)
class PastRun:
    """A finished run of a stage on this machine. `work` is None when its inputs' sizes are not known any more."""

    started_ms: int
    seconds: float
    work: float | None
    slope: float | None  # seconds per work of its training part
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Forecast:
    """What a stage will take; None is not known. `runs` is how many past runs stand behind it.

    input_known: False when an input is made anew first, so that its size is taken to be what it was.
    """

    seconds: float | None
    error: float | None
    runs: int
    tokens: int | None
    disk_bytes: int | None
    from_step: int | None = None
    steps: int | None = None
    input_known: bool = True


class RunHistory:
    """The past runs of this machine, and the sizes of their inputs."""

    def __init__(self, repo: Any, anchor: Path) -> None:
        self.repo, self.anchor = repo, anchor
        self._sizes: dict[str, int | None] = {}
        self._finished = list(_finished_runs(anchor))

    def runs_of(self, stage: str) -> list[PastRun]:
        """The finished runs of a stage, oldest first, without those that only returned an earlier result."""
        runs = [self._past_run(*run) for run in self._finished if run[1]["stage"] == stage]
        return sorted(filter(None, runs), key=lambda run: run.started_ms)

    def _past_run(self, folder: Path, meta: Mapping[str, Any], end: Mapping[str, Any]) -> PastRun | None:
        metrics, facts = end.get("metrics", {}), end.get("facts", {})
        journal = folder / "journal.jsonl"
        seconds = _seconds(journal, meta, end)
        work = slope = None
        if "slot" in facts and metrics.get("flops"):
            trained = journal.read_bytes().count(b'"tokens_per_second"')  # one in each line of a step made here
            if not trained:
                return None
            flops = facts.get("planned_flops", metrics["flops"])
            work = trained * (flops + TOKEN_FLOPS * metrics.get("tokens", 0)) / metrics["steps"]
            if facts.get("train_seconds") and not meta["resumed"]:
                slope = facts["train_seconds"] / work
        elif meta["inputs"]:
            work = self.bytes(meta["inputs"])
        return PastRun(meta["started_ms"], seconds, work, slope, meta["params"], meta["inputs"], metrics)

    def bytes(self, inputs: Mapping[str, str | None], root: Path | None = None) -> float | None:
        """The size of these inputs in the cache, or (with `root`) in the workspace where the cache lacks one."""
        sizes = []
        for path, value in inputs.items():
            size = self._size(value) if value else None
            if size is None and root is not None and (root / path).exists():
                size = slots.bytes_of(root / path)
            sizes.append(size)
        return None if None in sizes or not sizes else float(sum(sizes))

    def _size(self, value: str) -> int | None:
        if value not in self._sizes:
            object_path = self.repo.cache.local.oid_to_path
            try:
                names = [value]
                if value.endswith(".dir"):
                    names = [entry["md5"] for entry in json.loads(Path(object_path(value)).read_text(encoding="utf-8"))]
                self._sizes[value] = sum(Path(object_path(name)).stat().st_size for name in names)
            except (OSError, ValueError):
                self._sizes[value] = None
        return self._sizes[value]


def _finished_runs(anchor: Path) -> Any:
    for path in (anchor / ".athanor" / "runs").glob("*/meta.json"):
        try:
            meta, end = Record(path), Record(path.with_name("end.json"))
            here = meta["hardware"]["host"] == platform.node()
        except InputError:  # running, killed, or damaged
            continue
        if end.get("status") == "FINISHED" and here:
            yield path.parent, meta, end


def _seconds(journal: Path, meta: Mapping[str, Any], end: Mapping[str, Any]) -> float:
    """The time of all processes of a run: the last one's from `end`, that of the others from the journal."""
    total = 0
    begin = last = meta["started_ms"]
    if meta["resumed"] and journal.is_file():
        for row in rows(journal.read_bytes()):
            if row.get("event") == "resumed":
                total, begin = total + last - begin, row["t"]
            last = row["t"]
    return total / 1000 + end["seconds"]


def estimate(
    work: float | None, params: Mapping[str, Any], past: Sequence[PastRun], share: float = 1.0
) -> float | None:
    """Seconds for `share` of `work`; of runs of equal work those with the fewest other parameters, then the last."""
    if not past:
        return None

    def distance(run: PastRun) -> float:
        if not work or not run.work:
            return 0.0 if work is run.work is None else float("inf")
        return round(abs(math.log(run.work / work)), 2)

    def sort_key(run: PastRun) -> tuple[float, int, int]:
        names = params.keys() | run.params.keys()
        return distance(run), sum(params.get(name) != run.params.get(name) for name in names), -run.started_ms

    ranked = sorted(past, key=sort_key)
    nearest = [run for run in ranked if sort_key(run)[:2] == sort_key(ranked[0])[:2]][:NEAREST]
    seconds = statistics.median(run.seconds for run in nearest)
    closest = nearest[0]
    if not work or not closest.work:
        return seconds
    slope = closest.slope if closest.slope is not None else seconds / closest.work
    for run in ranked:
        if run.work and max(run.work, closest.work) / min(run.work, closest.work) >= MIN_WORK_RATIO:
            slope = min(max((run.seconds - seconds) / (run.work - closest.work), 0.0), seconds / closest.work)
            break
    return max(seconds + slope * (work * share - closest.work), 0.0)


def backtest(past: Sequence[PastRun]) -> float | None:
    """The median error of forecasting each run from the runs before it; None before the second run."""
    forecasts = [(estimate(run.work, run.params, past[:i]), run.seconds) for i, run in enumerate(past)]
    errors = [abs(guess / seconds - 1) for guess, seconds in forecasts if guess is not None and seconds > 0]
    return statistics.median(errors) if errors else None


def copies(repo: Any) -> int:
    """How often an output is on the disk, DVC's cache included: links cost nothing."""
    return 1 if set(repo.cache.local.cache_types) - {"copy"} else 2


def forecast(
    step: Step, history: RunHistory, root: Path, training: Training | None, change: Change | None = None
) -> Forecast:
    """How long a stage will take and what it will use; `training` is None for a stage that does not train.

    `change`: from what dvc.lock recorded, for a stage whose input is not there yet.
    """
    params = dict(flatten(step.params))
    past = history.runs_of(step.stage)
    times, outputs = copies(history.repo), step.outputs_bytes
    if training is None:
        paths = past[-1].inputs if past else {}
        inputs = {path: step.inputs.get(path) for path in paths}
        input_known = None not in inputs.values()
        if change is not None and not (inputs and input_known):
            seconds = _changed(step.stage, params, past, change)
        else:
            seconds = estimate(history.bytes(inputs, root) if inputs else None, params, past)
        return Forecast(seconds, backtest(past), len(past), None, outputs and outputs * times, input_known=input_known)
    disk = WEIGHT_BYTES * training.parameters * times + CHECKPOINTS * CHECKPOINT_BYTES * training.parameters
    if training.tokens is None:  # its data is not there yet
        epoch = change.conversation_tokens() if change is not None and step.stage == "sft" else None
        work = training.work(epoch * training.epochs) if epoch else _work_as_before(step, past, training)
        return Forecast(estimate(work, params, past), backtest(past), len(past), None, disk, input_known=False)
    resumed_step = resume_step(step, root, history.anchor, training)
    steps_left = training.steps - (resumed_step or 0)
    seconds = estimate(training.work(training.tokens), params, past, steps_left / training.steps)
    tokens = steps_left * training.batch_tokens
    return Forecast(seconds, backtest(past), len(past), tokens, disk, resumed_step, training.steps)


def _changed(stage: str, params: Mapping[str, Any], past: Sequence[PastRun], change: Change) -> float | None:
    """Seconds by the runs of these parameters, else by those of the recorded ones, as much longer as the change makes it."""
    recorded = change.params(stage)
    same = [run for run in past if run.params == params]
    runs = same or [run for run in past if run.params == recorded] or past
    seconds = estimate(None, params, runs)
    return seconds if seconds is None or same and recorded != params else seconds * change.factor(stage)


def _work_as_before(step: Step, past: Sequence[PastRun], training: Training) -> float | None:
    """Work of this model for the planned epochs, when an epoch has as many tokens as in the last run."""
    if not past or not past[-1].metrics.get("tokens"):
        return None
    name = f"{step.stage}.epochs"
    planned, before = (dict(flatten(params)).get(name, 1.0) for params in (step.params, past[-1].params))
    return training.work(past[-1].metrics["tokens"] * planned / before)


def resume_step(step: Step, root: Path, anchor: Path, training: Training) -> int | None:
    """The step from which the stage will go on; None when it starts from nothing.

    A slot fits when its parameters, the digests of its inputs and the code that
    worked in it are those of the planned run. Digests are taken from a slot whose run read
    inputs with the hashes that DVC has for the planned ones.
    """
    code = _code(step, root)
    steps = [
        number
        for slot in _matching(step, anchor)
        if slot.code is not None and slot.code.code.files == code.files
        for number in _steps(slot.path)
        if number <= (training.trunk_steps if slot.state == "trunk" or slot.facts.get("part") else training.steps)
    ]
    return max(steps, default=None)


def code_questions(step: Step, root: Path, anchor: Path) -> list[str]:
    """What the stage will ask about its slots instead of going on, because its code has changed."""
    if step.stage not in STAGES or not step.command:
        return []
    code, matches = _code(step, root), [slot for slot in _matching(step, anchor) if slot.code and slot.code.code.files]
    slot_questions = [(slot.id, question(slot.path, code, "part" in slot.facts)) for slot in matches]
    return [
        f"{step.stage} will stop and ask: slot {name} {text} (athanor slots adopt, drop)"
        for name, text in slot_questions
        if text
    ]


def _code(step: Step, root: Path) -> Code:
    module = stage_module(step.command)
    return Code(module, file_digests(root, module))


def _matching(step: Step, anchor: Path) -> list[slots.SlotInfo]:
    """The slots of the planned run's parameters and inputs, whatever code worked in them."""
    stage_slots = [slot for slot in slots.find(anchor) if slot.stage == step.stage]
    digests = next((slot.facts.get("inputs") for slot in stage_slots if _same_inputs(slot, step, anchor)), None)
    planned = dict(flatten(filled(step.params)))
    matching = [
        slot
        for slot in stage_slots
        if slot.facts.get("inputs") == digests and _params_match(slot.facts, step.stage, planned)
    ]
    return matching if digests is not None else []


def _same_inputs(slot: slots.SlotInfo, step: Step, anchor: Path) -> bool:
    try:
        run = read_json(slot.path / "run.json")["run"]
        inputs = Record(anchor / ".athanor" / "runs" / run / "meta.json")["inputs"]
    except InputError:
        return False
    return bool(inputs) and all(step.inputs.get(path) == value for path, value in inputs.items())


def _params_match(facts: Mapping[str, Any], stage: str, planned: Mapping[str, Any]) -> bool:
    """Whether each parameter of a slot is as planned; null in the plan (the tokenizer's vocabulary) fits any."""
    for leaf, value in flatten(facts.get("params", {})):
        name = leaf if leaf in planned else f"{stage}.{leaf}"
        if name not in planned or planned[name] not in (None, value):
            return False
    return True


def _steps(path: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in path.glob("step_*") if folder.name[5:].isdigit()]
