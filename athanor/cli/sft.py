"""athanor sft peek [--source NAME | --row N] [--seed S] [--count K]: packed rows of data/sft as the model learns them.

Supervised tokens are green on a terminal and between ⟦ and ⟧ elsewhere, or
when NO_COLOR is set; control ids are visible, and bytes that are no text are shown as \\xNN.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from athanor.base.artifacts import read_manifest
from athanor.base.errors import InputError
from athanor.data.order import permutation
from athanor.data.rows import KIND, VERSION, PackedRows
from athanor.tokenizer.tokenizer import Tokenizer

DATA, TOKENIZER = Path("data/sft"), Path("models/tokenizer")
COUNT = 3
FIX = "dvc repro sft-data"


@dataclass(frozen=True)
class Style:
    """The text before and after a supervised stretch, a control id and a heading."""

    supervised: tuple[str, str]
    control: tuple[str, str]
    heading: tuple[str, str]


COLOUR = Style(("\x1b[32m", "\x1b[0m"), ("\x1b[2m", "\x1b[22m"), ("\x1b[1m", "\x1b[0m"))
PLAIN = Style(("⟦", "⟧"), ("", ""), ("", ""))


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True)
    peek = commands.add_parser("peek", help="print packed rows with what is supervised")
    selection = peek.add_mutually_exclusive_group()
    selection.add_argument("--source", help="rows that hold something of this source")
    selection.add_argument("--row", type=int, help="this row; otherwise rows are drawn")
    peek.add_argument("--split", choices=("train", "val"), default="train")
    peek.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    peek.add_argument("-n", "--count", type=int, default=COUNT, help=f"how many rows to draw (default {COUNT})")


def run(args: argparse.Namespace) -> int:
    manifest = read_manifest(DATA, KIND, VERSION)
    tokenizer, rows = Tokenizer.load(TOKENIZER), PackedRows(DATA, args.split)
    if manifest["tokenizer"] != tokenizer.digest:
        raise InputError("made with another tokenizer than models/tokenizer", where=str(DATA), fix=FIX)
    known = [*manifest["sources"], *manifest["replay_sources"]]
    if args.source is not None and args.source not in known:
        fix = f"use one of: {', '.join(known)}"
        raise InputError(f"no source is named '{args.source}'", where="--source", fix=fix)
    style = COLOUR if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else PLAIN
    for row in choose_rows(rows, args.source, args.row, args.seed, args.count):
        print("\n".join(row_lines(tokenizer, rows, row, style, args.source)))
    return 0


def choose_rows(rows: PackedRows, source: str | None, row: int | None, seed: int, count: int) -> list[int]:
    """The row asked for, or `count` of those that hold `source`, drawn by `seed`."""
    if row is not None:
        if not 0 <= row < len(rows):
            raise InputError(f"there is no row {row}", where="--row", fix=f"use 0 to {len(rows) - 1}")
        return [row]
    order = permutation(len(rows), seed, "peek").tolist()
    if source is not None:
        order = [number for number in order if source in map(rows.source, rows.numbers(number))]
    if not order:
        fix = "see in metrics/sft_data.json what became of its conversations"
        fix = fix if rows.split == "train" else "use --split train"
        raise InputError(f"no row of {rows.split} holds anything of '{source}'", where="--source", fix=fix)
    return order[: max(count, 0)]


def row_lines(
    tokenizer: Tokenizer, rows: PackedRows, row: int, style: Style, source: str | None = None
) -> Iterator[str]:
    """The lines for one row: what it is made of, and its entries; those of other sources than `source` as a count."""
    numbers, capacity = rows.numbers(row), rows.context_tokens + 1
    entries = [rows.conversation(number) for number in numbers]
    used = sum(len(ids) for ids, _ in entries)
    learned = sum(int(mask.sum()) for _, mask in entries)
    title = f"row {row}: {used} of {capacity} tokens used, {capacity - used} padding, {learned / used:.0%} supervised"
    yield title.join(style.heading)
    others = [number for number in numbers if source not in (None, rows.source(number))]
    if others:
        yield f"-- {len(others)} entries of other sources".join(style.heading)
    for number, (ids, mask) in zip(numbers, entries, strict=True):
        if number in others:
            continue
        title = f"{rows.name(number)}: {len(ids)} tokens, {mask.mean():.0%} supervised"
        yield f"-- {title}".join(style.heading)
        yield highlighted(tokenizer, ids, mask, style)
    yield ""


def highlighted(tokenizer: Tokenizer, ids: np.ndarray, mask: np.ndarray, style: Style) -> str:
    """The text of an entry with its supervised stretches marked."""
    names = {number: piece for piece, number in tokenizer.control_ids.items()}
    boundaries = [0, *(np.flatnonzero(np.diff(mask.astype(np.int8))) + 1).tolist(), len(ids)]
    pieces = []
    for start, end in pairwise(boundaries):
        text = ""
        for control, tokens in groupby(ids[start:end].tolist(), names.__contains__):
            if control:
                text += "".join(names[token].join(style.control) for token in tokens)
            else:
                text += printable(tokenizer.decode_bytes(list(tokens)))
        pieces.append(text.join(style.supervised) if mask[start] else text)
    return "".join(pieces)


def printable(data: bytes) -> str:
    """Text without terminal controls: a stored answer must not be able to recolour or clear a screen."""
    text = data.decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
