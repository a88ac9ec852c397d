"""The engine of one model: started when it is asked, replaced when it dies or stops answering, ended with this process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from athanor.base.errors import AthanorError, InputError
from athanor.export.llamacpp import child, stream
from athanor.export.llamacpp.stream import Row

ROOT = Path(__file__).resolve().parents[3]
# Waiting threads must sleep: spinning ones slow a shared machine down by a factor of ten.
QUIET_ENVIRONMENT = {"LC_ALL": "C", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
INSTALL = "pip install xllamacpp"
# /slots is asked so often while a request is under way, and has so long: it is answered between two steps, and a step of
# `server.STEP_TOKENS` tokens takes a CPU a second for some 10 MB of weights.
PROBE_SECONDS, SILENT_SECONDS, STEP_BYTES_PER_SECOND = 1.0, 4.0, 10e6
START_SECONDS = 600.0  # a large file from a slow disk; a crash ends the wait at once
MOST_ENDS, REFUSED_SECONDS = 2, 600.0  # of engines under one request, without its whole answer: it is refused so long
LOG_BYTES = 2000
LINE_BYTES = 1 << 26  # of the log-probabilities of one position
SOCKET_BYTES = 100  # of its path; the system takes 107, macOS 103
# llama.cpp computes large batches on a card that it sees, whatever is said of layers.
NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Job:
    """A model and how it is run. `rows`: answers at a time; `exact`: fp32 cache, no flash attention; `template`: in place
    of the file's."""

    path: str
    context_tokens: int
    rows: int = 1
    threads: int = 1
    exact: bool = False
    accelerator: bool = False
    lora: tuple[str, ...] = ()
    template: str = ""


class EngineDied(AthanorError):
    """The engine ended during an answer. The next request starts it again."""


class NotInstalled(InputError):
    """The package xllamacpp cannot be imported."""


def child_environment() -> dict[str, str]:
    """Environment of a process that runs a module of this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **QUIET_ENVIRONMENT, "PYTHONPATH": path}


class Engine:
    """Requests to one model. Nothing runs until the first one; `close` ends it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        long = len(os.fsencode(tempfile.gettempdir())) > SOCKET_BYTES - len("/athanor-engine-xxxxxxxx/engine.sock")
        self._folder = Path(tempfile.mkdtemp(prefix="athanor-engine-", dir="/tmp" if long else None))  # 0700
        self.socket = str(self._folder / "engine.sock")
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[list[Any]]] = {}
        self._scoring = asyncio.Lock()
        self._numbers = itertools.count()
        self.under_way: Counter[str] = Counter()  # by digest
        self._ends: dict[str, dict[object, float]] = {}  # by digest: processes that ended under it, and when
        self._allowed = SILENT_SECONDS
        self._silent: asyncio.subprocess.Process | None = None  # the one that was killed last for it
        self._watching: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process of the engine; None while there is none."""
        return self._process.pid if self.alive else None  # type: ignore[union-attr]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def rows_of(self, body: Mapping[str, Any]) -> AsyncGenerator[list[Row]]:
        """Rows of llama.cpp's /completion for `body`; closing the generator cancels. EngineDied, InputError."""
        async with self._request(body), contextlib.aclosing(stream.rows(self.socket, body)) as answer:
            async for found in answer:
                yield found

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of one of the server's other routes."""
        async with self._request({**(body or {}), "path": path}):
            return await stream.ask(self.socket, path, body)

    async def metrics(self) -> str:
        """What the server tells Prometheus; nothing while it does not run."""
        return str(await stream.ask(self.socket, "/metrics")) if self.alive else ""

    async def score(self, ids: Sequence[int], top: int = 0, positions: Sequence[int] | None = None) -> list[Any]:
        """Rows of `scoring.Scorer.score`: [id, log-probability, [[id, log-probability] of the `top` likeliest]]."""
        asked = [list(ids), top, positions]
        async with self._request({"score": asked}):
            await self._scoring.acquire()  # one at a time: what is cancelled while it waits is not computed
            number = next(self._numbers)
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(self._scored)
            try:
                await self._write({"id": number, "score": asked})
            except stream.Lost as error:
                self._fail(error)
            return await asyncio.shield(answer)

    def _scored(self, answer: asyncio.Future[list[Any]]) -> None:
        self._scoring.release()
        if not answer.cancelled():
            answer.exception()  # nobody may wait for it any more

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            await _end(self._process)
        for task in (self._watching, self._reading):
            if task is not None:
                task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- a request ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _request(self, body: Mapping[str, Any]) -> AsyncGenerator[None]:
        content = {name: value for name, value in body.items() if name != "seed"}  # each try may have its own
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        now = time.monotonic()
        self._ends = {one: times for one, times in self._ends.items() if max(times.values()) > now - REFUSED_SECONDS}
        if len(self._ends.get(digest, ())) >= MOST_ENDS:
            what = f"{MOST_ENDS} engines ended under this very request"
            raise InputError(what, where="request", fix="change its settings or its text")
        await self._start()
        process = self._process
        self.under_way[digest] += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        except stream.Lost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):  # its end is seen a moment later
                    await (process.wait() if process else asyncio.sleep(0))
            # A SIGKILL that is not ours came from elsewhere.
            if process is self._silent or (process and process.returncode not in (None, -signal.SIGKILL)):
                self._ends.setdefault(digest, {})[process] = time.monotonic()
            raise EngineDied("the engine ended during the answer", fix="ask again") from None
        finally:
            self.under_way -= Counter([digest])

    async def _watch(self) -> None:
        """Kill the engine when it does not say for some seconds what it does: a request can stop its one loop, while
        /health, which another thread answers, stays 200."""
        silent, used = None, 0.0  # the process that has not answered, and its processor time before
        while self.under_way:
            await asyncio.sleep(PROBE_SECONDS)
            if (process := self._process) is None or process.returncode is not None:
                continue
            if process is not silent:
                used = _processor_seconds(process.pid)
            try:
                async with asyncio.timeout(self._allowed):
                    await stream.ask(self.socket, "/slots")
                silent = None
            except TimeoutError:
                # On a busy machine it may not have had its turn: that is no silence.
                silent, computed = process, _processor_seconds(process.pid) - used > self._allowed / 2
                if process.returncode is None and (computed or not _wants_its_turn(process.pid)):
                    self._silent = process
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            except (AthanorError, ConnectionError):
                pass  # it ended: whoever waits for it gets to know

    # -- the process ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._starting:
            if self._closed:
                raise InputError("the engine is closed", where=self.job.path)
            if self.alive:
                return
            with contextlib.suppress(OSError):
                self._allowed = max(SILENT_SECONDS, os.stat(self.job.path).st_size / STEP_BYTES_PER_SECOND)
            Path(self.socket).unlink(missing_ok=True)  # a file that is left makes the start fail
            with (self._folder / "log").open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", child.__name__,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=LINE_BYTES,
                    env=child_environment() | ({} if self.job.accelerator else NO_ACCELERATOR), start_new_session=True,
                )  # fmt: skip
            try:
                await self._write({**asdict(self.job), "socket": self.socket})
                async with asyncio.timeout(START_SECONDS):
                    line = await self._output.readline()
            except (TimeoutError, ConnectionError):
                line = b""
            except BaseException:  # the request was cancelled: half a start would be taken for an engine
                await _end(self._process)
                raise
            if not (said := json.loads(line) if line else {}).get("ready"):
                await _end(self._process)
                reason = said.get("failed") or self._log_tail() or f"status {self._process.returncode}"
                if said.get("missing"):
                    raise NotInstalled(reason, where="llama.cpp", fix=INSTALL)
                fix = "athanor verify FILE checks it"
                raise InputError(f"llama.cpp does not start: {reason}", where=self.job.path, fix=fix)
            self._reading = asyncio.create_task(self._read(self._process))

    @property
    def _output(self) -> asyncio.StreamReader:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    async def _write(self, row: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(row).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            raise stream.Lost(str(error)) from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out what the process answers on its output, until it ends."""
        assert process.stdout is not None
        rows: list[Any] = []  # of the one that is being answered
        try:
            while line := await process.stdout.readline():
                said = json.loads(line)
                if "row" in said:
                    rows.append(said["row"])
                    continue
                if (answer := self._answers.pop(said["id"], None)) and not answer.done():
                    if "failed" in said:
                        answer.set_exception(InputError(said["failed"]))
                    else:
                        answer.set_result(rows)
                rows = []
            await process.wait()
        finally:  # also after a line that is too long
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self._fail(stream.Lost("the engine ended"))

    def _fail(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()

    def _log_tail(self) -> str:
        log = self._folder / "log"  # not there once it is closed
        text = log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
        return " / ".join(text.strip().splitlines()[-3:])[-400:]


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        process.kill()
    await process.wait()


def _processor_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _wants_its_turn(pid: int) -> bool:
    """Whether a thread waits for a processor or a disk; False where that is not known."""
    states = set()
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.add(file.read_text().rpartition(")")[2].split()[0])
    return bool(states & {"R", "D"})
