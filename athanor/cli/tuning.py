"""Tune another model, or train our own chat model on: by examples, by preferences, or by rewards.

    athanor side tune      conversations or text: LoRA, QLoRA or all weights; docs/finetuning.md
    athanor side dpo       pairs of a better and a worse answer; docs/rl.md
    athanor side grpo      questions whose answers a reward judges; docs/rl.md

Each is a graph beside the pipeline (side/*.yaml), run by DVC. Its model is side.base of params.yaml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from athanor.base.artifacts import read_json
from athanor.cli import side
from athanor.runtime.closure import SIDE
from athanor.runtime.run import PARAMS
from athanor.runtime.schema import check_file
from athanor.tuning.model import base_digests, libraries

METHODS = {"tune": (), "dpo": ("trl",), "grpo": ("trl",)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--force", action="store_true", help="train again even if nothing has changed")


def run(args: argparse.Namespace) -> int:
    root, method = Path.cwd(), args.method
    base = check_file(PARAMS)["side"].base
    libraries("transformers", "peft", *METHODS[method])
    if not Path(base).is_relative_to("models/export"):  # which DVC makes where it is missing
        base_digests(base)
    forced = [(f"{method}-data", False), (method, True)] if args.force else []
    for stage, force in [*forced, (f"{method}-export", False)]:
        if status := side.repro(root, Path(SIDE) / f"{method}.yaml", stage, force, base):
            return status
    print("\n".join(summary(root, method)))
    return 0


def summary(root: Path, method: str) -> Iterator[str]:
    """The held-out scores before and after, and how to use the result."""
    trained = read_json(root / "metrics" / f"{method}.json")
    before, after = trained["before"], trained["after"]
    for name in ("val_loss", "val_reward"):
        if name in before:
            yield f"{name:<12}{before[name]:>9.4f} before, {after[name]:>9.4f} after {trained['steps']} steps"
    yield f"model: models/{method}-export (MODEL_CARD.md says how to use it)"
    yield f"talk to it: athanor chat --model models/{method}-export, or athanor serve, which lists it"
