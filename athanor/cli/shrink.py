"""A checkpoint's weights without optimiser state, as a Hugging Face directory.

    python -m athanor shrink SOURCE OUT [--dtype float32 | bfloat16 | float16]

SOURCE: an id from `athanor slots` (its newest checkpoint), or a checkpoint's
folder. `athanor chat --model OUT`, transformers and lm_eval read OUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from athanor.base.artifacts import new_dir, write_json
from athanor.base.errors import InputError
from athanor.catalog.checkpoints import checkpoint_source, slot_of
from athanor.catalog.places import ORIGIN, origin
from athanor.cli import slots
from athanor.export.huggingface import DTYPES, write_huggingface
from athanor.runtime.machine import anchor
from athanor.training import checkpoint


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a slot's id, or a checkpoint's folder")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise InputError("exists", where=str(args.out), fix="name a directory that does not exist")
    source = Path(args.source)
    if not source.is_dir():
        source = newest_checkpoint(slots.choose(slots.find(anchor()), args.source).path)
    step, bytes_before, bytes_after = shrink(source, args.out, args.dtype)
    result = f"{slots.size(bytes_after)} in {args.out} ({bytes_after / bytes_before:.0%})"
    print(f"step {step:,}: {slots.size(bytes_before)} with optimiser state, {result}")
    return 0


def newest_checkpoint(slot: Path) -> Path:
    """The newest checkpoint of a slot; it is not read."""
    checkpoints = checkpoint.steps(slot)
    if not checkpoints:
        raise InputError("no checkpoint in it", where=str(slot), fix="athanor slots lists what there is")
    return checkpoints[0]


def shrink(source: Path, out: Path, dtype: str, **about: Any) -> tuple[int, int, int]:
    """Write the weights of one checkpoint (`SLOT/step_N`) to `out`; returns its step, its bytes and those of `out`.

    `about`: more for the file that says where it is from. InputError if any byte of it is torn.
    """
    source = source.resolve()
    model_source = checkpoint_source(source, slot_of(source))[0]
    with new_dir(out) as folder:
        write_huggingface(folder, model_source, dtype)
        write_json(folder / ORIGIN, origin(source) | about)
    return checkpoint.step_of(source), slots.bytes_of(source), slots.bytes_of(out)
