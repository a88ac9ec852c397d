"""Chat with a model in a terminal: one engine, no HTTP server.

Ctrl-C stops an answer, Ctrl-D leaves. With input from a pipe, each line is a message and only the answers go to
standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress

from athanor.base.errors import AthanorError, InputError
from athanor.runtime.machine import anchor, machine
from athanor.serving.answers import events
from athanor.serving.discover import AvailableModel, discover
from athanor.serving.fields import PAGE, asked
from athanor.serving.models import Models
from athanor.text.conversations import Message

OPTIONS = (
    ("temperature", float, "0 takes the likeliest token (default: as exported)"),
    ("top_k", int, "sample among the k likeliest tokens"),
    ("top_p", float, "sample among the likeliest tokens that make up this probability"),
    ("min_p", float, "leave out tokens below this share of the likeliest one"),
    ("seed", int, "equal seeds give equal answers"),
    ("max_new_tokens", int, "longest answer"),
)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HELP = """\
/system TEXT   set the system message (without TEXT: remove it)
/reset         forget the conversation
/help          this list
(nothing)      of a base model: more of the same text
/exit          leave, as does Ctrl-D; Ctrl-C stops an answer"""


class Terminal:
    """Reads lines, prints answers. Ctrl-C while a line is typed drops the line, and during an answer the rest of it."""

    def __init__(self, models: Models, options: argparse.Namespace, name: str) -> None:
        values = {option: getattr(options, option) for option, _, _ in OPTIONS}
        ((self.settings,), _) = asked(values, PAGE)
        self.models, self.name, self.system = models, name, options.system
        self.interactive, self.to_terminal = sys.stdin.isatty(), sys.stdout.isatty()
        self.turns: list[Message] = []

    def run(self, runner: asyncio.Runner) -> None:
        """Read and answer lines until /exit or the end of the input."""
        served = runner.run(self.models.served(self.name))
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            base = "a base model, which continues your text; Enter alone for more of it. " if served.continues else ""
            self.say(f"{self.name}: {base}context {served.context_tokens} tokens. /help lists all commands.")
        while True:
            try:
                line = input("you: " if self.interactive else "").strip()
                if line in ("/exit", "/quit"):
                    return
                if line.startswith("/"):
                    self.command(line)
                elif line or (self.turns and served.continues):
                    runner.run(self.answer(line))
            except EOFError:
                print(end="\n" if self.interactive else "")
                return
            except KeyboardInterrupt:
                self.say(" (Ctrl-D leaves)")
            except AthanorError as error:
                print(error, file=sys.stderr, flush=True)

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/reset":
            self.turns = []
            self.say("The conversation is forgotten.")
        elif name == "/system":
            self.system = argument.strip()
            self.say("System message set." if self.system else "System message removed.")
        else:
            self.say(HELP if name == "/help" else f"No command {name}.\n{HELP}")

    async def answer(self, question: str) -> None:
        """Print the answer, or more of the last one. What came until Ctrl-C stays in the history."""
        turns = [*self.turns, Message("user", question)] if question else self.turns
        system = [Message("system", self.system)] if self.system else []
        settings = dict(self.settings)
        if "seed" in settings:  # another turn draws other numbers; the same conversation repeats itself
            settings["seed"] += len(self.turns)
        started, said, tokens, forgotten, reason = time.monotonic(), "", 0, 0, "stopped"
        print(end="model: " if self.interactive else "", flush=True)
        try:
            async with aclosing(events(self.models, self.name, [*system, *turns], settings)) as made:
                async for event in made:
                    tokens, reason = event.get("tokens", tokens), event.get("reason", reason)
                    forgotten = event.get("forgotten", forgotten)
                    said += (text := event.get("text", ""))
                    print(end=CONTROL.sub("\ufffd", text), flush=True)
                    if event["type"] == "error":
                        print(end="\n" if self.interactive else "", flush=True)
                        raise AthanorError(event["message"])
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
        print(flush=True)
        if said and question:
            self.turns = [*turns, Message("assistant", said)]
        elif said:
            self.turns[-1] = Message("assistant", self.turns[-1].content + said)
        if self.to_terminal:
            ending = {"length": "cut at the limit, ", "stopped": "stopped, "}.get(reason, "")
            full = f"; the context is full, the oldest {forgotten} exchanges are left out" if forgotten else ""
            self.say(f"{ending}{tokens} tokens, {tokens / (time.monotonic() - started):,.0f} tokens/s{full}")

    def say(self, text: str) -> None:
        """Print something that is not an answer: on standard error where the output is a pipe."""
        dim = self.to_terminal and "NO_COLOR" not in os.environ
        print(f"\033[2m{text}\033[0m" if dim else text, file=sys.stdout if self.to_terminal else sys.stderr, flush=True)


def model_of(name: str) -> AvailableModel:
    """The model that is named as for `athanor serve`, or the one that it would list first."""
    found = discover(anchor(), [name] if name else [])
    if not found:
        raise InputError("there is no model", where="models/export", fix="make one: make repro; or --model PATH")
    if found[0].problem:
        raise InputError(found[0].problem, where=name or found[0].id)
    return found[0]


def main(arguments: Sequence[str] | None = None) -> int:
    epilog = "athanor chat list | accept | reject | export | item: corrections from the page (docs/chat-to-data.md)"
    parser = argparse.ArgumentParser(prog="athanor chat", description="Chat in the terminal.", epilog=epilog)
    parser.add_argument(
        "--model", default="", help="a name or path as for athanor serve (default: what it lists first)"
    )
    parser.add_argument("--system", default="", help="system message")
    for name, kind, text in OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    options = parser.parse_args(arguments)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="replace")
    model, settings = model_of(options.model), machine()
    accelerator = settings.device != "cpu"
    models = Models(
        [model], memory_bytes=sys.maxsize, root=anchor(), threads=settings.threads, rows=1, accelerator=accelerator
    )
    with asyncio.Runner() as runner:
        try:
            Terminal(models, options, model.id).run(runner)
        finally:
            runner.run(models.close())
    return 0
