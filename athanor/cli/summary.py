"""What the pipeline made, for a person: stages with times, scores with errors, where things are.

    python -m athanor summary [--all]

It fits a screen of 100 columns and 40 lines. With --all it has every source, every category, and the errors of both.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.cli.render import fill_template
from athanor.monitor.monitor import PHASES
from athanor.runtime import dvc_lock
from athanor.runtime.facts import Graph
from athanor.runtime.machine import anchor
from athanor.runtime.progress import duration
from athanor.runtime.watch import FILE

RATES = (
    ("stop", "end by themselves"),
    ("fake_turn", "fake a turn"),
    ("repetition", "repeat"),
    ("hedge", "hedge"),
    ("identity_leak", "leak an identity"),
)

MOST_SOURCES, MOST_CATEGORIES, COLUMNS = 3, 5, 100
NAMED = (("eval", "the scores"), ("export", "models/export"))
NOT_ASKED = "not asked for"
ELSEWHERE = "unknown (trained elsewhere)"
ASKED_FIRST = ("first_words", "identity", "unknown")


def leaf(root: Path, stage: str) -> dict[str, Any] | None:
    """metrics/runs/<stage>.json, or None before the stage ever ran."""
    return _metrics(root, f"runs/{stage.replace('-', '_')}")


def runs(root: Path) -> dict[str, str]:
    """Stage to the id of the run that made what is in the workspace."""
    leaves = {stage: leaf(root, stage) for stage in Graph(root).stages}
    return {stage: facts["run"] for stage, facts in leaves.items() if facts}


def outcome(stage: str, before: dict[str, str], after: dict[str, str], since_ms: int) -> str:
    """ran, kept (nothing to do), restored (from DVC's run cache) or missing."""
    if stage not in after:
        return "missing"
    if before.get(stage) == after[stage]:
        return "kept"
    stamp = re.search(r"-(\d{13})-", after[stage])
    # A resumed run keeps its first id, so age alone cannot tell it from a restored one.
    return "ran" if stamp and int(stamp[1]) >= since_ms else "restored"


def finished(root: Path, before: dict[str, str], since_ms: int) -> list[str]:
    """The stages that came to their end since then, when the whole did not."""
    after = runs(root)
    return [stage for stage in after if outcome(stage, before, after, since_ms) in ("ran", "restored")]


def out_of_date(root: Path) -> set[str]:
    """The stages whose results are older than what they are made from, because DVC was asked for other stages alone."""
    path, graph = root / dvc_lock.LOCK, Graph(root)
    made, locked = dvc_lock.outputs(path), dvc_lock.stages(path)
    changed = {
        stage
        for stage, entry in locked.items()
        if any(made.get(dep["path"]) not in (None, dep.get("md5")) for dep in entry.get("deps", ()))
    }
    return {stage for stage in graph.stages if changed & {stage, *graph.upstream(stage)}}


def on_one_screen(categories: list[str]) -> list[str]:
    """Of the categories, best first: those that a person asks first, and the best and worst of the others by turns."""
    shown, turn = [name for name in ASKED_FIRST if name in categories], 0
    others = [name for name in categories if name not in shown]
    while others and len(shown) < MOST_CATEGORIES:
        shown.append(others.pop(-turn))
        turn = 1 - turn
    return [name for name in categories if name in shown]


def text(
    root: Path,
    before: dict[str, str] | None = None,
    since_ms: int = 0,
    whole: bool = False,
    asked: Container[str] | None = None,
) -> str:
    """The summary. `before`: run ids before this repro.

    asked: the stages that this repro was asked for, None for all.
    """
    after, rows, seconds_run = runs(root), [], 0.0
    older = out_of_date(root)
    for stage in Graph(root).stages:
        facts = leaf(root, stage)
        state = "" if before is None else outcome(stage, before, after, since_ms)
        if state == "restored" and facts and facts.get("ended_ms", 0) >= since_ms > 0:
            state = "ran (resumed)"
        if asked is not None and stage not in asked and state in ("kept", "missing"):
            state = NOT_ASKED
        counted = bool(facts) and (before is None or state.startswith("ran"))
        seconds_run += facts["seconds"] if facts and counted else 0.0
        rows.append((stage, state, duration(facts["seconds"]) if facts else "-", counted))
    scores = None if "eval" in older else _metrics(root, "eval")
    battery = scores["battery"]["sft"] if scores else {}
    categories = sorted(battery.keys() - {"all"}, key=lambda name: (-battery[name]["score"], name))
    filled = fill_template(
        "summary.txt.j2",
        whole=whole,
        categories=[*(categories if whole else on_one_screen(categories)), *(["all"] if battery else [])],
        left_out=0 if whole else len(categories) - len(on_one_screen(categories)),
        most_sources=MOST_SOURCES,
        stages=rows,
        changed=[row for row in rows if row[1] not in ("kept", NOT_ASKED)],
        kept=sum(row[1] == "kept" for row in rows),
        older=[words for stage, words in NAMED if stage in older and stage in after],
        total=duration(seconds_run),
        scores=scores,
        sft_data=_metrics(root, "sft_data"),
        exported=(root / "models/export/MODEL_CARD.md").is_file(),
        unwritten=unwritten(root),
        aside=_stepped_aside(root),
        health=_health({stage: run for stage, run in after.items() if stage not in older}),
        elsewhere=ELSEWHERE,
        rates=RATES if whole else RATES[:3],
    )
    lines = (line if whole or len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in filled.splitlines())
    return "".join(f"{line}\n" for line in lines)


def unwritten(root: Path) -> list[str]:
    """Types of GGUF files that the export left out."""
    path = root / "models/export/parity.json"
    parity = read_json(path) if path.is_file() else {}
    return [name.removeprefix("llama_cpp_") for name, fact in parity.items() if str(fact).startswith("not written")]


def _stepped_aside(root: Path) -> list[str]:
    """The classifiers that had too little to learn from."""
    metrics = _metrics(root, "train_classifiers") or {}
    return [name.removesuffix("_no") for name, facts in metrics.items() if facts.get("stepped_aside")]


def _metrics(root: Path, name: str) -> dict[str, Any] | None:
    path = root / "metrics" / f"{name}.json"
    return read_json(path) if path.is_file() else None


def _health(run_ids: dict[str, str]) -> dict[str, str]:
    """What the monitor said of each training; nothing where all of them ran in other checkouts."""
    statuses = {}
    for stage in (stage for stage in PHASES if stage in run_ids):
        folder = anchor() / ".athanor" / "runs" / run_ids[stage]
        if (folder / "files" / FILE).is_file():
            statuses[stage] = read_json(folder / "files" / FILE)["status"]
        elif not folder.is_dir():
            statuses[stage] = ELSEWHERE
    return statuses if {*statuses.values()} - {ELSEWHERE} else {}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="every source, every category, all that is known of them")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(text(Path.cwd(), whole=args.all))
    return 0
