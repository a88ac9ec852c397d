"""Talk to a model in the terminal; or use the corrections that the chat page collected.

athanor chat [--model DIR ...]                talk to the exported model (athanor chat --help)
athanor chat list [--all]                     corrections that wait to be accepted, or all of them
athanor chat accept ID ... | --all            take them for training; reject: do not
athanor chat export OUT.jsonl                 the accepted ones as rows for instruction tuning
athanor chat item ID [--kind K] [--reject T]  one as a held-out question of the battery
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from athanor.artifacts import write_text
from athanor.commands.chat import item
from athanor.corpus.conversations import Message, check_messages
from athanor.errors import InputError
from athanor.serving.store import Store, default_path

SHOWN_CHARS = 100  # of a text in the list
# What params.yaml needs to read the rows; every key, as its schemas ask for it.
SOURCE = """\
under instruct.sources:
  - type: messages
    name: corrections
    files: {path}
    hub_id:
    hub_config:
    revision:
    hub_split: train
    shape: messages
    columns: [messages]
    select:
    max_malformed_fraction: 0.0
    max_rows: 1000000
    min_rows: 1
    license: unknown
under sft_data.sources:
    corrections: {{max_copies: 1, repeats: 1, max_supervised_tokens: null}}"""


def _row_options(commands: Any) -> None:
    shown = commands.add_parser("list", help="corrections that wait to be accepted")
    shown.add_argument("--all", action="store_true", help="also the accepted and the rejected ones")
    shown.set_defaults(run=show)
    for name, status, what in (
        ("accept", "accepted", "take corrections for training"),
        ("reject", "rejected", "do not take corrections"),
    ):
        command = commands.add_parser(name, help=what)
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("ids", nargs="*", type=int, default=[], metavar="ID", help="as athanor chat list shows them")
        which.add_argument("--all", action="store_true", help="every one that waits")
        command.set_defaults(run=set_status, status=status)
    export = commands.add_parser("export", help="write the accepted corrections as rows for instruction tuning")
    export.add_argument("out", type=Path, metavar="OUT.jsonl", help="best in corpus/, which DVC watches")
    export.set_defaults(run=write)


def show(store: Store, args: argparse.Namespace) -> int:
    found = store.corrections(None if args.all else "candidate")
    for row in found:
        print(f"{row['id']}  {row['status']}, {row['model']}, in \"{short(row['chat_title'])}\"")
        turns = sum(message["role"] == "user" for message in row["prompt"])
        after = f" (question {turns} of its chat)" if turns > 1 else ""
        print(f"    asked      {short(row['prompt'][-1]['content'])}{after}")
        print(f"    answered   {short(row['answer'])}")
        print(f"    corrected  {short(row['correction'])}")
    rest = "" if args.all else " that wait; --all shows those settled, too"
    print(f"{len(found)} corrections{rest}")
    return 0


def short(text: str) -> str:
    """The beginning of a text on one line, with nothing in it that steers a terminal."""
    line = " ".join(text.split())
    line = line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 1] + "…"
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


def set_status(store: Store, args: argparse.Namespace) -> int:
    ids = [row["id"] for row in store.corrections("candidate")] if args.all else list(dict.fromkeys(args.ids))
    for number in ids:
        store.correction(number)  # an unknown one stops all, before the first is settled
    for number in ids:
        store.settle(number, args.status)
    print(f"{args.status} {len(ids)}: {', '.join(map(str, ids))}" if ids else "no correction waits")
    if ids and args.status == "accepted":
        print("write them with: athanor chat export corpus/corrections.jsonl")
    return 0


def write(store: Store, args: argparse.Namespace) -> int:
    """Write all accepted corrections, in the order of their messages, each conversation once."""
    out: Path = args.out
    if out.suffix != ".jsonl":
        raise InputError("the rows are JSON lines", where=str(out), fix="let the name end in .jsonl")
    _check_ours(out)
    rows: dict[str, dict[str, Any]] = {}
    left_out, accepted = [], store.corrections("accepted")
    for row in accepted:
        messages = [*row["prompt"], {"role": "assistant", "content": row["correction"]}]
        where = f"correction {row['id']}"
        try:
            check_messages([Message(**message) for message in messages], where)
            before = store.way(row["chat"], row["id"])[:-1]  # every answer of a row is trained on
            if any((message["feedback"] or {}).get("verdict") == "down" for message in before):
                fix = "ask again in a new chat, or below the right answer"
                raise InputError("an earlier answer of its chat has a thumb down", where=where, fix=fix)
        except InputError as error:
            left_out.append(f"left out: {error}")
            continue
        # The number tells on the next export that the row came from here; the training reads the messages alone.
        rows.setdefault(json.dumps(messages), {"messages": messages, "correction": row["id"]})
    if accepted and not rows:
        told = "; ".join(left_out)
        raise InputError(f"every accepted correction was left out, nothing was written ({told})", where=str(out))
    if not rows:
        fix = "athanor chat list shows the corrections, athanor chat accept ID takes them"
        raise InputError("no correction is accepted, nothing was written", where=str(out), fix=fix)
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
    copies = len(accepted) - len(left_out) - len(rows)
    print(f"{out}: {len(rows)} rows" + (f", {copies} accepted corrections say the same as another" if copies else ""))
    for line in left_out:
        print(line)
    print(f"\nTo train on them, in params.yaml\n{SOURCE.format(path=json.dumps(out.as_posix(), ensure_ascii=False))}")
    if out.parts[:1] != ("corpus",):
        print("\nDVC watches corpus/ and not this place: write the rows there, or it will not see when they change.")
    return 0


def _check_ours(out: Path) -> None:
    """InputError if the file is there and holds anything else than rows of an export, a hand-written one, say."""
    try:
        text = out.read_text(encoding="utf-8")
        ours = all("correction" in json.loads(line) for line in text.split("\n") if line)
    except FileNotFoundError:
        return
    except (ValueError, TypeError):
        ours = False
    if not ours:
        raise InputError("holds something else, and would be lost", where=str(out), fix="name another file")


def main() -> int:
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        from athanor.serving import terminal  # brings torch, which no other command here needs

        return terminal.main()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="athanor chat", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="list | accept | reject | export | item", required=True)
    _row_options(commands)
    item.options(commands.add_parser("item", help="add a correction to the battery's held-out questions"))
    for command in commands.choices.values():
        command.add_argument("--store", type=Path, help="the file of the chats (default .athanor/chat.sqlite3)")
    args = parser.parse_args()
    path = args.store or default_path()
    if not path.is_file():
        fix = "start the page with athanor serve, and correct an answer there"
        raise InputError("there are no chats yet", where=str(path), fix=fix)
    store = Store(path)
    try:
        return int(args.run(store, args))
    finally:
        store.close()
