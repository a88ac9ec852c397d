"""Look at the data: random documents, one page about all of it, the way of one document.

athanor data peek [--kept | --dropped] [--rule R] [--score 'quality<0.4']   random documents
athanor data report [--out FILE] [--open]                                   one page about the corpus
athanor data trace ID | --text 'some words'                                 what happened to a document
athanor data steps A:B [--stage sft]                                        the documents in these steps of a training
"""

from __future__ import annotations

import argparse

from athanor.cli.data import peek, report, steps, trace

COMMANDS = {"peek": peek, "report": report, "trace": trace, "steps": steps}


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="peek | report | trace | steps", required=True)
    for name, module in COMMANDS.items():
        about, _, epilog = (module.__doc__ or "").partition("\n\n")
        texts = {"help": about, "description": about, "epilog": epilog, "formatter_class": parser.formatter_class}
        module.options(commands.add_parser(name, **texts))


def run(args: argparse.Namespace) -> int:
    return COMMANDS[args.command].run(args)
