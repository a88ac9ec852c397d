"""Which documents were in the batches of some steps: of a loss that jumped, or of a step that a finding names.

athanor data steps 1250:1253                  of pretraining
athanor data steps 1250:1253 --stage sft      of fine-tuning
athanor data steps 1250                       one step

A batch is a function of the step, the seed and the data, so they are read from
`params.yaml` and the data as they are now, also for steps to come. Data that
the latest run left out after a spike is left out here, too.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from athanor.base.errors import InputError
from athanor.cli.health import choose
from athanor.model.weights import load_config
from athanor.runtime.journal import live, rows
from athanor.runtime.machine import anchor
from athanor.runtime.run import Run
from athanor.runtime.ship import run_folders
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.finetuning import FineTuning
from athanor.training.pretrain_params import PretrainParams
from athanor.training.sft_params import SftParams
from athanor.training.skipped_ranges import skipped_before

CHARACTERS = 60  # of a document's text
STAGES = ("pretrain", "sft")


class Part(NamedTuple):
    """What a batch holds of a document: its name, its source, and the tokens."""

    name: str
    source: str
    ids: list[int]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("steps", metavar="A[:B]", help="the first step and the last")
    parser.add_argument("--stage", choices=STAGES, default="pretrain", help="whose steps (pretrain)")


def run(args: argparse.Namespace) -> int:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", args.steps)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise InputError(f"'{args.steps}' names no steps", where="athanor data steps", fix="as 1250 or 1250:1253")
    sampler, batch_tokens, tokenizer = _training(args.stage)
    skipped, by_source = _skipped_ranges(args.stage), Counter[str]()
    for step in range(first, last + 1):
        print(f"step {step:,}")
        position = (step - 1) * batch_tokens
        for part in parts(sampler, position, batch_tokens, skipped_before(skipped, position)):
            by_source[part.source] += len(part.ids)
            print(f"  {len(part.ids):>6,} tokens  {part.name:<40} {tokenizer.decode(part.ids)[:CHARACTERS]!r}")
    total = by_source.total()
    print(", ".join(f"{name} {count / total:.1%}" for name, count in by_source.most_common()) + f" of {total:,} tokens")
    return 0


def parts(sampler: Any, position: int, batch_tokens: int, skipped: int) -> Iterator[Part]:
    """What the batch at a position of training holds of each document, row by row."""
    batch = sampler.batch(position, batch_tokens, skipped)
    for row, (ids, documents) in enumerate(zip(batch.tokens_BS, batch.document_BS, strict=True)):
        start = position + row * sampler.context_tokens
        places = np.arange(sampler.context_tokens)  # the last token of a row is the first of another
        for document, group in itertools.groupby(places.tolist(), key=lambda place, of=documents: int(of[place])):
            if document >= 0:  # else padding
                where = list(group)
                name = sampler.document_name(start, skipped, document)
                source = batch.sources[batch.source_BS[row, where[0]]]
                yield Part(name, source, ids[where].tolist())


def _training(stage: str) -> tuple[Any, int, Tokenizer]:
    """The sampler of a stage as `params.yaml` and the data are now, the tokens of a batch, and the tokenizer."""
    from stages import pretrain, sft

    asked = Run(stage, f"stages.{stage}")
    tokenizer = Tokenizer.load(pretrain.TOKENIZER)
    if stage == "pretrain":
        params = asked.params("pretrain", PretrainParams)
        return pretrain.prepare(asked, params).sampler, params.batch_tokens, tokenizer
    tuned = asked.params("sft", SftParams)
    return FineTuning(tuned, sft.DATA, load_config(sft.BASE)[0].context_tokens).sampler, tuned.batch_tokens, tokenizer


def _skipped_ranges(stage: str) -> list[dict[str, Any]]:
    """What the latest run of the stage left out; nothing where none ran."""
    if not any(folder.name.startswith(f"{stage}-") for folder in run_folders(anchor())):
        return []
    journal: Path = choose(anchor(), stage) / "journal.jsonl"
    return [row["skip"] for row in live(rows(journal.read_bytes())) if "skip" in row]
