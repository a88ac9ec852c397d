"""Write the model of preference optimisation for transformers and llama.cpp, and check that every runtime agrees with ours."""

from __future__ import annotations

from pathlib import Path

from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from stages import grpo_export


def run(run: Run) -> None:
    grpo_export.publish(run, Path("models/dpo"), Path("models/dpo-export"))


if __name__ == "__main__":
    stage_main("dpo-export", run)
