"""How long a stage will take, told from the finished runs of this machine.

The journals under .athanor/runs are the memory. A stage's work is what decides
its time: floating-point operations for the stages that train, bytes of input
for the others. The forecast is the median time of the past runs nearest in
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

from athanor.artifacts import read_json
from athanor.commands.plan.simulate import Step
from athanor.commands.plan.work import Training, progress
from athanor.errors import InputError
from athanor.pipeline.facts import flatten
from athanor.pipeline.journal import rows

NEAREST = 3
FAR = 1.5  # runs whose work differs less say little about the slope
CHECKPOINTS = 3  # in a slot: two, and a pinned one
CHECKPOINT_BYTES, WEIGHT_BYTES = 12, 4  # per parameter: weights and the two moments of AdamW; weights


@dataclass(frozen=True)
class Past:
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


class Memory:
    """Past runs of this machine and the sizes of what they read."""

    def __init__(self, repo: Any, anchor: Path) -> None:
        self.repo, self.anchor = repo, anchor
        self._sizes: dict[str, int | None] = {}
        self._ended = list(_ended(anchor))

    def past(self, stage: str) -> list[Past]:
        """The finished runs of a stage, oldest first, without those that only gave out an earlier result again."""
        runs = [self._past(folder, meta, end) for folder, meta, end in self._ended if meta["stage"] == stage]
        return sorted((run for run in runs if run is not None), key=lambda run: run.started_ms)

    def _past(self, folder: Path, meta: Mapping[str, Any], end: Mapping[str, Any]) -> Past | None:
        metrics, facts = end.get("metrics", {}), end.get("facts", {})
        journal = folder / "journal.jsonl"
        seconds = _seconds(journal, meta, end)
        work = slope = None
        if "slot" in facts and metrics.get("flops"):
            trained = journal.read_bytes().count(b'"tokens_per_second"')  # one in each line of a step made here
            if not trained:
                return None
            work = trained * facts.get("planned_flops", metrics["flops"]) / metrics["steps"]
            if facts.get("train_seconds") and not meta["resumed"]:
                slope = facts["train_seconds"] / work
        elif meta["inputs"]:
            work = self.bytes(meta["inputs"])
        return Past(meta["started_ms"], seconds, work, slope, meta["params"], meta["inputs"], metrics)

    def bytes(self, inputs: Mapping[str, str | None], root: Path | None = None) -> float | None:
        """Bytes of these inputs: by hash from the cache, else (with `root`) as they lie in the workspace."""
        sizes = [self._size(value) if value else None for value in inputs.values()]
        if root is not None:
            sizes = [_on_disk(root / path) if size is None else size for path, size in zip(inputs, sizes, strict=True)]
        return None if None in sizes or not sizes else float(sum(sizes))

    def _size(self, value: str) -> int | None:
        if value not in self._sizes:
            place = self.repo.cache.local.oid_to_path
            try:
                names = [value]
                if value.endswith(".dir"):
                    names = [entry["md5"] for entry in json.loads(Path(place(value)).read_text(encoding="utf-8"))]
                self._sizes[value] = sum(Path(place(name)).stat().st_size for name in names)
            except (OSError, ValueError):
                self._sizes[value] = None
        return self._sizes[value]


def _ended(anchor: Path) -> Any:
    for path in (anchor / ".athanor" / "runs").glob("*/meta.json"):
        try:
            meta, end = read_json(path), read_json(path.with_name("end.json"))
        except InputError:  # running, killed, or damaged
            continue
        if end.get("status") == "FINISHED" and meta["hardware"]["host"] == platform.node():
            yield path.parent, meta, end


def _seconds(journal: Path, meta: Mapping[str, Any], end: Mapping[str, Any]) -> float:
    """Time of all processes of a run; `end` knows the last one's, the journal when the others wrote."""
    total = 0
    begin = last = meta["started_ms"]
    if meta["resumed"] and journal.is_file():
        for row in rows(journal.read_bytes()):
            if row.get("event") == "resumed":
                total, begin = total + last - begin, row["t"]
            last = row["t"]
    return total / 1000 + end["seconds"]


def estimate(work: float | None, params: Mapping[str, Any], past: Sequence[Past], share: float = 1.0) -> float | None:
    """Seconds for `share` of `work`; among runs of equal work those with the fewest other parameters, then the last."""
    if not past:
        return None

    def apart(run: Past) -> float:
        if not work or not run.work:
            return 0.0 if work is run.work is None else float("inf")
        return round(abs(math.log(run.work / work)), 2)

    def rank(run: Past) -> tuple[float, int, int]:
        names = params.keys() | run.params.keys()
        return apart(run), sum(params.get(name) != run.params.get(name) for name in names), -run.started_ms

    ranked = sorted(past, key=rank)
    nearest = [run for run in ranked if rank(run)[:2] == rank(ranked[0])[:2]][:NEAREST]
    seconds = statistics.median(run.seconds for run in nearest)
    near = nearest[0]
    if not work or not near.work:
        return seconds
    slope = near.slope if near.slope is not None else seconds / near.work
    for run in ranked:
        if run.work and max(run.work, near.work) / min(run.work, near.work) >= FAR:
            slope = min(max((run.seconds - seconds) / (run.work - near.work), 0.0), seconds / near.work)
            break
    return max(seconds + slope * (work * share - near.work), 0.0)


def backtest(past: Sequence[Past]) -> float | None:
    """The median error of forecasting each run from the runs before it; None before the second run."""
    told = [(estimate(run.work, run.params, past[:i]), run.seconds) for i, run in enumerate(past)]
    errors = [abs(guess / seconds - 1) for guess, seconds in told if guess is not None and seconds > 0]
    return statistics.median(errors) if errors else None


def forecast(step: Step, memory: Memory, root: Path, training: Training | None) -> Forecast:
    """`training`: what a stage that trains will do; None for the others."""
    params = dict(flatten(step.params))
    past = memory.past(step.stage)
    copies = 1 if set(memory.repo.cache.local.cache_types) - {"copy"} else 2  # links cost nothing
    outputs = step.outputs_bytes
    if training is None:
        paths = past[-1].inputs if past else {}
        inputs = {path: step.inputs.get(path) for path in paths}
        seconds = estimate(memory.bytes(inputs, root) if inputs else None, params, past)
        known = None not in inputs.values()
        return Forecast(seconds, backtest(past), len(past), None, outputs and outputs * copies, input_known=known)
    disk = WEIGHT_BYTES * training.parameters * copies + CHECKPOINTS * CHECKPOINT_BYTES * training.parameters
    if training.tokens is None:  # its data is not there yet
        work = _work_as_before(step, past, training)
        return Forecast(estimate(work, params, past), backtest(past), len(past), None, disk, input_known=False)
    begun = progress(step, root, memory.anchor, training)
    left = training.steps - (begun or 0)
    seconds = estimate(training.flops, params, past, left / training.steps)
    tokens = left * training.batch_tokens
    return Forecast(seconds, backtest(past), len(past), tokens, disk, begun, training.steps)


def _work_as_before(step: Step, past: Sequence[Past], training: Training) -> float | None:
    """Operations for the tokens of the last run's epoch, by this model and for as many epochs as planned."""
    if not past or not past[-1].metrics.get("tokens"):
        return None
    name = f"{step.stage}.epochs"
    planned, before = (dict(flatten(params)).get(name, 1.0) for params in (step.params, past[-1].params))
    return past[-1].metrics["tokens"] * planned / before * training.flops_per_token


def _on_disk(path: Path) -> int | None:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else None
