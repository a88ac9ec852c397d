"""Talk to a model in the terminal; or use the corrections that the chat page collected.

athanor chat [--model DIR ...]                talk to the exported model (athanor chat --help)
athanor chat list [--all]                     corrections that wait to be accepted, or all of them
athanor chat accept ID ... | --all            take them for training; reject: do not
athanor chat export OUT.jsonl                 the accepted ones as rows for instruction tuning
athanor chat pairs OUT.jsonl                  better and worse answers, for preference optimisation
athanor chat item ID [--kind K] [--reject T]  one as a held-out question of the battery
athanor chat import-old [OLD]                 chats and feedback of before, out of .athanor/chat.sqlite3
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_text
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import read_yaml
from athanor.cli.chat_import import import_option
from athanor.cli.chat_rows import row_options
from athanor.cli.render import plural, shortened
from athanor.evaluation.item_gate import check_items
from athanor.evaluation.scoring import NUMBER, score
from athanor.runtime.machine import anchor
from athanor.serving.feedback import FILE, Feedback
from athanor.sources.exercises.written import BY_HAND, read_written
from athanor.text.conversations import DIFFICULTIES, Item, Message

OUT = "battery/chat.jsonl"


def _correction_options(commands: Any) -> None:
    list_command = commands.add_parser("list", help="corrections that wait to be accepted")
    list_command.add_argument("--all", action="store_true", help="also the accepted and the rejected ones")
    list_command.set_defaults(run=list_corrections)
    for name, status, what in (
        ("accept", "accepted", "take corrections for training"),
        ("reject", "rejected", "do not take corrections"),
    ):
        command = commands.add_parser(name, help=what)
        selection = command.add_mutually_exclusive_group(required=True)
        selection.add_argument(
            "ids", nargs="*", type=int, default=[], metavar="ID", help="as athanor chat list shows them"
        )
        selection.add_argument("--all", action="store_true", help="every one that waits")
        command.set_defaults(run=set_status, status=status)


def list_corrections(feedback: Feedback, args: argparse.Namespace) -> int:
    corrections = feedback.corrections(None if args.all else "candidate")
    for row in corrections:
        print(f'{row["id"]}  {row["status"]}, {row["model"]}, in "{shortened(row["title"])}"')
        turns = sum(message["role"] == "user" for message in row["prompt"])
        after = f" (question {turns} of its chat)" if turns > 1 else ""
        print(f"    asked      {shortened(row['prompt'][-1]['content'])}{after}")
        print(f"    answered   {shortened(row['answer'])}")
        print(f"    corrected  {shortened(row['correction'])}")
    waits = "that waits" if len(corrections) == 1 else "that wait"
    print(plural(len(corrections), "correction") + ("" if args.all else f" {waits}; --all shows those settled, too"))
    return 0


def set_status(feedback: Feedback, args: argparse.Namespace) -> int:
    ids = [row["id"] for row in feedback.corrections("candidate")] if args.all else list(dict.fromkeys(args.ids))
    for correction_id in ids:
        feedback.correction(correction_id)  # an unknown one stops all, before the first is settled
    for correction_id in ids:
        feedback.settle(correction_id, args.status)
    print(f"{args.status} {len(ids)}: {', '.join(map(str, ids))}" if ids else "no correction waits")
    if ids and args.status == "accepted":
        print("write them with: athanor chat export corpus/corrections.jsonl")
    return 0


# -- an item of the battery ---------------------------------------------------------------------------------------------


def _item_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("id", type=int, metavar="ID", help="as athanor chat list --all shows it")
    command.add_argument("--kind", choices=BY_HAND, default="exact", help="how answers are scored (docs/evaluation.md)")
    command.add_argument("--category", default="chat", help="name of the row in the battery's table (default chat)")
    command.add_argument("--difficulty", choices=DIFFICULTIES, default="medium")
    command.add_argument("--reject", action="append", default=[], metavar="TEXT", help="one more wrong answer")
    command.add_argument("--check", action="append", default=[], metavar="CHECK", help='for kind format: "max_words 5"')
    command.add_argument("--out", type=Path, default=Path(OUT), help=f"file of items to add to (default {OUT})")
    command.set_defaults(run=add_item)


def add_item(feedback: Feedback, args: argparse.Namespace) -> int:
    """Append the item if the reader of such files and the battery's gate take it; else nothing changes."""
    row = item_row(feedback.correction(args.id), args)
    out: Path = args.out
    old = out.read_text(encoding="utf-8") if out.is_file() else ""
    text = old + ("\n" if old and not old.endswith("\n") else "") + json.dumps(row, ensure_ascii=False) + "\n"
    items = _read_items(text, out)
    if items[-1].question in [item.question for item in items[:-1]]:
        fix = "edit that line, or take it out first"
        raise InputError("an item of this file asks the same already", where=str(out), fix=fix)
    check_items(items)
    write_text(out, text)
    print(f"{out}: {plural(len(items), 'item')}; the new one is {items[-1].category}/{items[-1].id}")
    print(f"  takes     {row['accepted'][0]!r}\n  refuses   " + ", ".join(repr(text) for text in row["rejected"]))
    print(_usage_hint(out))
    return 0


def item_row(correction: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The line for a file of items. Refused are the answer that was corrected, others that were judged, and --reject.

    One that somebody liked, or that the scorer takes, is no wrong answer and is left out.
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
    item = Item(args.category, prompt, args.kind, accepted[0], tuple(accepted), (), checks=tuple(args.check))
    others = [
        row["answer"] for row in correction["variants"] if row["verdict"] != "up" and not score(item, row["answer"])
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


def _read_items(text: str, out: Path) -> list[Item]:
    """The items of a text as the download stage will read them; its errors name `out`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.jsonl"
        path.write_text(text, encoding="utf-8")
        try:
            return read_written(path, 0)
        except InputError as error:
            where = error.where.replace(str(path), str(out))
            raise InputError(error.what, where=where, fix=error.fix) from None


def _usage_hint(out: Path) -> str:
    """What params.yaml has to say for the item to be asked."""
    try:
        configured = (read_yaml("params.yaml").get("battery") or {}).get("written")
    except AthanorError:
        configured = None
    if configured == out.as_posix():
        return "params.yaml names the file: from the next dvc repro on it is asked, and kept out of training"
    hint = f"to ask it, set battery.written: {out.as_posix()} in params.yaml"
    if out.parts[:1] != ("battery",):
        hint += " (the file has to lie in battery/)"
    if configured:
        hint += f"\nThat names one file, now {configured}: with --out {configured} the item joins those."
    return hint


def main() -> int:
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        from athanor.cli import chat_terminal

        return chat_terminal.main()
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="athanor chat", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(
        dest="command", metavar="list | accept | reject | export | pairs | item | import-old", required=True
    )
    _correction_options(commands)
    row_options(commands)
    _item_options(commands.add_parser("item", help="add a correction to the battery's held-out questions"))
    import_option(commands)
    for command in commands.choices.values():
        command.add_argument("--feedback", type=Path, help=f"the file of the page's feedback (default {FILE})")
    args = parser.parse_args()
    path = args.feedback or anchor() / FILE
    if not path.is_file() and args.command != "import-old":
        fix = "start the page with athanor serve, and correct an answer there"
        raise InputError("there is no feedback yet", where=str(path), fix=fix)
    return int(args.run(Feedback(path), args))
