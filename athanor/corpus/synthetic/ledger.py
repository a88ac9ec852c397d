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

import fcntl
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from athanor.artifacts import fsync_dir, naming
from athanor.corpus.synthetic.endpoint import Answer
from athanor.corpus.synthetic.requests import Request
from athanor.errors import InputError
from athanor.params.synthetic import SyntheticBudget

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

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.requests - other.requests, self.tokens - other.tokens, self.money - other.money)

    def beyond(self, budget: SyntheticBudget) -> str | None:
        """The first limit that is passed, or None."""
        if self.requests > budget.requests:
            return "requests"
        if self.tokens > budget.tokens:
            return "tokens"
        # A millionth of a limit in money is what adding up in floating point may miss.
        return "money" if budget.money is not None and self.money > budget.money * (1 + 1e-9) else None


@dataclass(frozen=True)
class Kept:
    """An answer as it stands in the file."""

    answer: Answer
    day: str  # UTC


def prices(budget: SyntheticBudget) -> Prices | None:
    if budget.input_price is None or budget.output_price is None:
        return None
    return budget.input_price, budget.output_price


def cost(read: int, written: int, at: Prices | None) -> Spent:
    return Spent(1, read + written, (read * at[0] + written * at[1]) / 1e6 if at else 0.0)


class Ledger:
    """The file, held by this process alone, and the budget that goes with it. Threads may share it."""

    def __init__(self, folder: Path, name: str, budget: SyntheticBudget, max_output_tokens: int) -> None:
        self.path = folder / FILE
        self.answers: dict[str, Kept] = {}
        self.spent, self.in_flight = Spent(), Spent()
        self._name, self._budget, self._most = name, budget, max_output_tokens
        self._prices = prices(budget)
        self._lock = threading.Lock()
        self._open: dict[str, Spent] = {}  # requests in flight, at their most
        self._handle: int | None = None

    def __enter__(self) -> Ledger:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise InputError("another process is sending requests", where=str(self.path), fix="wait for it") from None
        fsync_dir(self.path.parent)
        self._load()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def look(self) -> Ledger:
        """Only read what is there, whoever holds it: for showing."""
        if self.path.is_file():
            self._take(self.path.read_bytes())
        return self

    def reserve(self, request: Request) -> str | None:
        """Enter a request that is about to leave. Otherwise the limit that it might pass; "wait" while others fly."""
        with self._lock:
            most = cost(request.worst_input_tokens, self._most, self._prices)
            beyond = (self.spent + self.in_flight + most).beyond(self._budget)
            if beyond is not None:
                return "wait" if self._open else beyond
            told = {"input": request.worst_input_tokens, "output": self._most, "prices": self._prices}
            # With what was asked: an answer that was paid for can be read without the corpus of that day.
            asked = {"category": request.category, "user": request.user}
            self._write({"type": "sent", "request": request.identity, **asked, **told})
            self._open[request.identity] = most
            self.in_flight += most
            return None

    def answered(self, request: Request, answer: Answer) -> None:
        with self._lock:
            self._write({"type": "answer", "request": request.identity, **asdict(answer), "prices": self._prices})
            self._close(request, self._used(answer, self._open[request.identity]))
            self.answers[request.identity] = Kept(answer, _day(time.time()))

    def free(self, request: Request, why: str) -> None:
        with self._lock:
            self._write({"type": "free", "request": request.identity, "why": why})
            self._close(request, Spent())

    def lost(self, request: Request, why: str) -> None:
        with self._lock:
            self._write({"type": "lost", "request": request.identity, "why": why})
            self._close(request, self._open[request.identity])

    def _used(self, answer: Answer, most: Spent, at: Prices | None = None) -> Spent:
        if answer.input_tokens is None or answer.output_tokens is None:
            return most
        return cost(answer.input_tokens, answer.output_tokens, at or self._prices)

    def _close(self, request: Request, used: Spent) -> None:
        self.in_flight -= self._open.pop(request.identity)
        if not self._open:
            self.in_flight = Spent()  # no rest of floating point
        self.spent += used

    def _write(self, line: dict[str, Any]) -> None:
        """One line, on the disk when this returns. After a failure nothing follows: a torn line must be the last."""
        if self._handle is None:
            raise InputError("closed after an error", where=str(self.path), fix="run this again")
        told = {**line, "name": self._name, "t": round(time.time(), 3)}
        data = json.dumps(told, ensure_ascii=True, sort_keys=True).encode() + b"\n"
        try:
            with naming(self.path):
                while data:
                    data = data[os.write(self._handle, data) :]
                os.fsync(self._handle)
        except OSError:
            self.__exit__()
            raise

    def _load(self) -> None:
        assert self._handle is not None
        with open(self.path, "rb") as file:
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a process was killed within a write; what it was about counts as in flight
            os.ftruncate(self._handle, whole)
            os.fsync(self._handle)
        self._take(data)

    def _take(self, data: bytes) -> None:
        open_: dict[str, Spent] = {}
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
            try:
                self._entry(json.loads(line), open_)
            except (ValueError, KeyError, TypeError) as error:
                what, fix = f"not a line of this file ({error})", "put the file back as it was, or move it away"
                raise InputError(what, where=f"{self.path}:{number}", fix=fix) from None
        for most in open_.values():  # in flight when their process died
            self.spent += most

    def _entry(self, line: dict[str, Any], open_: dict[str, Spent]) -> None:
        kind, request, mine = line["type"], line["request"], line["name"] == self._name
        if kind == "sent":
            at = tuple(line["prices"]) if line["prices"] else self._prices
            self.spent += open_.pop(request, Spent()) if mine else Spent()
            if mine:
                open_[request] = cost(line["input"], line["output"], at)
            return
        used = open_.pop(request, Spent()) if mine else Spent()
        if kind == "answer":
            names = Answer.__dataclass_fields__
            answer = Answer(**{name: line[name] for name in names})
            self.answers[request] = Kept(answer, _day(line["t"]))
            at = tuple(line["prices"]) if line["prices"] else None
            self.spent += self._used(answer, used, at) if mine else Spent()
        elif kind == "lost":
            self.spent += used
        elif kind != "free":
            raise ValueError(f"type {kind!r}")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
