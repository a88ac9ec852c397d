"""A process that holds one model and answers (`main`), and the server's end of it (`Worker`): they speak over pipes.

A process of its own, because loading may fail in ways that end a process,
because closing it gives all of the memory back, and because the server then
needs no torch and starts at once.

One JSON line each way. First comes the specification {"path", "backend",
"device", "threads", "rows", "cache_bytes"}; the reply is [{"type": "ready",
"info": ...}] or [{"type": "failed", "message": ...}]. Then
{"op": "answer", "id", "messages", "max_new_tokens", "sampling", "stop"} and
{"op": "cancel", "id"}; lists of events (docs/serving.md) with their id come
back. The end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import queue
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from athanor.base.errors import AthanorError, InputError
from athanor.serving.backends.base import Request
from athanor.text.conversations import Message

ROOT = Path(__file__).resolve().parents[2]
LINE_BYTES = 64 * 2**20  # far above what gathers while the server is busy
CLOSE_SECONDS, RETIRE_SECONDS = 5.0, 0.1
BACKENDS = {"torch": "torch_backend", "llama.cpp": "llamacpp_backend", "transformers": "transformers_backend"}


class Worker:
    """A running worker. `info` is what its model says of itself."""

    def __init__(self, process: asyncio.subprocess.Process, log: Any) -> None:
        self.process, self.log = process, log
        self.info: dict[str, Any] = {}
        self.queues: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.request_ids = itertools.count(1)
        self.reader: asyncio.Task[None] | None = None
        self.closing = False

    @classmethod
    async def start(cls, spec: Mapping[str, Any]) -> Worker:
        """Load a model in a new process. InputError with the reason if it cannot be loaded."""
        log = tempfile.TemporaryFile(prefix="athanor-worker-")
        inherited = os.environ.get("PYTHONPATH")
        # Waiting threads sleep, because others compute on this machine.
        quiet = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}
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
            reply = json.loads(line)[0] if line else {"type": "failed", "message": await worker._exit_reason()}
            if reply["type"] == "failed":
                raise InputError(reply["message"])
        except BaseException:
            await worker.close()
            raise
        worker.info = reply["info"]
        worker.reader = asyncio.create_task(worker._read())
        return worker

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and self.reader is not None and not self.reader.done()

    def resident_bytes(self) -> int:
        """Memory of the process, 0 when it has ended."""
        try:
            return psutil.Process(self.process.pid).memory_info().rss if self.alive else 0
        except psutil.NoSuchProcess:
            return 0

    async def answer(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Events of one answer; the last is "end" or "error". Closing the iterator stops the answer."""
        number, events = next(self.request_ids), asyncio.Queue[dict[str, Any]]()
        self.queues[number] = events
        ended = False
        try:
            await self._write({"op": "answer", **dataclasses.asdict(request), "id": number})
            while not ended:
                event = await events.get()
                ended = event["type"] in ("end", "error")
                yield event
        except ConnectionError:
            ended = True
            yield {"type": "error", "kind": "model", "message": await self._exit_reason()}
        finally:
            del self.queues[number]
            if not ended and self.alive:
                # Not awaited: a generator that is being closed must not stop at a full pipe.
                with contextlib.suppress(ConnectionError, RuntimeError):
                    self.process.stdin.write(_line({"op": "cancel", "id": number}))

    async def retire(self) -> None:
        """End the process once it has no answer under way; cancelled, at once."""
        try:
            while self.queues:
                await asyncio.sleep(RETIRE_SECONDS)
        finally:
            await self.close()

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

    async def _write(self, message: Mapping[str, Any]) -> None:
        self.process.stdin.write(_line(message))
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
        reason = await self._exit_reason()
        for events in self.queues.values():
            events.put_nowait({"type": "error", "kind": "model", "message": reason})

    async def _exit_reason(self) -> str:
        """Why the process ended, with the end of what it printed."""
        status = await self.process.wait()
        if self.closing:
            return "the server is stopping"
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - 2000))
        printed = self.log.read().decode("utf-8", errors="replace").strip().splitlines()
        ending = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        memory = " (out of memory, perhaps)" if status == -9 else ""
        printed_end = f": {' / '.join(line.strip() for line in printed[-2:])}" if printed else ""
        return f"the process of this model {ending}{memory}{printed_end}"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Replies:
    """Lines to the server. One thread writes, so that no answer waits for a pipe; what has gathered goes together."""

    def __init__(self, descriptor: int) -> None:
        self.file = os.fdopen(descriptor, "w", encoding="utf-8")
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self.thread.start()

    def send(self, event: dict[str, Any]) -> None:
        self.events.put(event)

    def close(self) -> None:
        """Return when everything is written."""
        self.events.put(None)
        self.thread.join()

    def _run(self) -> None:
        while True:
            batch = [self.events.get()]
            while not self.events.empty():
                batch.append(self.events.get())
            lines = [event for event in batch if event is not None]
            try:
                if lines:
                    print(json.dumps(lines), file=self.file, flush=True)
            except OSError:  # the server has gone
                os._exit(1)
            if None in batch:
                return


def main() -> int:
    # Libraries print; what they print must not look like a reply.
    replies = Replies(os.dup(1))
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    try:
        backend = importlib.import_module(f"athanor.serving.backends.{BACKENDS[spec['backend']]}").open_backend(spec)
    except Exception as error:
        ours = isinstance(error, AthanorError)
        if not ours:
            import traceback

            traceback.print_exc()
        replies.send({"type": "failed", "message": str(error) if ours else f"{type(error).__name__}: {error}"})
        replies.close()
        return 1
    replies.send({"type": "ready", "info": backend.info})
    while True:
        command = json.loads(lines.get())
        number = command["id"]
        if command.pop("op") == "cancel":
            backend.cancel(number)
            continue
        request = Request(**{**command, "messages": [Message(**message) for message in command["messages"]]})
        backend.submit(request, lambda event, number=number: replies.send({"id": number, **event}))


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Read requests, also while the model loads; end the process when the server has gone."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
