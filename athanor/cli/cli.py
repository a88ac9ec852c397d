"""The command line: python -m athanor COMMAND.

Each command is a module with `options(parser)`, which adds its arguments, and `run(args)`, which returns the exit status.
It is imported when it is called, so that one command does not pay for another's imports. Its docstring is the help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from athanor.base.errors import AthanorError, suggest


class Command(NamedTuple):
    module: str
    usage: str
    what: str


COMMANDS = {
    "repro": Command(
        "athanor.cli.repro", "[--max-minutes N] [--supervise]", "dvc repro with a summary; again what died"
    ),
    "plan": Command("athanor.cli.plan.main", "[TARGET ...] [--json]", "what dvc repro would do, why, how long"),
    "summary": Command("athanor.cli.summary", "", "what the pipeline made"),
    "compare": Command("athanor.cli.compare", "A B", "two experiments or revisions: parameters, scores, noise"),
    "data": Command(
        "athanor.cli.data.main", "peek | report | trace ID", "look at the data: documents, a page, one's way"
    ),
    "sft": Command("athanor.cli.sft", "peek [--source NAME]", "rows of instruction tuning, with what is supervised"),
    "probe": Command("athanor.cli.probe", "lr | recipe", "find the learning rate; half-lives of a recipe"),
    "synthesize": Command("athanor.cli.synthesize", "[--dry-run]", "conversations by another model; costs money"),
    "preset": Command(
        "athanor.cli.preset", "list | show NAME | use NAME", "params files of other sizes; make one params.yaml"
    ),
    "pin": Command("athanor.cli.pin", "[FILE]", "write hub data sets' current commits into params.yaml"),
    "verify": Command("athanor.cli.verify", "[PATH] [--data] [--strict]", "where an exported model comes from"),
    "lm-eval": Command("athanor.cli.lm_eval", "[--tasks LIST]", "standard tasks through lm-evaluation-harness"),
    "evaluate": Command(
        "athanor.cli.evaluate.main", "[--model PATH] [--watch]", "perplexity, in any runtime; of checkpoints too"
    ),
    "serve": Command("athanor.cli.serve", "[--model PATH ...]", "a chat page, and OpenAI's protocol for any client"),
    "chat": Command("athanor.cli.chat", "[list | export | ...]", "talk to the exported model; use corrections"),
    "health": Command("athanor.cli.health", "[RUN] [--json]", "what went wrong in a training, and what to change"),
    "ui": Command("athanor.cli.ui", "[--port N]", "MLflow on the page that shows the runs"),
    "ship": Command("athanor.runtime.ship", "[--wait S] [--rebuild]", "deliver journals to MLflow"),
    "slots": Command("athanor.cli.slots", "[prune | pin ID | adopt | drop ...]", "checkpoints of long stages"),
    "shrink": Command("athanor.cli.shrink", "SOURCE OUT [--dtype D]", "a checkpoint without the optimiser"),
    "stop": Command("athanor.cli.stop", "[--wait S]", "have the stages that run save and end"),
    "save": Command("athanor.cli.stop", "[--wait S]", "have a training that runs write a checkpoint, and go on"),
    "doctor": Command("athanor.cli.doctor.main", "[--fix] [--deep] [--json]", "what crashes left behind; repair it"),
    "accept": Command("athanor.cli.accept", "[STAGE ...]", "keep results after edits of comments or docstrings"),
    "deps": Command("athanor.runtime.closure", "[--fix]", "check the code dependencies in dvc.yaml"),
    "bench": Command("athanor.cli.bench", "hardware [--again]", "measure this machine for the model; once"),
}


def usage() -> str:
    lines = ["python -m athanor COMMAND", ""]
    lines += [f"  {f'{name} {command.usage}':<34} {command.what}" for name, command in COMMANDS.items()]
    return "\n".join(lines)


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that takes a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number


def call(name: str, words: Sequence[str]) -> int:
    """Run a command with its arguments; errors are the caller's."""
    module = importlib.import_module(COMMANDS[name].module)
    if not hasattr(module, "options"):  # it passes arguments on that it does not know
        sys.argv = [f"athanor {name}", *words]
        return int(module.main())
    about, _, details = (module.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        f"athanor {name}", description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(name=name)
    module.options(parser)
    return int(module.run(parser.parse_args(words)))


def main() -> int:
    name, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in ("", "help", "--help", "-h"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"no command '{name}'. Fix: {suggest(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return call(name, words)
    except AthanorError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe left: nobody to tell, but the command may not be done
        sys.stderr.close()
        return 1
    except OSError as error:
        from athanor.runtime.terminal import in_words

        if (told := in_words(error)) is None:
            raise
        print(told, file=sys.stderr)
        return 1
