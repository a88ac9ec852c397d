"""Check an exported model against its own metadata, this checkout and the Git history.

    python -m athanor verify [PATH] [--data] [--strict]

PATH: models/export, a Hugging Face directory or a GGUF file, also one that was
copied elsewhere. Exit status 0: nothing differs. 1: something does. 2 with
--strict: nothing differs, but not everything could be checked.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from athanor.export.verify import DIFFERS, MATCHES, UNCHECKED, Line, verify

MARKS = {MATCHES: "matches  ", DIFFERS: "DIFFERS  ", UNCHECKED: "unchecked"}


def report(lines: Sequence[Line]) -> str:
    width = max(len(line.what) for line in lines)
    rows = [f"{MARKS[line.status]}  {line.what:<{width}}  {line.detail}" for line in lines]
    counts = Counter(line.status for line in lines)
    text = f"{counts[MATCHES]} checks match, {counts[DIFFERS]} differ, {counts[UNCHECKED]} could not be made here"
    return "\n".join([*rows, f"{text}."])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default="models/export", help="folder, Hugging Face directory or GGUF file")
    parser.add_argument("--data", action="store_true", help="hash again every file that the data's manifests list")
    parser.add_argument("--strict", action="store_true", help="status 2 if anything could not be checked")


def run(args: argparse.Namespace) -> int:
    lines = verify(args.path, data=args.data)
    print(report(lines))
    found = {line.status for line in lines}
    if DIFFERS in found:
        return 1
    return 2 if args.strict and UNCHECKED in found else 0
