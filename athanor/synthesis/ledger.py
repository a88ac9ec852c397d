"""What was sent, answered and spent: an append-only file that outlives everything but its own deletion.

A line is on the disk before its request leaves and another one before its
answer counts, so a process that dies at any moment loses at most the answers
to the requests in flight, and a later one counts those with the most they may
have cost. Lines:

    sent    a request leaves; input and output are the most tokens it may use, prices those of then
    answer  its answer, with the tokens that the server says were used
    free    it was refused and cost nothing
    lost    it broke off; the server may charge for it, so `sent` counts in full
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import fsync_dir, naming
from athanor.base.errors import InputError
from athanor.synthesis.endpoint import Answer
from athanor.synthesis.params import SyntheticBudget
from athanor.synthesis.requests import Request

FILE = "requests.jsonl"
Prices = tuple[float, float]


@dataclass(frozen=True)
class Spent:
    """Requests that may be charged, their tokens read and written, and their money where prices are known."""

    requests: int = 0
    tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.requests + other.requests, self.tokens + other.tokens, self.money + other.money)

    def exceeded(self, budget: SyntheticBudget) -> str | None:
        """The first limit that is passed, or None."""
        if self.requests > budget.requests:
            return "requests"
        if self.tokens > budget.tokens:
            return "tokens"
        # A millionth of a limit in money is what adding up in floating point may miss.
        return "money" if budget.money is not None and self.money > budget.money * (1 + 1e-9) else None


@dataclass(frozen=True)
class StoredAnswer:
    """An answer that the file holds."""

    answer: Answer
    day: str  # UTC


def prices(budget: SyntheticBudget) -> Prices | None:
    if budget.input_price is None or budget.output_price is None:
        return None
    return budget.input_price, budget.output_price


def cost(input_tokens: int, output_tokens: int, rates: Prices | None) -> Spent:
    return Spent(
        1, input_tokens + output_tokens, (input_tokens * rates[0] + output_tokens * rates[1]) / 1e6 if rates else 0.0
    )


class Ledger:
    """The file, locked by this process, and the budget that goes with it. Threads may share it."""

    def __init__(self, folder: Path, name: str, budget: SyntheticBudget, max_output_tokens: int) -> None:
        self.path = folder / FILE
        self.answers: dict[str, StoredAnswer] = {}
        self.spent = Spent()
        self._name, self._budget, self._max_output_tokens = name, budget, max_output_tokens
        self._prices = prices(budget)
        self._lock = threading.Lock()
        self._in_flight: dict[str, Spent] = {}  # requests in flight, at their most
        self._handle: int | None = None
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Ledger:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as resources:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            resources.callback(os.close, self._handle)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = "another process is sending requests"
                raise InputError(what, where=self.path, fix="wait for it") from None
            fsync_dir(self.path.parent)
            data = self.path.read_bytes()
            complete = data.rfind(b"\n") + 1
            if complete < len(data):  # a process was killed within a write; what it was about counts as in flight
                os.ftruncate(self._handle, complete)
                os.fsync(self._handle)
            self._read(data[:complete])
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._handle = None
        self._resources.close()

    def load(self) -> Ledger:
        """Read the file without locking it, to show what it holds."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        self._read(data[: data.rfind(b"\n") + 1])
        return self

    def reserve(self, request: Request) -> str | None:
        """Enter a request that is about to leave. Otherwise the limit that it might pass; "wait" while others fly."""
        with self._lock:
            input_tokens = request.worst_input_tokens
            exceeded = sum(
                self._in_flight.values(), self.spent + cost(input_tokens, self._max_output_tokens, self._prices)
            ).exceeded(self._budget)
            if exceeded is not None:
                return "wait" if self._in_flight else exceeded
            maximum = {"input": input_tokens, "output": self._max_output_tokens, "prices": self._prices}
            # With what was asked: an answer that was paid for can be read without the corpus of that day.
            self._write("sent", request, category=request.category, user=request.user, **maximum)
            return None

    def answered(self, request: Request, answer: Answer) -> None:
        with self._lock:
            self._write("answer", request, **asdict(answer), prices=self._prices)

    def failed(self, request: Request, why: str, *, charged: bool) -> None:
        with self._lock:
            self._write("lost" if charged else "free", request, why=why)

    def _write(self, kind: str, request: Request, **facts: Any) -> None:
        """One line, on the disk when it counts. After a failure nothing follows: a torn line must be the last."""
        if self._handle is None:
            raise InputError("closed after an error", where=self.path, fix="run this again")
        line = {"type": kind, "request": request.identity, **facts, "name": self._name, "t": round(time.time(), 3)}
        data = json.dumps(line, ensure_ascii=True, sort_keys=True).encode() + b"\n"
        try:
            with naming(self.path):
                while data:
                    data = data[os.write(self._handle, data) :]
                os.fsync(self._handle)
        except OSError:
            self.__exit__()
            raise
        self._count(line)

    def _read(self, data: bytes) -> None:
        for number, line in enumerate(data.splitlines(), 1):
            try:
                self._count(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                what, fix = f"not a line of this file ({error})", "put the file back as it was, or move it away"
                raise InputError(what, where=f"{self.path}:{number}", fix=fix) from None
        self.spent = sum(self._in_flight.values(), self.spent)  # in flight when their process died
        self._in_flight.clear()

    def _count(self, line: Mapping[str, Any]) -> None:
        """Apply one line to the answers and to what was spent under this name."""
        kind, request, is_own = line["type"], line["request"], line["name"] == self._name
        line_prices = tuple(line["prices"]) if line.get("prices") else self._prices
        reserved = self._in_flight.pop(request, Spent()) if is_own else Spent()
        if kind == "sent":
            self.spent += reserved  # of one whose process died
            if is_own:
                self._in_flight[request] = cost(line["input"], line["output"], line_prices)
        elif kind == "answer":
            answer = Answer(**{name: line[name] for name in Answer.__dataclass_fields__})
            self.answers[request] = StoredAnswer(answer, time.strftime("%Y-%m-%d", time.gmtime(line["t"])))
            input_tokens, output_tokens = answer.input_tokens, answer.output_tokens
            if is_own:
                self.spent += (
                    reserved
                    if input_tokens is None or output_tokens is None
                    else cost(input_tokens, output_tokens, line_prices)
                )
        elif kind == "lost":
            self.spent += reserved
        elif kind != "free":
            raise ValueError(f"type {kind!r}")
