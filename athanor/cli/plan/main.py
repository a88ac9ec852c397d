"""What the next `dvc repro` would do, why, and how long it will take.

    python -m athanor plan [TARGET ...] [--json]

keep      the stage is up to date
restore   its outputs are taken from DVC's cache or run-cache
run       its command runs
follows   an input is made anew; the command runs unless the bytes come out as DVC knows them (counted as run)

Times come from the finished runs of this machine; "±" is the median error of
forecasting each of them from those before it, "(as before)" means that the size
of the input is not known yet. Nothing is changed: no file, no lock, no cache.

Exit status: 0 nothing to do, 10 something would run or be restored, 1 an error, 2 a mistake in params.yaml or
in the arguments.

--json prints {"version": 1, "work": bool, "stages": [...], "total": {...}, "notes": [...]}. A stage is {"stage",
"action", "first_run", "reasons": [text], "changes": [{"kind", "name", "what", "old", "new"}], "waits_for": [path],
"note", "forecast": null or {"seconds", "error", "runs", "tokens", "disk_bytes", "from_step", "steps",
"input_known"}}; null is not known, "input_known" false means that an input is made anew first and its size was taken
to be what it was. total is {"keep", "restore", "run", "follows", "seconds", "seconds_certain", "seconds_known", "tokens",
"disk_bytes", "free_bytes"}; "seconds_certain" is without the stages that may turn out to be kept, and where
"seconds_known" is false, stages without a past run are left out of "seconds".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError, GateError, ParamsError
from athanor.cli import probe
from athanor.cli.battery_gate import check_battery
from athanor.cli.plan.forecast import STAGES, Forecast, Memory, forecast, questions, training_of
from athanor.cli.plan.simulate import FOLLOWS, KEEP, RESTORE, RUN, Step, simulate
from athanor.cli.slots import size
from athanor.cli.summary import leaf
from athanor.hardware.shape import advice
from athanor.runtime import dvc_lock, dvc_view
from athanor.runtime.closure import code_digest, is_code, stage_module
from athanor.runtime.machine import anchor, machine
from athanor.runtime.progress import duration
from athanor.runtime.schema import check_file, memory_notes
from athanor.training.sft_params import SCRATCH

WORK = 10
MAX_REASONS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    steps: list[Step]
    forecasts: dict[str, Forecast]
    notes: list[str]
    free_bytes: int

    @property
    def work(self) -> bool:
        return any(step.action != KEEP for step in self.steps)

    def total(self) -> dict[str, Any]:
        forecasts = list(self.forecasts.values())
        return {
            **{action: sum(step.action == action for step in self.steps) for action in (KEEP, RESTORE, RUN, FOLLOWS)},
            "seconds": sum(each.seconds or 0.0 for each in forecasts),
            "seconds_certain": sum(
                self.forecasts[step.stage].seconds or 0.0
                for step in self.steps
                if step.action == RUN and step.stage in self.forecasts
            ),
            "seconds_known": all(each.seconds is not None for each in forecasts),
            "tokens": sum(each.tokens or 0 for each in forecasts),
            "disk_bytes": sum(each.disk_bytes or 0 for each in forecasts),
            "free_bytes": self.free_bytes,
        }


def make_plan(root: Path, targets: Sequence[str] = ()) -> Plan:
    """ParamsError or GateError for a params.yaml that the stages would refuse, InputError where DVC cannot read the graph."""
    # First, because it names the line of a slip, which DVC does not.
    ours = (root / "dvc.yaml").is_file() and "python -m stages." in (root / "dvc.yaml").read_text(encoding="utf-8")
    built: Mapping[str, Any] = check_file(root / "params.yaml") if ours else {}
    dvc_lock.stages(root / dvc_lock.LOCK)  # for its message, should a kill have torn the file
    if built and built["sft"].base == SCRATCH:
        check_battery(root, built["battery"])
    repo = dvc_view.open_repo(root)
    steps = simulate(repo, targets)
    memory = Memory(repo, anchor()) if any(step.runs for step in steps) else None
    forecasts = {
        step.stage: forecast(step, memory, root, training_of(step, root, built))
        for step in steps
        if memory is not None and step.runs and step.command
    }
    plan = Plan(steps, forecasts, [], shutil.disk_usage(root).free)
    at_work = dvc_view.busy(repo)
    if at_work:
        plan.notes.append(f"{at_work} is at work here: this is the plan of this moment")
    plan.notes.extend(_interpreter(root, steps, built))
    if built and built["sft"].base != SCRATCH:
        plan.notes.append(
            f"sft.base is {built['sft'].base}: athanor repro runs foreign/lora.yaml, and none of these steps but download"
        )
    if built and any(step.stage == "pretrain" and step.runs for step in steps):
        plan.notes.extend(probe.warnings(root, built))
    plan.notes.extend(_shape(steps, built))
    if built and any(step.stage == "train-tokenizer" and step.runs for step in steps):
        plan.notes.extend(memory_notes(built))
    plan.notes.extend(text for step in steps if step.runs for text in questions(step, root, anchor()))
    only_comments = [step.stage for step in steps if _only_comments(step, root)]
    if only_comments:
        plan.notes.append(
            f"the code of {', '.join(only_comments)} differs in comments, docstrings or layout only: athanor accept keeps"
            " the results"
        )
    need = plan.total()["disk_bytes"]
    if need > plan.free_bytes:
        plan.notes.append(f"the disk has {size(plan.free_bytes)} free, about {size(need)} are needed: free some space")
    return plan


def _interpreter(root: Path, steps: Sequence[Step], built: Mapping[str, Any]) -> list[str]:
    """The standard library is an input that DVC does not see."""
    kept = [step for step in steps if step.stage == "download" and step.action == KEEP]
    sources = built["download"].sources if "download" in built else ()
    facts = leaf(root, "download") if kept and any(source.type == "python" for source in sources) else None
    made, here = (facts or {}).get("python"), platform.python_version()
    if made in (None, here):
        return []
    return [
        f"download is kept, but was made from the standard library of Python {made} and this is {here}: dvc repro -f"
        " -s download makes it anew"
    ]


def _shape(steps: Sequence[Step], built: Mapping[str, Any]) -> list[str]:
    """Advice on the model's widths, while it can still be taken."""
    if not any(step.stage == "pretrain" and step.runs for step in steps) or "model" not in built:
        return []
    model, device = built["model"], machine().device
    config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
    # "auto" is decided by what torch finds, and a plan loads no torch; /dev tells of NVIDIA's and AMD's drivers.
    found = "cuda" if any(Path("/dev", name).exists() for name in ("nvidia0", "kfd")) else "cpu"
    return [f"model: {text}" for text in advice(config, found if device == "auto" else device)]


def _only_comments(step: Step, root: Path) -> bool:
    """Whether a stage would run, and `athanor accept` would make it stay."""
    code = [change for change in step.changes if change.kind == "file" and is_code(change.name)]
    facts = leaf(root, step.stage)
    if step.action != RUN or not code or code != list(step.changes) or not facts or not step.command:
        return False
    try:
        return facts.get("code") == code_digest(root, stage_module(step.command))
    except (AthanorError, SyntaxError):
        return False


def as_json(plan: Plan) -> str:
    rows = [
        {
            "stage": step.stage,
            "action": step.action,
            "first_run": step.unrecorded and step.runs,
            "reasons": step.reasons(),
            "changes": [dataclasses.asdict(change) for change in step.changes],
            "waits_for": list(step.waits),
            "note": step.note,
            "forecast": dataclasses.asdict(plan.forecasts[step.stage]) if step.stage in plan.forecasts else None,
        }
        for step in plan.steps
    ]
    whole = {"version": 1, "work": plan.work, "stages": rows, "total": plan.total(), "notes": plan.notes}
    return json.dumps(whole, indent=2, default=str)


def as_text(plan: Plan) -> str:
    total = plan.total()
    if not plan.work:
        lines = [f"Nothing to do: all {len(plan.steps)} stages are up to date."]
        lines += [f"{step.stage}: {step.note}" for step in plan.steps if step.note]
        return "\n".join(lines + [f"Note: {note}" for note in plan.notes]) + "\n"
    wide = max(len("total"), *(len(step.stage) for step in plan.steps))
    lines = [f"{'stage':<{wide}}  {'action':<8} {'time':>22} {'tokens':>15} {'disk':>10}  why"]
    for step in plan.steps:
        lines += _rows(step, plan.forecasts.get(step.stage), wide)
    time = ""
    if plan.forecasts and (total["seconds_known"] or total["seconds"]):
        time = ("" if total["seconds_known"] else "more than ") + duration(total["seconds"])
        if total["seconds_known"] and total[FOLLOWS] and total[RUN]:
            time = f"{duration(total['seconds_certain'])} to {time}"
    tokens = f"{total['tokens']:,}" if total["tokens"] else ""
    disk = size(total["disk_bytes"]) if total["disk_bytes"] else ""
    notes = list(plan.notes)
    if any(each.seconds is not None and not each.input_known for each in plan.forecasts.values()):
        notes.append("(as before): input comes from a stage that runs first; with more data than now it takes longer")
    counts = ", ".join(f"{total[name]} {name}" for name in (RUN, FOLLOWS, RESTORE, KEEP) if total[name])
    lines.append(f"{'total':<{wide}}  {'':<8} {time:>22} {tokens:>15} {disk:>10}  {counts}")
    return "\n".join([*lines, *(f"Note: {note}" for note in notes)]) + "\n"


def _rows(step: Step, expected: Forecast | None, wide: int) -> list[str]:
    reasons = [step.note] if step.note else []
    if expected is not None and expected.from_step is not None:
        done = expected.from_step >= (expected.steps or 0)
        where = f"continues at step {expected.from_step} of {expected.steps}"
        reasons.append("trained already, only written out" if done else where)
    reasons += step.reasons()
    if len(reasons) > MAX_REASONS:
        reasons[MAX_REASONS - 1 :] = [f"and {len(reasons) - MAX_REASONS + 1} more (--json tells all)"]
    time = tokens = disk = ""
    if expected is not None:
        time = "no past run" if expected.seconds is None else duration(expected.seconds)
        if expected.seconds is not None and not expected.input_known:
            time += " (as before)"
        elif expected.seconds is not None:
            time += f" ±{expected.error:.0%} of {expected.runs}" if expected.error is not None else " (1 past run)"
        tokens = f"{expected.tokens:,}" if expected.tokens is not None else "?" if step.stage in STAGES else ""
        disk = size(expected.disk_bytes) if expected.disk_bytes else "?"
    first = f"{step.stage:<{wide}}  {step.action:<8} {time:>22} {tokens:>15} {disk:>10}  "
    return [(first + "".join(reasons[:1])).rstrip(), *(f"{'':<{wide + 61}}  {reason}" for reason in reasons[1:])]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="stages, as dvc repro takes them; default all")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(args: argparse.Namespace) -> int:
    try:
        plan = make_plan(Path.cwd(), args.targets)
    except (ParamsError, GateError) as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.write(as_json(plan) + "\n" if args.json else as_text(plan))
    return WORK if plan.work else 0
