"""`dvc repro` with a summary at the end.

    python -m athanor repro [--max-minutes N] [--supervise] [arguments of dvc repro]

When sft.base of params.yaml names a foreign model, the graph is foreign/lora.yaml: conversations, a LoRA on that model,
and its export. Nothing is pretrained then.

With --max-minutes, a stage that is at work when the time is over saves and
ends, and the status is 75; the same command goes on from there. With
--supervise, a stage that dies (killed, crashed, hung) is started again, three
times at most; why each died is told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from athanor.artifacts import read_json, write_text
from athanor.commands import side, summary, supervise
from athanor.commands.battery_gate import check_battery
from athanor.commands.data import report
from athanor.params.sft import SCRATCH
from athanor.pipeline import ship
from athanor.pipeline.closure import FOREIGN
from athanor.pipeline.guards import UNTIL
from athanor.pipeline.run import PARAMS
from athanor.pipeline.schema import FOREIGN_STAGES, check_file
from athanor.pipeline.terminal import say

SHIP_SECONDS = 60.0
SHIP_SECONDS_AFTER_FAILURE = 5.0
STOPPED = 75
GRAPH, PLACE = Path(FOREIGN) / "dvc.yaml", "models/foreign"


def main() -> int:
    parser = argparse.ArgumentParser(prog="athanor repro", add_help=False, allow_abbrev=False)
    parser.add_argument("--max-minutes", type=float)
    parser.add_argument("--supervise", action="store_true")
    own, words = parser.parse_known_args()
    root = Path.cwd()
    # A moment and not an amount: the stages of one repro share what is left.
    until = {} if own.max_minutes is None else {UNTIL: f"{time.time() + 60 * own.max_minutes:.1f}"}
    built = check_file(PARAMS)  # before DVC, which deletes a stage's outputs and only then starts it
    base = built["sft"].base
    if base == SCRATCH:
        check_battery(root, built["battery"])
    foreign = base != SCRATCH
    stages = ("download", *FOREIGN_STAGES) if foreign else None
    since_ms, before = int(time.time() * 1000), summary.runs(root, stages)
    asked: list[int] = []
    call, command = side.outlive(asked), [*side.DVC, *(in_graph(words) if foreign else words)]
    with foreign_graph(root, base) if foreign else contextlib.nullcontext():
        restarts = supervise.RESTARTS if own.supervise else 0
        status, deaths = supervise.repro(root, lambda: call(command, env={**os.environ, **until}), asked, restarts)
    page = None if status or foreign else report.refresh(root)
    left = ship.wait(root, SHIP_SECONDS_AFTER_FAILURE if status else SHIP_SECONDS)
    lines = [summary.text(root, before, since_ms, stages).rstrip("\n")]
    if page:
        lines.append(f"Data      {page.relative_to(root)}  (what was kept and why; athanor data report --open)")
    if left:
        lines.append(f"Tracking  {left} runs are still to be shipped to MLflow; the next run or `make ui` does it")
    say("\n".join(lines), sys.stdout)
    if deaths:
        say("\n" + "\n".join(deaths))
    if not status:
        return 0
    if stopped(root, since_ms):
        say("\ndvc repro did not finish: a stage stopped on request; the same command goes on from there.")
        return STOPPED
    where = "how a stage died is above" if deaths else "the message of the stage is above"
    say(
        f"\ndvc repro did not finish: {where}. Finished stages are kept;"
        " mend the cause and run it again, long stages resume where they were."
    )
    return status


@contextlib.contextmanager
def foreign_graph(root: Path, base: str) -> Iterator[None]:
    """The graph for a foreign base, with DVC's name for it and the base's in it; only inside the block (see the file)."""
    if not (root / base / "config.json").is_file():
        print(f"no Hugging Face model (sft.base: {base}). Fix: name its directory", file=sys.stderr)
        raise SystemExit(1)
    text = (root / FOREIGN / "lora.yaml").read_text(encoding="utf-8")
    write_text(root / GRAPH, text.replace(f"- {PLACE}\n", f"- {json.dumps(base)}\n"))
    try:
        yield
    finally:
        (root / GRAPH).unlink(missing_ok=True)


def in_graph(words: list[str]) -> list[str]:
    """Arguments of `dvc repro` for the graph of a foreign base: its stages by their bare names, all of it by default.

    No option of `dvc repro` takes a value, so every other word is a target.
    """
    named = [f"{GRAPH.as_posix()}:{word}" if word in FOREIGN_STAGES else word for word in words]
    return named if any(not word.startswith("-") for word in words) else [*named, GRAPH.as_posix()]


def stopped(root: Path, since_ms: int) -> bool:
    """Whether a run ended on request since then, and not because of an error."""
    ends = [read_json(path) for path in (root / ".athanor" / "runs").glob("*/end.json")]
    return any(end["status"] == "KILLED" and end["ended_ms"] >= since_ms for end in ends)
