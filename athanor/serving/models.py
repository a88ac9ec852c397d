"""The models of a server: loaded when first asked, one process each, as many as memory holds.

Requests for a model that is being loaded share the load. A model that does not
fit makes the least recently used idle ones leave; busy ones are never
interrupted, so a request may have to wait for one of them to finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, InputError, suggest
from athanor.runtime.machine import free_memory_bytes
from athanor.serving.backends.base import Request
from athanor.serving.discover import CONFIG, LLAMA_CPP, TORCH, Found, materialise, problem_of
from athanor.serving.metrics import Metrics
from athanor.serving.worker import Worker

WAIT_SECONDS = 120.0  # for memory that other models hold
RETRY_SECONDS = 30.0
GIB = 2**30
# What a process takes before any weight: Python with llama.cpp, or with torch.
RUNTIME_BYTES, LLAMA_CPP_BYTES = 400 << 20, 150 << 20

Start = Callable[[dict[str, Any]], Awaitable[Any]]


class NoModel(InputError):
    """There is none of that name."""

    status = 404


class Held(InputError):
    """Memory is taken by models that are answering: no fault of the model that was asked for."""


@dataclass
class _Slot:
    """A model and what it is doing. reserved: bytes set aside while it is loaded; measured: what it took at last."""

    found: Found
    worker: Any = None
    task: asyncio.Task[None] | None = None
    busy: int = 0
    used: int = 0  # number of the request that used it last
    reserved: int = 0
    measured: int = 0
    files: Any = None  # state of the files that it was measured with
    info: Mapping[str, Any] | None = None
    failure: tuple[str, float, Any] | None = None  # reason, when, state of the files

    def ready(self) -> bool:
        return self.worker is not None and self.worker.alive

    def held(self) -> int:
        if self.ready():
            self.measured = int(self.worker.resident_bytes())
            return self.measured
        return self.reserved


class Models:
    """The models of `found` behind one `answer`. `spec`: what a worker is told besides path and backend.

    start: makes a worker from such a spec. root: of the checkout. Belongs to one event loop.
    """

    def __init__(
        self,
        found: Sequence[Found],
        *,
        memory_bytes: int,
        root: Path = Path("."),
        spec: Mapping[str, Any] | None = None,
        start: Start = Worker.start,
        wait_seconds: float = WAIT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.memory_bytes, self.root, self.spec = memory_bytes, root.resolve(), dict(spec or {})
        self.wait_seconds, self.retry_seconds = wait_seconds, retry_seconds
        self._start, self.metrics = start, Metrics()
        self._slots = {one.id: _Slot(one) for one in found}
        self._leaving = 0  # bytes of workers that are being closed
        self._count = 0
        self._changed = asyncio.Condition()
        self._closed = False
        self._settling: set[asyncio.Task[None]] = set()
        for slot in self._slots.values():
            if slot.found.problem:
                slot.failure = (slot.found.problem, time.monotonic(), _files(slot.found))

    def states(self) -> list[dict[str, Any]]:
        """Every model as the page gets it (GET /api/state)."""
        return [self._state(slot) for slot in self._slots.values()]

    def _state(self, slot: _Slot) -> dict[str, Any]:
        found, info = slot.found, slot.info or {}
        state = "loading" if slot.task else "ready" if slot.ready() else "failed" if slot.failure else "idle"
        return {
            **{name: getattr(found, name) for name in ("id", "label", "source", "backend", "created")},
            "state": state,
            "reason": slot.failure[0] if slot.failure and state == "failed" else None,
            **{key: info.get(key) for key in ("context_tokens", "parameters", "defaults", "template")},
        }

    def memory(self) -> dict[str, int]:
        """Bytes that the process of each loaded model holds."""
        return {name: slot.held() for name, slot in self._slots.items() if slot.ready()}

    def default(self) -> str:
        """The first model that is not known to be broken. InputError if there is none at all."""
        if not self._slots:
            raise InputError("there is no model", where="models/export", fix="make one: make repro; or --model PATH")
        whole = [name for name, slot in self._slots.items() if slot.failure is None]
        return (whole or list(self._slots))[0]

    def answer(self, model: str, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Events of one answer (docs/serving.md); closing the iterator cancels it. InputError for an unknown model."""
        if model not in self._slots:
            fix = suggest(model, self._slots, "make a model first: make repro")
            raise NoModel(f"there is no model '{model}'", where="model", fix=fix)
        return self.metrics.counted(model, self._answer(self._slots[model], request))

    async def _answer(self, slot: _Slot, request: Request) -> AsyncIterator[dict[str, Any]]:
        self._count += 1
        slot.used = self._count
        slot.busy += 1
        last = None
        try:
            if not slot.ready():
                yield {"type": "loading"}
                await self._loaded(slot)
            async with contextlib.aclosing(slot.worker.answer(request)) as events:
                async for event in events:
                    last = event["type"]
                    yield event
            if last not in ("end", "error"):
                raise InputError("its process ended in the middle of the answer", where=slot.found.id, fix="ask again")
        except AthanorError as error:
            if last not in ("end", "error"):
                yield {"type": "error", "kind": "model", "message": str(error)}
        finally:
            slot.busy -= 1
            # Not awaited here: this also runs while a request is being cancelled.
            task = asyncio.get_running_loop().create_task(self._settle())
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    # -- loading ----------------------------------------------------------------

    async def _loaded(self, slot: _Slot) -> None:
        """Return when the model answers; raises the reason if it cannot."""
        if slot.task is None and slot.failure and not await self._worth_a_try(slot, slot.failure):
            raise InputError(slot.failure[0])
        stopping = InputError("the server is stopping", where=slot.found.id)
        if self._closed:
            raise stopping
        if slot.task is None and not slot.ready():
            slot.task = asyncio.create_task(self._load(slot))
            slot.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if slot.task is not None:
            # A request that goes away leaves the load to the others, and to the next one.
            try:
                await asyncio.shield(slot.task)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise stopping from None  # the load was cancelled, not this request
                raise
        if not slot.ready():
            raise InputError("its process ended as soon as it was loaded", where=slot.found.id, fix="ask again")

    async def _worth_a_try(self, slot: _Slot, failure: tuple[str, float, Any]) -> bool:
        _, when, files = failure
        return time.monotonic() - when >= self.retry_seconds or await asyncio.to_thread(_files, slot.found) != files

    async def _load(self, slot: _Slot) -> None:
        found = slot.found
        files = await asyncio.to_thread(_files, found)
        try:
            problem = await asyncio.to_thread(problem_of, self.root, found)
            if problem:
                raise InputError(problem, where=found.id)
            await asyncio.to_thread(materialise, self.root, found)
            files = await asyncio.to_thread(_files, found)
            if files != slot.files:
                slot.files, slot.measured = files, 0
            if slot.worker is not None:  # it died; what is left of it goes first
                await slot.worker.close()
                slot.worker = None
            rows, cache_bytes = int(self.spec.get("rows") or 1), int(self.spec.get("cache_bytes") or 0)
            need = slot.measured or await asyncio.to_thread(estimate, found, rows, cache_bytes)
            await self._make_room(slot, need)
            spec = {**self.spec, "path": found.path, "backend": found.backend}
            worker = await self._start(spec)
            taken = int(worker.resident_bytes())
            if taken > self.memory_bytes:
                await worker.close()
                slot.measured = taken
                raise self._too_large(slot, taken, "it takes")
            slot.worker, slot.info, slot.failure = worker, worker.info, None
        except Held:
            raise
        except AthanorError as error:
            slot.failure = (str(error), time.monotonic(), files)
            raise
        except OSError as error:
            slot.failure = (f"{found.id}: {error}", time.monotonic(), files)
            raise InputError(slot.failure[0]) from None
        finally:
            slot.task, slot.reserved = None, 0
            await self._settle()

    # -- memory -----------------------------------------------------------------

    def _held(self) -> int:
        return self._leaving + sum(slot.held() for slot in self._slots.values())

    async def _make_room(self, slot: _Slot, need: int) -> None:
        """Set `need` bytes aside for `slot`. Held where other models do not let go of them in time."""
        if need > self.memory_bytes:
            raise self._too_large(slot, need, "it needs about")
        end = time.monotonic() + self.wait_seconds
        async with self._changed:
            while self._held() + need > self.memory_bytes:
                if await self._evict():
                    continue
                left = end - time.monotonic()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), max(left, 0))
                    continue
                raise Held(
                    f"needs {size_text(need)} and no memory came free in {self.wait_seconds:g} s: {self._holders()}",
                    where=slot.found.id,
                    fix="ask again later, or start the server with a larger --memory",
                )
            slot.reserved = need  # no await since the sum was taken

    async def _evict(self) -> bool:
        """Close the idle model that was used longest ago; False if none is idle. The condition is held."""
        idle = [slot for slot in self._slots.values() if slot.worker is not None and not slot.busy and not slot.task]
        if not idle:
            return False
        slot = min(idle, key=lambda one: one.used)
        worker, size, slot.worker = slot.worker, slot.held(), None
        if slot.measured > self.memory_bytes:
            slot.measured = 0  # it grew while it answered; loaded anew it may well fit
        self._leaving += size
        try:
            await worker.close()
        finally:
            self._leaving -= size
        return True

    async def _settle(self) -> None:
        """After a load or an answer: who waits for memory looks again, and what grew beyond the bound is cut back."""
        async with self._changed:
            if not self._closed:
                while self._held() > self.memory_bytes and await self._evict():
                    pass
            self._changed.notify_all()

    def _too_large(self, slot: _Slot, size: int, verb: str) -> InputError:
        return InputError(
            f"{verb} {size_text(size)}, more than the {size_text(self.memory_bytes)} that all models together may take",
            where=slot.found.id,
            fix="start the server with a larger --memory, or serve a smaller file of it (a GGUF)",
        )

    def _holders(self) -> str:
        rows = [(slot.held(), slot.found.id, slot.busy) for slot in self._slots.values()]
        told = [f"{name} {size_text(size)}{', answering' if busy else ''}" for size, name, busy in rows if size]
        return f"{'; '.join(told) or 'no model'}; the bound is {size_text(self.memory_bytes)}"

    async def close(self) -> None:
        """End every load and every worker."""
        self._closed = True
        tasks = [slot.task for slot in self._slots.values() if slot.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = [slot.worker for slot in self._slots.values() if slot.worker is not None]
        for slot in self._slots.values():
            slot.worker = None
        await asyncio.gather(*(worker.close() for worker in workers), *self._settling, return_exceptions=True)


def default_memory_bytes() -> int:
    """Half of the memory that is free now, the limit of a container respected."""
    return free_memory_bytes() // 2


def estimate(found: Found, rows: int, cache_bytes: int) -> int:
    """Bytes that a model will take: weights, runtime, and the keys and values of `rows` answers, at most `cache_bytes`."""
    if found.backend == LLAMA_CPP:
        return found.bytes + LLAMA_CPP_BYTES + cache_bytes
    weights, cache = found.bytes, cache_bytes
    with contextlib.suppress(AthanorError, AttributeError, KeyError, TypeError):
        config = read_json(Path(found.path) / CONFIG)
        if config.get("dtype", config.get("torch_dtype")) != "float32":
            weights *= 2  # they are computed with as fp32
        row = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        cache = min(cache, rows * row * config["max_position_embeddings"])
    if found.backend == TORCH:
        weights *= 2  # decoding holds the matrices of the layers a second time (model/folded.py)
    return weights + RUNTIME_BYTES + cache


def size_text(count: int) -> str:
    """For people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _files(found: Found) -> Any:
    """Changes when the model's files do."""
    path = Path(found.path)
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [(file.name, facts.st_mtime_ns, facts.st_size) for file in files if (facts := os.stat(file))]
    except OSError:
        return None
