"""The command line: python -m athanor COMMAND.

Each command is a module with `options(parser)`, which adds its arguments, and `run(args)`, which returns the exit status.
It is imported when it is called, so that one command does not pay for another's imports. Its docstring is the help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from athanor.base.errors import AthanorError, suggest

COMMANDS = {  # name: arguments, what it does
    "repro": ("[--max-minutes N] [--supervise]", "build what is missing or changed; a summary"),
    "new": ("FOLDER [--write]", "look at a folder of text; its lines of params.yaml"),
    "plan": ("[TARGET ...] [--json]", "what dvc repro would do, why, how long"),
    "recipe": ("--hours H | --tokens N", "a recipe for the time you have, and its forecast"),
    "summary": ("[--all]", "what the pipeline made"),
    "compare": ("A B", "two experiments or revisions: parameters, scores, noise"),
    "data": ("peek | report | trace ID | steps A:B", "look at the data: documents, a page, one's way"),
    "sft": ("peek [--source NAME]", "rows of instruction tuning, with what is supervised"),
    "side": ("tune | dpo | grpo [--force]", "tune another model, or train the chat model on"),
    "probe": ("lr [--force]", "find the learning rate by short runs"),
    "synthesize": ("[--dry-run]", "conversations by another model; costs money"),
    "preset": ("list | show NAME | use NAME", "params files of other sizes; make one params.yaml"),
    "pin": ("[FILE]", "write hub data sets' current commits into params.yaml"),
    "trace": ('"some text" [--json]', "where a text stands in the training data"),
    "verify": ("[PATH] [--data] [--strict]", "where an exported model comes from"),
    "lm-eval": ("[--tasks LIST]", "standard tasks through lm-evaluation-harness"),
    "evaluate": ("[--model PATH] [--watch]", "perplexity, in any runtime; of checkpoints too"),
    "serve": ("[--model PATH ...]", "a chat page, and OpenAI's protocol for any client"),
    "chat": ("[list | export | ...]", "talk to the exported model; use corrections"),
    "preview": ("[--raw] [--minutes M]", "talk to a model that is still training"),
    "promote": ("[EXPERIMENT] [--alias A]", "register the exported model in MLflow"),
    "health": ("[RUN] [--json]", "what went wrong in a training, and what to change"),
    "ui": ("[--port N]", "MLflow on the page that shows the runs"),
    "ship": ("[--wait S] [--rebuild]", "deliver journals to MLflow"),
    "slots": ("[prune | pin ID | adopt | drop ...]", "checkpoints of long stages"),
    "shrink": ("SOURCE OUT [--dtype D]", "a checkpoint without the optimiser"),
    "stop": ("[--wait S]", "have the stages that run save and end"),
    "save": ("[--wait S]", "have a training that runs write a checkpoint, and go on"),
    "profile": ("[--steps N]", "which operations take the time of a training that runs"),
    "launch": ("check | slurm", "training on several machines: links, a job script"),
    "container": ("build | run [--chip C]", "the docker or podman command for this chip"),
    "doctor": ("[--fix] [--deep] [--json]", "what crashes left behind, what the machine lacks"),
    "explain": ("[LOG] [--bundle]", "what a failure means, and what to type"),
    "deps": ("[--fix]", "check the code dependencies in dvc.yaml"),
    "bench": ("hardware [--again]", "measure this machine for the model; once"),
}
FIRST = {  # what `athanor --help` shows, in this order; the others are listed by `athanor help --all`
    "Build": ("new", "recipe", "repro", "plan", "summary", "stop", "preset"),
    "Look at it": ("data", "compare", "health", "ui", "doctor"),
    "Use it": ("serve", "chat", "promote"),
}
OF_DEVELOPERS = ("bench", "deps", "ship")
MODULE_NAMES = {  # modules that have another name than their command
    "plan": "athanor.cli.plan.main",
    "data": "athanor.cli.data.main",
    "evaluate": "athanor.cli.evaluate.main",
    "side": "athanor.cli.tuning",
    "ship": "athanor.runtime.ship",
    "save": "athanor.cli.stop",
    "doctor": "athanor.cli.doctor.main",
    "launch": "athanor.cli.launch.main",
    "deps": "athanor.runtime.closure",
}


def usage(whole: bool) -> str:
    """The commands that a person needs every day, in groups; or all of them."""
    groups, shown = dict(FIRST), {*OF_DEVELOPERS, *(name for names in FIRST.values() for name in names)}
    more = tuple(name for name in COMMANDS if name not in shown)
    if whole:
        groups |= {"More": more, "For work on Athanor itself": OF_DEVELOPERS}
    lines = ["athanor COMMAND [--help]      (the same: python -m athanor COMMAND)"]
    for title, names in groups.items():
        lines += ["", title, *(f"  {f'{name} {COMMANDS[name][0]}':<40} {COMMANDS[name][1]}" for name in names)]
    return "\n".join(lines if whole else [*lines, "", f"More: athanor help --all ({', '.join(more)})"])


def positive(convert: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that takes a number above 0."""

    def number(text: str) -> float:
        value = convert(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number


def call(name: str, arguments: Sequence[str]) -> int:
    """Run a command with its arguments; errors are the caller's."""
    module = importlib.import_module(MODULE_NAMES.get(name, f"athanor.cli.{name.replace('-', '_')}"))
    if not hasattr(module, "options"):  # it passes arguments on that it does not know
        sys.argv = [f"athanor {name}", *arguments]
        return int(module.main())
    description, _, details = (module.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        f"athanor {name}", description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.set_defaults(name=name)
    module.options(parser)
    return int(module.run(parser.parse_args(arguments)))


def main() -> int:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name and name not in (*COMMANDS, "help", "--help", "-h"):
        print(f"no command '{name}'. Fix: {suggest(name, COMMANDS)}; athanor help lists the commands", file=sys.stderr)
        return 2
    try:
        if name not in COMMANDS:
            print(usage("--all" in arguments), flush=True)
            return 0
        return call(name, arguments)
    except AthanorError as error:
        from athanor.runtime.redact import redact

        print(redact(str(error)), file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "athanor").partition(".")[0] == "athanor":
            raise
        what = f"the package '{error.name}' is not installed for {sys.executable}"
        print(f"{what}. Fix: make setup, then . .venv/bin/activate", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe left: nobody to tell, but the command may not be done
        sys.stderr.close()
        # What is left in the buffer would fail once more at exit, with another status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        from athanor.runtime.terminal import in_words

        if (message := in_words(error)) is None:
            raise
        print(message, file=sys.stderr)
        return 1
