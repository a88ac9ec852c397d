"""What the next `dvc repro` would do, why, and how long it will take.

    python -m athanor plan [TARGET ...] [--measure] [--json]

keep      the stage is up to date
restore   its outputs are taken from DVC's cache or run-cache
run       its command runs
follows   an input is made anew; the command runs unless the bytes come out as DVC knows them (counted as run)

Times come from the finished runs of this machine; "±" is the median error of
forecasting each of them from those before it, "(expected)" means that the input
is made anew first, and its size follows from the parameters and the text here, "(not yet run)" that training steps were timed
(`--measure`, `athanor recipe`). Nothing is changed: no file, no lock, no cache.

Exit status: 0 nothing to do, 10 something would run or be restored, 1 an error, 2 a mistake in params.yaml or
in the arguments.

--json prints {"version": 1, "work": bool, "stages": [...], "total": {...}, "notes": [...], "data_path": ...}. A stage
is {"stage", "action", "first_run", "reasons": [text], "changes": [{"kind", "name", "what", "old", "new"}],
"waits_for": [path], "note", "forecast": null or {"seconds", "error", "runs", "tokens", "disk_bytes", "from_step",
"steps", "input_known"}}; null is not known, "input_known" false means that an input is made anew first and its size
was taken from the parameters and the text. total is {"keep", "restore", "run", "follows", "seconds", "seconds_certain",
"seconds_known", "tokens", "disk_bytes", "free_bytes"}; "seconds_certain" is without the stages that may turn out to be
kept, and where "seconds_known" is false, stages without a past run are left out of "seconds". data_path is null or
{"text_bytes", "workers", "stages": [{"stage", "files", "disk", "memory", "seconds", ...}], "limit": {"name", "stage",
"needed", "available", "unit", "fix", "met"}}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError, GateError, ParamsError
from athanor.cli import probe
from athanor.cli.battery_gate import check_battery
from athanor.cli.corpus_gate import check_corpus
from athanor.cli.plan.change import Change
from athanor.cli.plan.data_path import DataPath, data_path
from athanor.cli.plan.first_run import before_first_run
from athanor.cli.plan.forecast import Forecast, RunHistory, code_questions, copies, forecast
from athanor.cli.plan.simulate import FOLLOWS, KEEP, RESTORE, RUN, Step, simulate
from athanor.cli.plan.training import STAGES, training_of
from athanor.cli.render import fill_template
from athanor.cli.slots import size
from athanor.cli.summary import leaf
from athanor.hardware.shape import advice
from athanor.runtime import dvc_lock, dvc_view
from athanor.runtime.closure import closure, code_digest, is_code, stage_module
from athanor.runtime.facts import check_names
from athanor.runtime.machine import anchor, machine
from athanor.runtime.progress import duration
from athanor.runtime.redact import redact
from athanor.runtime.schema import check_file, memory_notes
from athanor.runtime.store_check import trouble
from athanor.sizing import speeds
from athanor.sources.datapath import Host
from athanor.training.sft_params import SCRATCH

WORK = 10
MAX_REASONS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    steps: list[Step]
    forecasts: dict[str, Forecast]
    notes: list[str]
    free_bytes: int
    data_path: DataPath | None = None

    @property
    def work(self) -> bool:
        return any(step.action != KEEP for step in self.steps)

    def total(self) -> dict[str, Any]:
        forecasts = list(self.forecasts.values())
        certain = [step.stage for step in self.steps if step.action == RUN and step.stage in self.forecasts]
        return {
            **{action: sum(step.action == action for step in self.steps) for action in (KEEP, RESTORE, RUN, FOLLOWS)},
            "seconds": sum(each.seconds or 0.0 for each in forecasts),
            "seconds_certain": sum(self.forecasts[name].seconds or 0.0 for name in certain),
            "seconds_known": all(each.seconds is not None for each in forecasts),
            "tokens": sum(each.tokens or 0 for each in forecasts),
            "disk_bytes": sum(each.disk_bytes or 0 for each in forecasts),
            "free_bytes": self.free_bytes,
        }


def make_plan(root: Path, targets: Sequence[str] = ()) -> Plan:
    """The plan; ParamsError or GateError when the stages would refuse params.yaml, InputError for a broken graph."""
    machine()  # for its message, before any other that follows from it
    # First, because it names the line of a slip, which DVC does not.
    is_ours = (root / "dvc.yaml").is_file() and "python -m stages." in (root / "dvc.yaml").read_text("utf-8", "replace")
    built: Mapping[str, Any] = check_file(root / "params.yaml") if is_ours else {}
    dvc_lock.stages(root / dvc_lock.LOCK)  # for its message, should a kill have torn the file
    if built and built["sft"].base == SCRATCH:
        check_battery(root, built["battery"])
        check_corpus(built)
    check_names(root)
    repo = dvc_view.open_repo(root)
    steps = simulate(repo, targets)
    runs = [step for step in steps if step.runs]
    history = RunHistory(repo, anchor()) if runs else None
    measured, change = speeds.load(anchor()), Change(root, built) if built else None
    forecasts = {}
    for step in runs:
        if step.command and history is not None:
            training = training_of(step, root, built)
            found = forecast(step, history, root, training, change)
            forecasts[step.stage] = before_first_run(found, step, built, training, measured)
    stages = {step.stage for step in runs}
    needs = None
    if built and built["sft"].base == SCRATCH:
        local = machine()
        needs = data_path(root, built, stages, copies(repo), Host.here(root, local.workers, local.executor))
    plan = Plan(steps, forecasts, [], shutil.disk_usage(root).free, needs)
    note = plan.notes.append
    if runs and (why := trouble(root)):
        note(str(why))
    if at_work := dvc_view.busy(root / ".dvc/tmp"):
        note(f"{at_work} is at work here: this is the plan of this moment")
    plan.notes.extend(_pipeline_notes(root, steps, built) if built else ())
    if built and measured is None and any(each.seconds is None for each in forecasts.values()):
        note("no past run to tell times from: athanor plan --measure times some training steps, a quarter of a minute")
    plan.notes.extend(text for step in runs for text in code_questions(step, root, anchor()))
    if same := " ".join(step.stage for step in steps if _no_statement_differs(step, root)):
        note(
            f"in the code of {same} no statement differs, only comments, docstrings, layout or files that are not Python."
            f" If the results would be the same: dvc commit -f {same}"
        )
    needed_bytes = plan.total()["disk_bytes"]
    if needed_bytes > plan.free_bytes:
        note(f"the disk has {size(plan.free_bytes)} free, about {size(needed_bytes)} are needed: free some space")
    return plan


def _pipeline_notes(root: Path, steps: Sequence[Step], built: Mapping[str, Any]) -> Iterator[str]:
    """Notes on this pipeline's parameters."""
    actions = {step.stage: step.action for step in steps}
    if actions.get("download") == KEEP and any(source.type == "python" for source in built["download"].sources):
        # The standard library is an input that DVC does not see.
        before, now = (leaf(root, "download") or {}).get("python"), platform.python_version()
        if before not in (None, now):
            yield (
                f"download is kept, but was made from the standard library of Python {before} and this is {now}:"
                " dvc repro -f -s download makes it anew"
            )
    if actions.get("pretrain") in (RUN, FOLLOWS):
        yield from probe.warnings(root, built)
        model, device = built["model"], machine().device
        config = model.config(model.vocab_size or built["tokenizer"].vocab_size)
        # "auto" is decided by what torch finds, and a plan loads no torch; /dev tells of NVIDIA's and AMD's drivers.
        detected_device = "cuda" if any(Path("/dev", name).exists() for name in ("nvidia0", "kfd")) else "cpu"
        yield from (f"model: {text}" for text in advice(config, detected_device if device == "auto" else device))
    if actions.get("train-tokenizer") in (RUN, FOLLOWS):
        yield from memory_notes(built)


def _no_statement_differs(step: Step, root: Path) -> bool:
    """A stage runs for its code alone, whose syntax trees are those that made the outputs."""
    code = [change for change in step.changes if change.kind == "file" and is_code(change.name)]
    facts = leaf(root, step.stage)
    if step.action != RUN or not code or code != list(step.changes) or not facts or not step.command:
        return False
    try:
        module = stage_module(step.command)
        others = {change.name for change in code if change.name.endswith(".py")} - set(closure(root, module))
        return not others and facts.get("code") == code_digest(root, module)
    except (AthanorError, SyntaxError):
        return False


def measure() -> Callable[[float], list[str]]:
    """Time training steps for the forecasts; what a step takes of the device, as notes on a plan of so many seconds."""
    from athanor.cli.recipe import memory_lines, memory_of
    from athanor.sizing.speed import measure_params

    built = check_file(Path("params.yaml"))
    speed, config = measure_params(built)
    memory = memory_lines(*memory_of(speed, config, built["pretrain"].batch_tokens))
    return lambda seconds: [
        f"memory of a training step on {speed.name}: {'; '.join(memory)}",
        f"energy: about {seconds / 3600 * speed.watts / 1000:.2g} kWh at {speed.watts:.0f} W",
    ]


def as_json(plan: Plan) -> str:
    rows = [
        {
            "stage": step.stage,
            "action": step.action,
            "first_run": step.unrecorded and step.runs,
            "reasons": step.reasons(),
            "changes": [dataclasses.asdict(change) for change in step.changes],
            "waits_for": list(step.pending_inputs),
            "note": step.note,
            "forecast": dataclasses.asdict(plan.forecasts[step.stage]) if step.stage in plan.forecasts else None,
        }
        for step in plan.steps
    ]
    document = {"version": 1, "work": plan.work, "stages": rows, "total": plan.total(), "notes": plan.notes}
    document["data_path"] = plan.data_path and plan.data_path.as_dict()
    return json.dumps(document, indent=2, default=str)


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size else ""


def as_text(plan: Plan) -> str:
    width = max(len(name) for name in ("total", *(step.stage for step in plan.steps)))
    values = {"duration": duration, "size": size, "trainings": STAGES, "most": MAX_REASONS, "gb": gb}
    return fill_template("plan.txt.j2", plan=plan, wide=width, **values)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="stages, as dvc repro takes them; default all")
    parser.add_argument("--measure", action="store_true", help="time training steps first, for stages that never ran")
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(args: argparse.Namespace) -> int:
    try:
        measured = measure() if args.measure else None
        plan = make_plan(Path.cwd(), args.targets)
        if measured:
            plan.notes.extend(measured(plan.total()["seconds"]))
    except (ParamsError, GateError) as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    # Text first: a mask in JSON text would swallow its escapes.
    text = json.dumps(redact(json.loads(as_json(plan))), indent=2) + "\n" if args.json else redact(as_text(plan))
    sys.stdout.write(text)
    return WORK if plan.work else 0
