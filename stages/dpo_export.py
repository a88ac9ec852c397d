"""Write a model that preferences trained for transformers, peft and llama.cpp, check each file, and its card."""

from __future__ import annotations

from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.tuning.export import export


def run(run: Run) -> None:
    export(run, "dpo")


if __name__ == "__main__":
    stage_main("dpo-export", run)
