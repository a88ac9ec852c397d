"""Where a text comes from: its parts that stand word for word in the training data, and where.

athanor trace "some text"      an answer, or a part of one
athanor trace < answer.txt     the same from standard input
athanor trace --battery        of the right answers of the last evaluation: which of them are recall

Looks into data/shards and data/sft of this checkout. The first call makes an index in .athanor/origins, which takes
seconds for the default's corpus; docs/data.md tells what it costs for others. The steps are those of the model here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from athanor.base.errors import InputError
from athanor.base.work import Facts
from athanor.cli.render import plural, share, shortened, visible
from athanor.origins import recall
from athanor.origins.tracing import Place, Span, Trace, Tracer
from athanor.runtime.machine import anchor
from athanor.runtime.progress import Progress

ABOUT_CHARS, STEPS_SHOWN = 70, 5
RECALL = """verbatim           the whole answer stands in the training data
pieces             at least half of its tokens do, in spans
own words          fewer do
too short to tell  an answer so common that it would prove nothing if it stood there"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", nargs="?", help="without it, standard input is read")
    parser.add_argument("--battery", action="store_true", help="the right answers of the last evaluation")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if args.battery:
        if args.text is not None:
            raise InputError("looks at the answers of data/eval alone", where="--battery", fix="leave the text out")
        return _battery(args)
    if args.text is None and sys.stdin.isatty():
        raise InputError("no text", where="athanor trace", fix='athanor trace "some text", or athanor trace < FILE')
    text = sys.stdin.read() if args.text is None else args.text
    trace = _tracer().trace(text)
    print(_json(trace.as_json()) if args.json else report(trace))
    return 0


def _tracer() -> Tracer:
    with Progress(None, "index of the training data", "tokens") as bar:
        return Tracer(anchor(), bar.update)


def _json(value: Facts) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _battery(args: argparse.Namespace) -> int:
    rows, answers = recall.right_answers(anchor()), []
    tracer = _tracer()
    with Progress(len(rows), "answers", "answers") as bar:
        for row in rows:
            kind = recall.recall_of(row["text"], tracer)
            answers.append({name: row[name] for name in ("category", "item", "text")} | {"recall": kind})
            bar.update(1)
    table = recall.table((answer["category"], answer["recall"]) for answer in answers)
    print(_json({"categories": table, "answers": answers}) if args.json else recall_report(table))
    return 0


def recall_report(table: Mapping[str, Mapping[str, int]]) -> str:
    """The table of kinds by category for people: how many right answers, and their share of the category's."""
    width = max(map(len, table))
    lines = [f"{'':{width}}  right{''.join(f'{kind:>19}' for kind in recall.KINDS)}"]
    for category, counts in table.items():
        right = sum(counts.values())
        cells = [
            f"{counts[kind]:,} {share(counts[kind], right):>7}" if kind in counts else "–" for kind in recall.KINDS
        ]
        lines.append(f"{category:{width}}  {right:>5,}{''.join(f'{cell:>19}' for cell in cells)}")
    return "\n".join([*lines, "", RECALL])


def report(trace: Trace) -> str:
    """A trace for people: the text with its spans in quotes, then where each one stands."""
    marked = "".join(
        visible(piece) if number is None else f"«{visible(piece)}»[{number}]" for piece, number in trace.pieces
    )
    parts = [marked.rstrip(), *(_span(number, span) for number, span in enumerate(trace.spans, 1))]
    return "\n\n".join([*parts, _summary(trace)])


def _span(number: int, span: Span) -> str:
    counted = f"{plural(span.times, 'time')} in {'at least ' if span.times > span.documents > 255 else ''}"
    lines = [f"[{number}] {counted}{plural(span.documents, 'different text')}"]
    lines += [line for place in span.places for line in _place(place)]
    if (left := span.documents - len(span.places)) > 0:
        lines.append(f"    and {left:,} more")
    return "\n".join(lines)


def _place(place: Place) -> list[str]:
    name = f"{place.kind} {place.id[:12]} of {place.source}, licence {place.license}"
    about = shortened(place.about, ABOUT_CHARS)
    if place.part:
        about = f'{"in the question" if place.part == "question" else "in the answer to"} "{about}"'
    return [f"    {name}" + (f": {about}" if about else ""), f"        {_steps(place)}"]


def _steps(place: Place) -> str:
    copies = f"{plural(place.copies, 'time')} in the data; "
    if place.steps is None:
        return f"{copies}no model here was trained on it"
    if not place.steps:
        return f"{copies}not read before these weights were made"
    shown = ", ".join(f"{step:,}" for step in place.steps[:STEPS_SHOWN])
    more = len(place.steps) - STEPS_SHOWN
    training = "pretraining" if place.kind == "document" else "fine-tuning"
    return f"{copies}read at {training} step{'s' if len(place.steps) > 1 else ''} {shown}" + (
        f" and {more} more" if more > 0 else ""
    )


def _summary(trace: Trace) -> str:
    found = f"{trace.found:,} of {trace.tokens:,} tokens stand in the training data, in spans of at least"
    return f"{found} {trace.min_words} words or as the whole text; the others are the model's own words."
