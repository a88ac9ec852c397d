"""Train the chat model on: by rewards for answers that a program can check (grpo), or by pairs of answers (dpo).

    athanor rl grpo      questions, training, the battery before and after, and an export; docs/rl.md
    athanor rl dpo       the same from pairs: thumbs and corrections of the chat page, or a data set

Both are graphs of their own (rl/grpo.yaml, rl/dpo.yaml) beside the main one, which stays as it is: models/sft is what
they begin with, models/grpo and models/dpo what they make. The parameters are in params.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.cli import side
from athanor.runtime.closure import RL

METHODS = ("grpo", "dpo")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--force", action="store_true", help="train again even if nothing has changed")


def run(args: argparse.Namespace) -> int:
    root, method = Path.cwd(), args.method
    file = Path(RL) / f"{method}.yaml"
    forced = [(f"{method}-data", False), (method, True)] if args.force else []
    for stage, force in [*forced, (f"{method}-export", False)]:
        if status := side.repro(root, file, stage, force):
            return status
    print("\n".join(summary(root, method)))
    return 0


def summary(root: Path, method: str) -> Iterator[str]:
    """What training changed: the battery by category, text, and how to talk to the model."""
    measured, trained = (read_json(root / "metrics" / f"{method}{part}.json") for part in ("_eval", ""))
    before, after = (measured["battery"][name] for name in ("sft", method))
    (compared,) = measured["paired"].values()
    yield f"{'':<24}{'before':>8}{'after':>8}  difference, 95 % interval"
    for category in sorted(set(before) - {"all"}, key=lambda name: -abs(compared[name]["difference"])):
        if compared[category]["difference"]:
            yield _row(category, before, after, compared)
    yield _row("all", before, after, compared)
    bits = [measured["bpb"]["all"][name]["bpb"] for name in ("sft", method)]
    yield f"{'bits per byte of text':<24}{bits[0]:>8.3f}{bits[1]:>8.3f}"
    yield f"weights of step {trained['chosen_step']} of {trained['steps']}; each item: data/{method}-eval/battery.md"
    yield f"talk to it: athanor chat --model models/{method}-export, or athanor serve, which lists it"


def _row(name: str, before: Mapping[str, Any], after: Mapping[str, Any], compared: Mapping[str, Any]) -> str:
    pair, scores = compared[name], (f"{100 * row[name]['score']:.1f} %" for row in (before, after))
    interval = f"{100 * pair['low']:+.1f} to {100 * pair['high']:+.1f}"
    return f"{name:<24}{''.join(f'{score:>8}' for score in scores)}  {100 * pair['difference']:+.1f} points, {interval}"
