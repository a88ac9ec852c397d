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
MOST_ENDS = 2  # of engines, under one request: it is refused from then on
LOG_BYTES = 2000
LINE_BYTES = 1 << 26  # of a line with log-probabilities


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
        self._folder = Path(
            tempfile.mkdtemp(prefix="athanor-engine-")
        )  # 0700; a path of a socket has 107 bytes at most
        self.socket = str(self._folder / "engine.sock")
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self.under_way: Counter[str] = Counter()  # by digest
        self._ends: Counter[str] = Counter()  # of engines under a request
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
        async with self._request({"path": path, "body": body}):
            return await stream.ask(self.socket, path, body)

    async def metrics(self) -> str:
        """What the server tells Prometheus; nothing while it does not run."""
        return str(await stream.ask(self.socket, "/metrics")) if self.alive else ""

    async def score(self, ids: Sequence[int], top: int = 0, positions: Sequence[int] | None = None) -> list[Any]:
        """Rows of `scoring.Scorer.score`: [id, log-probability, [[id, log-probability] of the `top` likeliest]]."""
        asked = [list(ids), top, positions]
        async with self._request({"score": asked}):
            number = next(self._numbers)
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            await self._write({"id": number, "score": asked})
            found = await answer
            if "failed" in found:
                raise InputError(found["failed"])
            return list(found["scored"])

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in (self._watching, self._reading):
            if task is not None:
                task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- a request ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _request(self, body: Mapping[str, Any]) -> AsyncGenerator[None]:
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if self._ends[digest] >= MOST_ENDS:
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
            raise EngineDied("the engine ended during the answer", fix="ask again") from None
        finally:
            self.under_way -= Counter([digest])
            # A SIGKILL that is not ours came from elsewhere.
            if process is not None and process.returncode is not None and not self._closed:
                self._ends[digest] += process.returncode != -signal.SIGKILL or process is self._silent

    async def _watch(self) -> None:
        """Kill the engine when it does not say for some seconds what it does: a request can stop its one loop, while
        /health, which another thread answers, stays 200."""
        allowed = max(SILENT_SECONDS, Path(self.job.path).stat().st_size / STEP_BYTES_PER_SECOND)
        silent, used = None, 0.0  # the process that has not answered, and its processor time before
        while self.under_way:
            await asyncio.sleep(PROBE_SECONDS)
            if (process := self._process) is None or process.returncode is not None:
                continue
            if process is not silent:
                used = _processor_seconds(process.pid)
            try:
                async with asyncio.timeout(allowed):
                    await stream.ask(self.socket, "/slots")
                silent = None
            except TimeoutError:
                # On a busy machine it may not have had its turn: that is no silence.
                silent, computed = process, _processor_seconds(process.pid) - used > allowed / 2
                if process.returncode is None and (computed or not _wants_its_turn(process.pid)):
                    self._silent = process
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
            Path(self.socket).unlink(missing_ok=True)  # a file that is left makes the start fail
            with (self._folder / "log").open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", child.__name__,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=LINE_BYTES,
                    env=child_environment(), start_new_session=True,
                )  # fmt: skip
            try:
                await self._write({**asdict(self.job), "socket": self.socket})
                async with asyncio.timeout(START_SECONDS):
                    line = await self._output.readline()
            except (TimeoutError, ConnectionError):
                line = b""
            if not (said := json.loads(line) if line else {}).get("ready"):
                self._process.kill()
                await self._process.wait()
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
        while line := await process.stdout.readline():
            row = json.loads(line)
            if (answer := self._answers.pop(row["id"], None)) and not answer.done():
                answer.set_result(row)
        await process.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(stream.Lost("the engine ended"))
        self._answers.clear()

    def _log_tail(self) -> str:
        text = (self._folder / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
        return " / ".join(text.strip().splitlines()[-3:])[-400:]


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
