"""Sends the requests that are not answered yet, several at a time, and keeps every answer."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from athanor.base.errors import AthanorError, InputError, Interrupted
from athanor.sources.http import RetryableError
from athanor.synthesis.endpoint import Answer, Rejected
from athanor.synthesis.ledger import Ledger
from athanor.synthesis.material import rank
from athanor.synthesis.requests import Request

POLL_SECONDS = 0.1
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # s between tries, doubling; a server may ask for longer ones
MAX_SERVER_PAUSE = 900.0  # a server that asks for more is better tried another day
FAILURES = 5  # in a row, before the server is left alone


@dataclass(frozen=True)
class Collected:
    """The outcome: the budget limit that stopped the sending, if any, and why some requests have no answer."""

    limit: str | None
    failed: dict[str, str]  # request -> reason


@dataclass(kw_only=True)
class Collector:
    """Sends requests in threads. `tick(request, answer)` is called with every new answer; an AthanorError of it ends the sending.

    Requests in flight are always waited for: they are paid for.
    """

    ask: Callable[[Request], Answer]
    ledger: Ledger
    concurrency: int
    max_tries: int
    tick: Callable[[Request, Answer], None]
    stop: Callable[[], bool]
    first_pause: float = FIRST_PAUSE

    def __post_init__(self) -> None:
        self._halt = threading.Event()
        self._not_before = 0.0  # by time.monotonic: all requests wait as long as the server asked one of them to
        self._lock = threading.Lock()
        self._failed: dict[str, str] = {}
        self._consecutive_failures = 0
        self._limit: str | None = None
        self._error: BaseException | None = None
        self._stopped = False

    def collect(self, requests: Sequence[Request]) -> Collected:
        """Send the requests. What ended it early is raised once nothing is in flight; Interrupted if `stop()` was true."""
        waiting = collections.deque(request for request in requests if request.identity not in self.ledger.answers)
        in_flight: dict[concurrent.futures.Future[Answer | str], Request] = {}
        with concurrent.futures.ThreadPoolExecutor(self.concurrency) as pool:
            while in_flight or (waiting and not self._halt.is_set()):
                if self.stop():
                    self._stopped = True
                    self._halt.set()
                paused = self._launch(pool, waiting, in_flight)
                if not in_flight and paused:
                    time.sleep(POLL_SECONDS)
                finished, _ = concurrent.futures.wait(in_flight, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)
                # In the order of the list, whichever thread was first.
                for future in sorted(finished, key=lambda item: list(in_flight).index(item)):
                    self._finish(in_flight.pop(future), future)
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise Interrupted("stopped; every answer is kept, the same command asks for the rest")
        return Collected(self._limit, self._failed)

    def _launch(
        self,
        pool: concurrent.futures.ThreadPoolExecutor,
        waiting: collections.deque[Request],
        in_flight: dict[concurrent.futures.Future[Answer | str], Request],
    ) -> bool:
        """Submit the requests that may start now; True while all of them wait for a pause that the server asked for."""
        while waiting and len(in_flight) < self.concurrency and not self._halt.is_set():
            if time.monotonic() < self._not_before:
                return True
            try:
                exceeded = self.ledger.reserve(waiting[0])
            except (AthanorError, OSError) as error:
                self._end(error)
                return False
            if exceeded == "wait":
                return False
            if exceeded is not None:
                self._limit = exceeded
                self._halt.set()
                return False
            request = waiting.popleft()
            in_flight[pool.submit(self._answer, request)] = request
        return False

    def _finish(self, request: Request, future: concurrent.futures.Future[Answer | str]) -> None:
        """Record the outcome of a finished request."""
        try:
            answer = future.result()
            if isinstance(answer, Answer):
                self._consecutive_failures = 0
                self.tick(request, answer)
            elif answer:
                self._failed[request.identity] = answer
                self._consecutive_failures += 1
                if self._consecutive_failures >= FAILURES:
                    what = f"{self._consecutive_failures} requests in a row got no answer, the last: {answer}"
                    fix = "check synthetic.base_url, the model's name and the server; answers so far are kept"
                    raise InputError(what, where="synthetic", fix=fix)
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Stop the sending; the first error is kept, because those after it follow from it."""
        self._error = self._error or error
        self._halt.set()

    def _answer(self, request: Request) -> Answer | str:
        """The answer, or why there is none ("" when the sending stops). Runs in a thread; its budget is reserved."""
        reason, ledger = "", self.ledger
        for attempt in range(self.max_tries):
            if attempt and not self._pause(request, attempt):
                ledger.failed(request, reason, charged=False)
                return ""
            try:
                answer = self.ask(request)
            except RetryableError as error:
                reason = error.why
                self._wait_for(error.after)
                if error.charged:
                    ledger.failed(request, reason, charged=True)
                    if attempt + 1 == self.max_tries:
                        return reason
                    if not self._reserved(request):
                        return ""
            except Rejected as error:
                ledger.failed(request, str(error), charged=False)
                return str(error)
            except AthanorError as error:
                ledger.failed(request, str(error), charged=False)
                raise
            else:
                ledger.answered(request, answer)
                return answer
        ledger.failed(request, reason, charged=False)
        return f"{reason} ({self.max_tries} tries)"

    def _reserved(self, request: Request) -> bool:
        """Reserve budget for another try of a request that broke off; False if the budget or a stop prevents it."""
        while not self._halt.is_set():
            exceeded = self.ledger.reserve(request)
            if exceeded is None:
                return True
            if exceeded != "wait":
                self._limit = exceeded
                self._halt.set()
            self._halt.wait(POLL_SECONDS)
        return False

    def _wait_for(self, seconds: float | None) -> None:
        if seconds is None:
            return
        if seconds > MAX_SERVER_PAUSE:
            what = f"the server asks to wait for {seconds:,.0f} s"
            self._end(InputError(what, where="synthetic", fix="run this again then; answers so far are kept"))
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _pause(self, request: Request, attempt: int) -> bool:
        """Wait before another try; False when the sending ends meanwhile."""
        # Up to half as long again, by the request's own hash: those that failed together come back apart.
        jitter = 1 + rank(attempt, request.identity)[0] / 512
        server_pause = self._not_before - time.monotonic()
        pause = min(self.first_pause * 2 ** (attempt - 1), MAX_PAUSE) * jitter
        return not self._halt.wait(max(server_pause, 0.0) if server_pause > 0 else pause)
