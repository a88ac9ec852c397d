"""A checkpoint's weights without optimiser state, as a Hugging Face directory.

    python -m athanor shrink SOURCE OUT [--dtype float32 | bfloat16 | float16]

SOURCE: an id from `athanor slots` (its newest checkpoint), or a checkpoint's
folder. `athanor chat --model OUT`, transformers and lm_eval read OUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from athanor.cli import slots
from athanor.base.errors import InputError
from athanor.export.huggingface import DTYPES
from athanor.export.shrink import newest, shrink
from athanor.runtime.machine import anchor


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a slot's id, or a checkpoint's folder")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise InputError("exists", where=str(args.out), fix="name a directory that does not exist")
    source = Path(args.source)
    if not source.is_dir():
        source = newest(slots.choose(slots.find(anchor()), args.source).path)
    made = shrink(source, args.out, args.dtype)
    before, after = slots.size(made.before), slots.size(made.after)
    print(f"step {made.step:,}: {before} with optimiser state, {after} in {args.out} ({made.after / made.before:.0%})")
    return 0
