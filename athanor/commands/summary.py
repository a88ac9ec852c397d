"""What the pipeline made, for a person: stages with times, scores with errors, where things are.

    python -m athanor summary
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json
from athanor.health.reader import PHASES
from athanor.pipeline.facts import Graph
from athanor.pipeline.machine import anchor
from athanor.pipeline.progress import duration
from athanor.pipeline.watch import FILE

RATES = (
    ("stop", "end by themselves"), ("fake_turn", "fake a turn"), ("repetition", "repeat"), ("hedge", "hedge"),
    ("identity_leak", "leak an identity"),
)


def leaf(root: Path, stage: str) -> dict[str, Any] | None:
    """metrics/runs/<stage>.json, or None before the stage ever ran."""
    path = root / "metrics" / "runs" / f"{stage.replace('-', '_')}.json"
    return read_json(path) if path.is_file() else None


def runs(root: Path, stages: Iterable[str] | None = None) -> dict[str, str]:
    """Stage to the id of the run that made what is in the workspace; without `stages`, of the main graph's."""
    leaves = {stage: leaf(root, stage) for stage in stages or Graph(root).stages}
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


def text(
    root: Path, before: dict[str, str] | None = None, since_ms: int = 0, stages: Iterable[str] | None = None
) -> str:
    after = runs(root, stages)
    lines, ran, rested = ["", "Stages"], 0.0, False
    for stage in stages or Graph(root).stages:
        facts = leaf(root, stage)
        seconds = duration(facts["seconds"]) if facts else "-"
        state = "" if before is None else outcome(stage, before, after, since_ms)
        if state == "restored" and facts and facts.get("ended_ms", 0) >= since_ms > 0:
            state = "ran (resumed)"
        lines.append(f"  {stage:<17} {state:<14} {seconds:>14}")
        if facts and (before is None or state.startswith("ran")):
            ran += facts["seconds"]
        else:
            rested = True
    lines.append(f"  {'all that ran' if rested else 'all':<17} {'':<14} {duration(ran):>14}")
    if stages:
        return "\n".join([*lines, *_tuned(root), *_health(after)]) + "\n"
    lines += _scores(root)
    health = _health(after)
    if (root / "models" / "export" / "MODEL_CARD.md").is_file():
        lines += ["", "Model     models/export  (hf/ for transformers, *.gguf for llama.cpp, MODEL_CARD.md)"]
        lines += ["Chat      make serve   (a page, and OpenAI's protocol for any client; in the terminal: make chat)"]
        lines += ["Runs      make ui      (MLflow: parameters, curves, every stage of every run)"]
        health = health[1:]
    return "\n".join(lines + health) + "\n"


def _health(ran: dict[str, str]) -> list[str]:
    """What the monitor said of each training, in one line; nothing of one that ran on another machine."""
    told = {}
    for stage in PHASES:
        path = anchor() / ".athanor" / "runs" / ran.get(stage, "") / "files" / FILE
        if stage in ran and path.is_file():
            told[stage] = read_json(path)["status"]
    why = [f"athanor health {stage}" for stage, status in told.items() if status != "ok"]
    line = f"Health    {', '.join(f'{stage} {status}' for stage, status in told.items())}"
    return ["", line + (f"   (why: {', '.join(why)})" if why else "")] if told else []


def _tuned(root: Path) -> list[str]:
    """Held-out loss of a foreign base before and after its LoRA, and where the result is."""
    if not (root / "metrics" / "lora.json").is_file():
        return []
    told = read_json(root / "metrics" / "lora.json")
    lines = ["", "Held-out conversations, nats per supervised token (± standard error), and answers that end in their place"]
    for name, row in (("base", told["base_validation"]), ("tuned", told["validation"])):
        lines.append(f"  {name:<17} {row['loss']:.3f} ± {_error(row['stderr'])}   {row['stop_rate']:.1%}")
    if (root / "models" / "lora-export" / "MODEL_CARD.md").is_file():
        lines += ["", "Model     models/lora-export  (hf/ merged, adapter/ for peft, adapter.gguf for llama.cpp, MODEL_CARD.md)"]
    return lines


def _scores(root: Path) -> list[str]:
    path = root / "metrics" / "eval.json"
    if not path.is_file():
        return []
    metrics = read_json(path)
    bpb = metrics["bpb"]
    lines = ["", "Held-out text, bits per byte (± standard error); lower is better"]
    for source, row in [*sorted(bpb["sources"].items()), ("all", bpb["all"])]:
        models = "   ".join(f"{name} {row[name]['bpb']:.3f} ± {_error(row[name]['stderr'])}" for name in ("base", "sft"))
        lines.append(f"  {source:<17} {models}   gzip {row['gzip']:.3f}   xz {row['xz']:.3f}")
    verdict = "below" if bpb["beats_xz"]["base"] else "not below"
    lines.append(f"  the base model is {verdict} xz on each document alone")
    return lines + _battery(metrics)


def _battery(metrics: dict[str, Any]) -> list[str]:
    """The chat model's scores, best first, and below them what the categories cannot say."""
    scores = metrics["battery"]["sft"]
    lines = ["", "Battery, share of right answers on test items [95 % interval], and the floor: the best answer without thought"]
    marked = False
    for category, row in sorted(scores.items(), key=lambda pair: (pair[0] == "all", -pair[1]["score"], pair[0])):
        # "<" where the interval holds the floor: no better than an answer without thought.
        sign = "<" if row["low"] <= row["floor"] else " "
        marked |= sign == "<"
        spread = f"[{100 * row['low']:3.0f},{100 * row['high']:4.0f}]"
        score = f"{category:<18}{100 * row['score']:4.0f} % {spread} n {row['n']:<4}"
        lines.append(f"  {score} floor {100 * row['floor']:3.0f} {sign} {row['floor_answer']}")
    if marked:
        lines.append("  <: the interval reaches down to the floor")
    (name, pair), = metrics["paired"].items()
    pair = pair["all"]
    resolves = "" if pair["resolves_similar"] is None else (
        f"; two similar models: {100 * pair['resolves_similar']:.1f} points can be resolved"
    )
    lines.append(
        f"  {name.replace('_', ' ')}: {100 * pair['difference']:+.1f} points [{100 * pair['low']:+.1f}, "
        f"{100 * pair['high']:+.1f}], {pair['wins']} won, {pair['losses']} lost, p {pair['p']:.1g}{resolves}"
    )
    gold = [f"{model} {rows['all']['bpb']:.2f}" for model, rows in metrics["gold"].items()]
    lines.append(f"  bits per byte of the accepted answers: {', '.join(gold)}")
    told = [f"{row['rate']:.1%} {words}" for key, words in RATES for row in (metrics["health"]["sft"][key],)]
    return [*lines, f"  of {metrics['health']['sft']['stop']['n']} answers: {', '.join(told)}"]


def _error(value: float | None) -> str:
    """A standard error; one held-out document has none."""
    return "?" if value is None else f"{value:.3f}"


def options(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(text(Path.cwd()))
    return 0
