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
from typing import Any

from athanor.base.errors import AthanorError
from athanor.catalog.discover import discover
from athanor.runtime.machine import anchor, machine
from athanor.serving.answers import events
from athanor.serving.fields import PAGE, asked
from athanor.serving.models import Models, Served
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

    def __init__(self, models: Models, options: argparse.Namespace) -> None:
        values = {option: getattr(options, option) for option, _, _ in OPTIONS}
        ((self.settings,), _) = asked(values, PAGE)
        self.models, self.name, self.system = models, models.available().id, options.system
        self.interactive, self.to_terminal = sys.stdin.isatty(), sys.stdout.isatty()
        self.turns: list[Message] = []

    async def loaded(self) -> Served:
        async with self.models.using(self.name) as served:
            return served

    def run(self, runner: asyncio.Runner) -> None:
        """Read and answer lines until /exit or the end of the input."""
        served = runner.run(self.loaded())
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
        started, said = time.monotonic(), ""
        last: dict[str, Any] = {"reason": "stopped", "tokens": 0, "forgotten": 0}
        print(end="model: " if self.interactive else "", flush=True)
        with suppress(asyncio.CancelledError):
            async with aclosing(events(self.models, self.name, [*system, *turns], settings)) as made:
                async for event in made:
                    last |= event
                    said += (text := event.get("text", ""))
                    print(end=CONTROL.sub("\ufffd", text), flush=True)
        print(flush=True)
        if last.get("type") == "error":
            raise AthanorError(last["message"])
        if said:
            begun = "" if question else turns[-1].content
            self.turns = [*turns[: None if question else -1], Message("assistant", begun + said)]
        if self.to_terminal:
            ending = {"length": "cut at the limit, ", "stopped": "stopped, "}.get(last["reason"], "")
            left_out = f"; the context is full, the oldest {last['forgotten']} exchanges are left out"
            speed = f"{last['tokens']} tokens, {last['tokens'] / (time.monotonic() - started):,.0f} tokens/s"
            self.say(f"{ending}{speed}{left_out if last['forgotten'] else ''}")

    def say(self, text: str) -> None:
        """Print something that is not an answer: on standard error where the output is a pipe."""
        dim = self.to_terminal and "NO_COLOR" not in os.environ
        print(f"\033[2m{text}\033[0m" if dim else text, file=sys.stdout if self.to_terminal else sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    epilog = (
        "athanor chat list | accept | reject | export | pairs | item: corrections from the page (docs/chat-to-data.md); "
        "import-old: chats of earlier versions"
    )
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
    found = discover(anchor(), [options.model] if options.model else [])[:1]
    settings = machine()
    models = Models(
        lambda: found, anchor(), sys.maxsize, settings.threads, rows=1, accelerator=settings.device != "cpu"
    )
    with asyncio.Runner() as runner:
        try:
            Terminal(models, options).run(runner)
        finally:
            runner.run(models.close())
    return 0
