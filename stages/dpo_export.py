"""Write a model that preferences trained for transformers, peft and llama.cpp, check each file, and its card."""

from __future__ import annotations

from functools import partial

from athanor.runtime.process import stage_main
from athanor.tuning.export import export

run = partial(export, method="dpo")

if __name__ == "__main__":
    stage_main("dpo-export", run)
