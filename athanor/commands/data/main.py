"""Look at the data: random documents, one page about all of it, the way of one document.

athanor data peek [--kept | --dropped] [--rule R] [--score 'quality<0.4']   random documents
athanor data report [--out FILE] [--open]                                   one page about the corpus
athanor data trace ID | --text 'some words'                                 what happened to a document
"""

from __future__ import annotations

import argparse
import sys

from athanor.commands.data import peek, report, trace

COMMANDS = {"peek": peek, "report": report, "trace": trace}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="athanor data", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", metavar="peek | report | trace", required=True)
    for name, module in COMMANDS.items():
        what, _, how = (module.__doc__ or "").partition("\n\n")
        module.parser(commands.add_parser(name, help=what, description=what, epilog=how, formatter_class=raw))
    args = parser.parse_args()
    return COMMANDS[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
