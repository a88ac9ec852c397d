"""A correction as a held-out question of the battery: its prompt is asked of every model, and kept out of training."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from athanor.artifacts import write_text
from athanor.corpus.conversations import DIFFICULTIES, Item, Message
from athanor.corpus.exercises.written import BY_HAND, read_written
from athanor.errors import AthanorError, InputError
from athanor.evaluation.item_gate import check_items
from athanor.evaluation.scoring import NUMBER, score
from athanor.params.strict import read_yaml
from athanor.serving.store import Store

OUT = "battery/chat.jsonl"


def options(command: argparse.ArgumentParser) -> None:
    command.add_argument("id", type=int, metavar="ID", help="as athanor chat list --all shows it")
    command.add_argument("--kind", choices=BY_HAND, default="exact", help="how answers are scored (docs/evaluation.md)")
    command.add_argument("--category", default="chat", help="name of the row in the battery's table (default chat)")
    command.add_argument("--difficulty", choices=DIFFICULTIES, default="medium")
    command.add_argument("--reject", action="append", default=[], metavar="TEXT", help="one more wrong answer")
    command.add_argument("--check", action="append", default=[], metavar="CHECK", help='for kind format: "max_words 5"')
    command.add_argument("--out", type=Path, default=Path(OUT), help=f"file of items to add to (default {OUT})")
    command.set_defaults(run=add)


def add(store: Store, args: argparse.Namespace) -> int:
    """Append the item if the reader of such files and the battery's gate take it; else nothing changes."""
    row = item_row(store.correction(args.id), args)
    out: Path = args.out
    old = out.read_text(encoding="utf-8") if out.is_file() else ""
    text = old + ("\n" if old and not old.endswith("\n") else "") + json.dumps(row, ensure_ascii=False) + "\n"
    items = _read(text, out)
    if items[-1].question in [item.question for item in items[:-1]]:
        fix = "edit that line, or take it out first"
        raise InputError("an item of this file asks the same already", where=str(out), fix=fix)
    check_items(items)
    write_text(out, text)
    print(f"{out}: {len(items)} items; the new one is {items[-1].category}/{items[-1].id}")
    print(f"  takes     {row['accepted'][0]!r}\n  refuses   " + ", ".join(repr(text) for text in row["rejected"]))
    print(_use(out))
    return 0


def item_row(correction: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The line for a file of items. Refused are the answer that was corrected, its other variants, and --reject.

    A variant that somebody liked, or that the scorer takes, is no wrong answer and is left out.
    """
    prompt = tuple(Message(**message) for message in correction["prompt"])
    where = f"correction {correction['id']}"
    if args.kind == "likelihood" and len(prompt) > 1:
        what = f"kind likelihood continues one text, and this prompt has {len(prompt)} messages"
        raise InputError(what, where=where, fix="take another kind, or a question that began its chat")
    if bool(args.check) != (args.kind == "format"):
        raise InputError("--check goes with --kind format, which needs one", where=where, fix="see docs/evaluation.md")
    accepted = [correction["correction"]]
    numbers = NUMBER.findall(accepted[0])
    if args.kind == "numeric" and numbers and not re.fullmatch(r"-?\d+(\.\d+)?", accepted[0]):
        accepted = [numbers[-1], *accepted]  # the reader wants the bare number first
    made = Item(args.category, prompt, args.kind, accepted[0], tuple(accepted), (), checks=tuple(args.check))
    others = [
        message["content"]
        for message in correction["variants"]
        if (message["feedback"] or {}).get("verdict") != "up" and not score(made, message["content"])
    ]
    rejected = [text for text in dict.fromkeys([correction["answer"], *args.reject, *others]) if text.strip()]
    needed = 1 if args.kind == "likelihood" else 2
    if len(rejected) < needed:
        what = f"an item needs {needed} wrong answers to prove its scorer, found {len(rejected)}"
        raise InputError(what, where=where, fix='add --reject "a wrong answer"')
    row: dict[str, Any] = {
        "category": args.category,
        "kind": args.kind,
        "difficulty": args.difficulty,
        "prompt": prompt[0].content if len(prompt) == 1 else correction["prompt"],
        "accepted": accepted,
        "rejected": rejected,
    }
    return {**row, "checks": args.check} if args.check else row


def _read(text: str, out: Path) -> list[Item]:
    """The items of a text as the download stage will read them; its errors name `out`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.jsonl"
        path.write_text(text, encoding="utf-8")
        try:
            return read_written(path, 0)
        except InputError as error:
            where = error.where.replace(str(path), str(out))
            raise InputError(error.what, where=where, fix=error.fix) from None


def _use(out: Path) -> str:
    """What params.yaml has to say for the item to be asked."""
    try:
        named = (read_yaml("params.yaml").get("battery") or {}).get("written")
    except AthanorError:
        named = None
    if named == out.as_posix():
        return "params.yaml names the file: from the next dvc repro on it is asked, and kept out of training"
    use = f"to ask it, set battery.written: {out.as_posix()} in params.yaml"
    if out.parts[:1] != ("battery",):
        use += " (the file has to lie in battery/)"
    if named:
        use += f"\nThat names one file, now {named}: with --out {named} the item joins those."
    return use
