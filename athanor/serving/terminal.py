"""Chat with the exported model in a terminal.

    python -m athanor.serving.terminal [--model DIR] [--system TEXT] [--temperature 0.7 ...]

Ctrl-C stops an answer, Ctrl-D leaves. With input from a pipe, each line is a
message and only the answers go to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from athanor.base.errors import AthanorError, InputError
from athanor.decoding.sampling import Sampling
from athanor.runtime.machine import anchor, machine
from athanor.serving.backends.base import Backend, Request
from athanor.serving.backends.torch_backend import open_backend
from athanor.serving.discover import discover, materialise, stale_export_problem
from athanor.serving.experiments import HF_DIR
from athanor.serving.memory import GIB
from athanor.serving.running import CONTINUES
from athanor.text.conversations import Message

DEFAULT_MODEL = "models/export/hf"
MODEL_HELP = f"exported directory, or a name of athanor serve's list, like base (default {DEFAULT_MODEL})"
HELP = """\
/system TEXT   set the system message (without TEXT: remove it)
/reset         forget the conversation
/help          this list
(nothing)      of a base model: more of the same text
/exit          leave, as does Ctrl-D; Ctrl-C stops an answer"""


class Chat:
    """One conversation. After an answer: `tokens` generated, `truncated` at a limit, `forgotten` exchanges."""

    def __init__(
        self, backend: Backend, *, sampling: Mapping[str, Any], max_new_tokens: int | None, system: str = ""
    ) -> None:
        self.backend, self.system, self.max_new_tokens = backend, system, max_new_tokens
        self.sampling = {"seed": secrets.randbelow(2**31), **sampling}
        self.turns: list[Message] = []
        self.tokens, self.truncated, self.forgotten = 0, False, 0
        self._request_ids = itertools.count()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.turns, self.forgotten = [], 0

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer to `text` as they are made.

        Closing the iterator stops the answer. What was said up to then stays
        in the history; an answer that was stopped before its first piece, or
        failed, leaves the history as it was. AthanorError for the latter. An
        empty `text` asks for more of the last answer.
        """
        system, question = [Message("system", self.system)] if self.system else [], Message("user", text)
        # Another turn draws other numbers; the same conversation with the same seed repeats itself.
        sampling = {**self.sampling, "seed": self.sampling["seed"] + len(self.turns)}
        messages = (*system, *self.turns, *([question] if text else []))
        request = Request(messages, self.max_new_tokens, sampling, id=next(self._request_ids))
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.backend.submit(request, events.put)
        pieces: list[str] = []
        self.tokens, self.truncated = 0, False
        try:
            while (event := events.get())["type"] not in ("end", "error"):
                if event["type"] == "start":
                    self.forgotten = event["forgotten"]
                else:
                    self.tokens = event["tokens"]
                    pieces.append(event["text"])
                    yield event["text"]
        except GeneratorExit:
            self.backend.cancel(request.id)
            while (event := events.get())["type"] not in ("end", "error"):
                pass
            if pieces:
                self._keep(question, "".join(pieces))
            raise
        if event["type"] == "error":
            raise AthanorError(event["message"])
        self.tokens, self.truncated = event["tokens"], event["reason"] == "length"
        self._keep(question, "".join(pieces))

    def _keep(self, question: Message, answer: str) -> None:
        if question.content:
            self.turns += [question, Message("assistant", answer)]
        else:
            self.turns[-1] = Message("assistant", self.turns[-1].content + answer)


class Terminal:
    """Reads lines, prints answers. Ctrl-C while a line is typed drops the line; while answering, the answer."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.interactive = sys.stdin.isatty()
        self.stdout_is_tty = sys.stdout.isatty()
        self.answering = self.stop = False
        self.forgotten = 0

    def run(self) -> None:
        """Read and answer lines until /exit or the end of the input."""
        previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            self._loop()
        finally:
            signal.signal(signal.SIGINT, previous_handler)

    def _loop(self) -> None:
        while True:
            try:
                line = input("you: " if self.interactive else "").strip()
                if line in ("/exit", "/quit"):
                    return
                if line.startswith("/"):
                    self.command(line)
                elif line or self.chat.turns and self.chat.backend.info["template"] == CONTINUES:
                    self.answer(line)
            except EOFError:
                if self.interactive:
                    print()
                return
            except KeyboardInterrupt:
                print(self.dim(" (Ctrl-D leaves)") if self.interactive else "", flush=True)
            except AthanorError as error:
                print(str(error), file=sys.stderr, flush=True)

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/reset":
            self.chat.reset()
            self.forgotten = 0
            self.say("The conversation is forgotten.")
        elif name == "/system":
            self.chat.system = argument.strip()
            self.say("System message set." if self.chat.system else "System message removed.")
        else:
            if name != "/help":
                self.say(f"No command {name}.")
            self.say(HELP)

    def answer(self, text: str) -> None:
        if self.interactive:
            print("model: ", end="", flush=True)
        started = time.monotonic()
        self.stop, self.answering = False, True
        pieces: Any = self.chat.answer(text)
        try:
            for piece in pieces:
                sys.stdout.write(printable(piece))
                sys.stdout.flush()
                if self.stop:
                    break
        except AthanorError:
            if self.interactive:
                print(flush=True)  # the error gets a line of its own
            raise
        finally:
            pieces.close()
            self.answering = False
        print(flush=True)
        if self.chat.forgotten > self.forgotten:
            self.say(f"(the context is full; the oldest {self.chat.forgotten} exchanges are no longer seen)")
            self.forgotten = self.chat.forgotten
        if self.stdout_is_tty:
            tokens_per_second = self.chat.tokens / max(time.monotonic() - started, 1e-9)
            ending = "cut at the limit, " if self.chat.truncated else "" if self.chat.tokens else "an empty answer, "
            ending = "stopped, " if self.stop else ending
            print(self.dim(f"{ending}{self.chat.tokens} tokens, {tokens_per_second:,.0f} tokens/s"), flush=True)

    def say(self, text: str) -> None:
        """Print something that is not an answer: on standard error where the output is a pipe."""
        print(
            self.dim(text) if self.stdout_is_tty else text,
            file=sys.stdout if self.stdout_is_tty else sys.stderr,
            flush=True,
        )

    def dim(self, text: str) -> str:
        return text if "NO_COLOR" in os.environ or not self.stdout_is_tty else f"\033[2m{text}\033[0m"

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        # A flag while answering: an exception could strike in the middle of a history update.
        if self.answering:
            self.stop = True
        else:
            raise KeyboardInterrupt


def printable(text: str) -> str:
    """Text with control and direction characters made visible, so that a model cannot steer the terminal."""
    return "".join("\ufffd" if _is_control(c) else c for c in text)


def _is_control(c: str) -> bool:
    code = ord(c)
    control = (code < 0x20 and c not in "\n\t") or 0x7F <= code < 0xA0
    return control or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def path_of(model: str) -> str:
    """The directory of a model that is named by it, by the export around it, or by its name in the list of a server."""
    inner = Path(model) / HF_DIR
    if inner.is_dir() or Path(model).exists() or "/" in model:
        if model == DEFAULT_MODEL and (problem := stale_export_problem((anchor() / model).parent)):
            raise InputError(problem, where=model)
        return str(inner) if inner.is_dir() else model
    (named,) = discover(anchor(), [model])
    if named.problem:
        raise InputError(named.problem, where=f"--model {model}")
    materialise(anchor(), named)
    return named.path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = "athanor chat list | accept | reject | export | item: corrections from the page (docs/chat-to-data.md)"
    parser = argparse.ArgumentParser(prog="athanor chat", description="Chat in the terminal.", epilog=epilog)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=MODEL_HELP)
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: as exported)")
    parser.add_argument("--top-k", type=int, help="sample among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="sample among the likeliest tokens that make up this probability")
    parser.add_argument("--min-p", type=float, help="leave out tokens below this share of the likeliest one")
    parser.add_argument("--seed", type=int, help="equal seeds give equal answers")
    parser.add_argument("--max-new-tokens", type=int, help="longest answer")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        settings = machine()
        spec = {"path": path_of(options.model), "device": settings.device, "threads": settings.threads}
        backend = open_backend({**spec, "rows": 1, "cache_bytes": GIB})
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        sampling = {name: value for name in names if (value := getattr(options, name)) is not None}
        Sampling.from_dict(asdict(backend.defaults) | sampling)  # an impossible one is told before the first message
        limit = options.max_new_tokens and max(1, options.max_new_tokens)
        chat = Chat(backend, sampling=sampling, max_new_tokens=limit, system=options.system)
    except AthanorError as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    terminal = Terminal(chat)
    if terminal.interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        size = f"{backend.info['parameters'] / 1e6:.1f}M parameters, context {backend.info['context_tokens']} tokens"
        if backend.info["template"] == CONTINUES:
            terminal.say("A base model: it goes on with what you write, Enter alone with what stands there.")
        terminal.say(f"{options.model} ({size}). /reset begins anew, /help tells all commands, Ctrl-D leaves.")
    try:
        terminal.run()
    except BrokenPipeError:  # the reader of the pipe has gone; nothing may be flushed to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
