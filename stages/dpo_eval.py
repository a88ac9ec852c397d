"""Measure what the preferences changed: the fine-tuned model and the one trained on, on the same held-out items."""

from __future__ import annotations

from pathlib import Path

from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from stages import evaluate


def run(run: Run) -> None:
    evaluate.measure(run, {"sft": Path("models/sft"), "dpo": Path("models/dpo")}, Path("data/dpo-eval"))


if __name__ == "__main__":
    stage_main("dpo-eval", run)
