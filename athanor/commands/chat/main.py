"""Talk to a model in the terminal; or use the corrections that the chat page collected.

athanor chat [--model DIR ...]                talk to the exported model (athanor chat --help)
athanor chat list [--all]                     corrections that wait to be accepted, or all of them
athanor chat accept ID ... | --all            take them for training; reject: do not
athanor chat export OUT.jsonl                 the accepted ones as rows for instruction tuning
athanor chat item ID [--kind K] [--reject T]  one as a held-out question of the battery
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from athanor.commands.chat import item, rows
from athanor.errors import InputError
from athanor.serving.store import Store, default_path


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="athanor chat", description=__doc__, formatter_class=raw)
    commands = made.add_subparsers(dest="command", metavar="list | accept | reject | export | item", required=True)
    for module in (rows, item):
        module.parsers(commands)
    for command in commands.choices.values():
        command.add_argument("--store", type=Path, help="the file of the chats (default .athanor/chat.sqlite3)")
    return made


def main() -> int:
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        from athanor.serving import terminal  # brings torch, which no other command here needs

        return terminal.main()
    args = parser().parse_args()
    path = args.store or default_path()
    if not path.is_file():
        fix = "start the page with athanor serve, and correct an answer there"
        raise InputError("there are no chats yet", where=str(path), fix=fix)
    store = Store(path)
    try:
        return args.run(store, args)
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main())
