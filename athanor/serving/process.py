"""The server's end of a worker: start it, ask it, stop an answer, close it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from athanor.base.errors import InputError
from athanor.text.conversations import Message

ROOT = Path(__file__).resolve().parents[2]
LINE_BYTES = 64 * 2**20  # far above what gathers while the server is busy
CLOSE_SECONDS = 5.0


class Worker:
    """A running worker. `info` is what its model says of itself (worker.py)."""

    def __init__(self, process: asyncio.subprocess.Process, log: Any) -> None:
        self.process, self.log = process, log
        self.info: dict[str, Any] = {}
        self.queues: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.numbers = itertools.count(1)
        self.reader: asyncio.Task[None] | None = None
        self.closing = False

    @classmethod
    async def start(cls, spec: Mapping[str, Any]) -> Worker:
        """Load a model in a new process. InputError with the reason if it cannot be loaded."""
        log = tempfile.TemporaryFile(prefix="athanor-worker-")
        inherited = os.environ.get("PYTHONPATH")
        quiet = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}  # waiting threads sleep: others compute here
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "athanor.serving.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=LINE_BYTES,
            env={**os.environ, **quiet, "PYTHONPATH": f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)},
            start_new_session=True,  # Ctrl-C is for the server, which closes its workers
        )
        worker = cls(process, log)
        try:
            await worker._write(dict(spec))
            line = await process.stdout.readline()
            first = json.loads(line)[0] if line else {"type": "failed", "message": await worker._last_words()}
            if first["type"] == "failed":
                raise InputError(first["message"])
        except BaseException:
            await worker.close()
            raise
        worker.info = first["info"]
        worker.reader = asyncio.create_task(worker._read())
        return worker

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and self.reader is not None and not self.reader.done()

    @property
    def busy(self) -> int:
        """Answers under way."""
        return len(self.queues)

    def resident_bytes(self) -> int:
        """Memory of the process, 0 when it has ended."""
        try:
            return psutil.Process(self.process.pid).memory_info().rss if self.alive else 0
        except psutil.NoSuchProcess:
            return 0

    async def answer(
        self,
        messages: Sequence[Message],
        max_new_tokens: int | None = None,
        sampling: Mapping[str, float] | None = None,
        stop: Sequence[str] = (),
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of one answer; the last is "end" or "error". Closing the iterator stops the answer."""
        number, events = next(self.numbers), asyncio.Queue[dict[str, Any]]()
        self.queues[number] = events
        ended = False
        try:
            await self._write(
                {
                    "op": "answer",
                    "id": number,
                    "messages": [{"role": message.role, "content": message.content} for message in messages],
                    "max_new_tokens": max_new_tokens,
                    "sampling": dict(sampling or {}),
                    "stop": list(stop),
                }
            )
            while not ended:
                event = await events.get()
                ended = event["type"] in ("end", "error")
                yield event
        except ConnectionError:
            ended = True
            yield {"type": "error", "kind": "model", "message": await self._last_words()}
        finally:
            del self.queues[number]
            if not ended and self.alive:
                # Not awaited: a generator that is being closed must not stop at a full pipe.
                with contextlib.suppress(ConnectionError, RuntimeError):
                    self.process.stdin.write(_line({"op": "cancel", "id": number}))

    async def close(self) -> None:
        """End the process; its answers get an error."""
        self.closing = True
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        if self.reader is not None:
            await self.reader
        self.log.close()

    async def _write(self, what: Mapping[str, Any]) -> None:
        self.process.stdin.write(_line(what))
        await self.process.stdin.drain()

    async def _read(self) -> None:
        try:
            while line := await self.process.stdout.readline():
                for event in json.loads(line):
                    events = self.queues.get(event.pop("id"))
                    if events is not None:
                        events.put_nowait(event)
        except ValueError:  # half a line: it was killed while it wrote
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        words = await self._last_words()
        for events in self.queues.values():
            events.put_nowait({"type": "error", "kind": "model", "message": words})

    async def _last_words(self) -> str:
        """Why the process ended, with the end of what it printed."""
        status = await self.process.wait()
        if self.closing:
            return "the server is stopping"
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 2000))
        printed = self.log.read().decode("utf-8", errors="replace").strip().splitlines()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        memory = " (out of memory, perhaps)" if status == -9 else ""
        said = f": {' / '.join(line.strip() for line in printed[-2:])}" if printed else ""
        return f"the process of this model {how}{memory}{said}"


def _line(what: Mapping[str, Any]) -> bytes:
    return json.dumps(what).encode() + b"\n"
