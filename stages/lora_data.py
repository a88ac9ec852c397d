"""Build the rows for a foreign base: the conversations of sft-data in the base's own tokens and layout."""

from __future__ import annotations

from pathlib import Path

from athanor.adapters.tokenizer import ForeignTokenizer
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from stages import sft_data

OUT = Path("data/lora")


def run(run: Run) -> None:
    tokenizer = ForeignTokenizer(run.param("sft.base"))
    sft_data.build(run, tokenizer, OUT, {}, {"tokenizer": tokenizer.digest})


if __name__ == "__main__":
    stage_main("lora-data", run)
