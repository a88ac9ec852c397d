"""The models of a server: loaded when first asked, one process each, as many as memory holds.

Requests for a model that is being loaded share the load. A model that does not
fit makes the least recently used idle ones leave; busy ones are never
interrupted, so a request may have to wait for one of them to finish. A model
whose files were replaced is loaded again for the next request. The list
follows the disk: models that appear in the checkout are listed at the next
look, and those that are gone leave it once nobody is answered by them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError, InputError, suggest
from athanor.serving.about import file_states
from athanor.serving.backends.base import Request
from athanor.serving.discover import AvailableModel, materialise, problem_of, rank, unique
from athanor.serving.entries import Entry
from athanor.serving.memory import estimate, size_text
from athanor.serving.metrics import Metrics
from athanor.serving.running import AT_WORK, UNDONE, gone
from athanor.serving.worker import Worker

WAIT_SECONDS = 120.0  # for memory that other models hold
RETRY_SECONDS = 30.0

Start = Callable[[dict[str, Any]], Awaitable[Any]]


class NoModel(InputError):
    """There is no model of that name."""

    status, code = 404, "model_not_found"


class MemoryHeld(InputError):
    """Models that are answering hold the memory; nothing is wrong with the requested model."""


class Models:
    """The `available` models behind one `answer`, and those that come and go. Belongs to one event loop.

    `running`: those that are not done. `local`: the checkout's own as they are now, None where they are as they were.
    `spec`: what a worker is told besides path and backend. start: makes a worker from such a spec. root: of the checkout.
    """

    def __init__(
        self,
        available: Sequence[AvailableModel],
        *,
        memory_bytes: int,
        root: Path = Path("."),
        spec: Mapping[str, Any] | None = None,
        running: Callable[[], Sequence[AvailableModel]] = tuple,
        local: Callable[[], Sequence[AvailableModel] | None] = lambda: None,
        start: Start = Worker.start,
        wait_seconds: float = WAIT_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.memory_bytes, self.root, self.spec = memory_bytes, root.resolve(), dict(spec or {})
        self.wait_seconds, self.retry_seconds = wait_seconds, retry_seconds
        self._start, self._running, self._local, self.metrics = start, running, local, Metrics()
        self._entries: dict[str, Entry] = {}
        self._closing_bytes = 0  # bytes of workers that are being closed
        self._request_count = 0
        self._changed, self._closed = asyncio.Condition(), False
        self._background: set[asyncio.Task[None]] = set()
        self._add(available)
        self.refresh()

    def _add(self, models: Iterable[AvailableModel]) -> None:
        self._entries |= {model.id: Entry(model) for model in unique(models, self._entries)}

    def refresh(self) -> None:
        """Follow the trainings and the disk: add what they have made since, and drop what is gone and in nobody's use."""
        self._follow_disk()
        present = {model.path: model for model in self._running()}
        for entry in self._entries.values():
            if entry.model.source != UNDONE:
                continue
            if found := present.pop(entry.model.path, None):
                entry.follow(found)
            else:
                label = entry.model.label.replace(AT_WORK, "not the newest any more")
                entry.gone, entry.model = True, replace(entry.model, label=label)
        self._add(present.values())
        for name, entry in list(self._entries.items()):
            if entry.gone and not entry.at_work() and (not entry.ready() or self._superseded(entry)):
                del self._entries[name]
                if entry.worker is not None:
                    self._release(entry)

    def _follow_disk(self) -> None:
        """Add the checkout's own models that are new, and look at the others again, after a change of their files."""
        if (local := self._local()) is None:
            return
        present = {model.path: model for model in local}
        for entry in self._entries.values():
            if entry.model.source == "export":
                if found := present.pop(entry.model.path, None):
                    entry.follow(found)
                else:
                    entry.gone = True
        self._add(present.values())
        order = lambda item: (item[1].model.source == UNDONE, rank(item[1].model))  # noqa: E731
        self._entries = dict(sorted(self._entries.items(), key=order))

    def _superseded(self, entry: Entry) -> bool:
        """Whether the training of a checkpoint has come to its model: that is newer."""
        there = [other for other in self._entries.values() if not (other.failure or other.gone)]
        done = [other.model.created for other in there if other.model.source == "export"]
        return entry.model.source == UNDONE and max(done, default=0.0) > entry.model.created

    def states(self) -> list[dict[str, Any]]:
        """Every model as the page gets it (GET /api/state)."""
        self._follow_disk()
        return [entry.state() for entry in self._entries.values()]

    def state(self, model: str) -> dict[str, Any]:
        """One of them. NoModel for an unknown one."""
        return self._entry(model).state()

    def memory(self) -> dict[str, int]:
        """Bytes that the process of each loaded model holds."""
        return {name: entry.held_bytes() for name, entry in self._entries.items() if entry.ready()}

    def default(self) -> str:
        """The first model that is not known to be broken. InputError if there is none at all."""
        self._follow_disk()
        if not self._entries:
            raise InputError("there is no model", where="models/export", fix="make one: make repro; or --model PATH")
        usable = [name for name, entry in self._entries.items() if entry.ready() or not (entry.failure or entry.gone)]
        return (usable or list(self._entries))[0]

    def answer(self, model: str, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Events of one answer (docs/serving.md); closing the iterator cancels it. NoModel for an unknown model."""
        return self.metrics.counted(model, self._answer(self._entry(model), request))

    def available(self, model: str) -> AvailableModel:
        """What is served under a name. NoModel for an unknown one."""
        return self._entry(model).model

    def _entry(self, model: str) -> Entry:
        if model not in self._entries:
            self.refresh()
        if model not in self._entries:
            names = ", ".join([*self._entries][:8]) or "nothing yet; make a model: make repro"
            fix = suggest(model, self._entries, f"served here: {names}", cutoff=0.6)
            raise NoModel(f"there is no model '{model[:200]}'", where="model", fix=fix)
        return self._entries[model]

    async def _answer(self, entry: Entry, request: Request) -> AsyncIterator[dict[str, Any]]:
        self._request_count += 1
        entry.last_used = self._request_count
        entry.busy += 1
        last_type = None
        try:
            # Asked for before the worker is looked at: another request may change it meanwhile.
            if await asyncio.to_thread(file_states, entry.model) not in (None, entry.files) and entry.ready():
                self._release(entry)
            if not entry.ready():
                yield {"type": "loading"}
                await self._ensure_loaded(entry)
            async with contextlib.aclosing(entry.worker.answer(request)) as events:
                async for event in events:
                    last_type = event["type"]
                    yield event
            if last_type not in ("end", "error"):
                raise InputError("its process ended in the middle of the answer", where=entry.model.id, fix="ask again")
        except AthanorError as error:
            if last_type not in ("end", "error"):
                yield {"type": "error", "kind": "model", "message": str(error)}
        finally:
            entry.busy -= 1
            # Not awaited here: this also runs while a request is being cancelled.
            self._in_background(self._notify_waiters())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- loading ----------------------------------------------------------------

    async def _ensure_loaded(self, entry: Entry) -> None:
        """Return when the model answers; raises the reason if it cannot."""
        if entry.task is None and entry.failure and not await self._may_retry(entry, entry.failure):
            raise InputError(entry.failure[0])
        stopping = InputError("the server is stopping", where=entry.model.id)
        if self._closed:
            raise stopping
        if entry.task is None and not entry.ready():
            entry.task = asyncio.create_task(self._load(entry))
            entry.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if entry.task is not None:
            # A request that goes away leaves the load to the others, and to the next one.
            try:
                await asyncio.shield(entry.task)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise stopping from None  # the load was cancelled, not this request
                raise
        if not entry.ready():
            raise InputError("its process ended as soon as it was loaded", where=entry.model.id, fix="ask again")

    async def _may_retry(self, entry: Entry, failure: tuple[str, float, Any]) -> bool:
        _, failed_at, files = failure
        return (
            time.monotonic() - failed_at >= self.retry_seconds
            or await asyncio.to_thread(file_states, entry.model) != files
        )

    async def _load(self, entry: Entry) -> None:
        model = entry.model
        files = await asyncio.to_thread(file_states, model)
        try:
            undone = model.source == UNDONE
            problem = await asyncio.to_thread(gone if undone else partial(problem_of, self.root), model)
            if problem:
                raise InputError(problem, where=model.id)
            await asyncio.to_thread(materialise, self.root, model)
            files = await asyncio.to_thread(file_states, model)
            if files != entry.files:
                entry.files, entry.measured = files, 0
            if entry.worker is not None:  # it died; what is left of it goes first
                await entry.worker.close()
                entry.worker = None
            rows, cache_bytes = int(self.spec.get("rows") or 1), int(self.spec.get("cache_bytes") or 0)
            needed = entry.measured or await asyncio.to_thread(estimate, model, rows, cache_bytes)
            await self._reserve_memory(entry, needed)
            spec = {**self.spec, "path": model.path, "backend": model.backend}
            spec |= {"device": "cpu"} if undone else {}  # the accelerator's memory is the training's
            worker = await self._start(spec)
            resident_bytes = int(worker.resident_bytes())
            if resident_bytes > self.memory_bytes:
                await worker.close()
                entry.measured = resident_bytes
                raise self._too_large(entry, resident_bytes, "it takes")
            entry.worker, entry.info, entry.failure = worker, worker.info, None
        except MemoryHeld:
            raise
        except AthanorError as error:
            entry.failure = (str(error), time.monotonic(), files)
            raise
        except OSError as error:
            entry.failure = (f"{model.id}: {error}", time.monotonic(), files)
            raise InputError(entry.failure[0]) from None
        finally:
            entry.task, entry.reserved = None, 0
            await self._notify_waiters()

    # -- memory -----------------------------------------------------------------

    def _held_bytes(self) -> int:
        return self._closing_bytes + sum(entry.held_bytes() for entry in self._entries.values())

    async def _reserve_memory(self, entry: Entry, needed: int) -> None:
        """Set `needed` bytes aside for a model; MemoryHeld where other models do not free them in time."""
        if needed > self.memory_bytes:
            raise self._too_large(entry, needed, "it needs about")
        deadline = time.monotonic() + self.wait_seconds
        async with self._changed:
            while self._held_bytes() + needed > self.memory_bytes:
                if await self._evict():
                    continue
                remaining = deadline - time.monotonic()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), max(remaining, 0))
                    continue
                raise MemoryHeld(
                    f"needs {size_text(needed)} and no memory came free in {self.wait_seconds:g} s: "
                    f"{self._holders_text()}",
                    where=entry.model.id,
                    fix="ask again later, or start the server with a larger --memory",
                )
            entry.reserved = needed  # no await since the sum was taken

    async def _evict(self) -> bool:
        """Close the idle model that was used longest ago; False if none is idle. The condition is held."""
        idle_entries = [
            entry for entry in self._entries.values() if entry.worker is not None and not entry.busy and not entry.task
        ]
        if not idle_entries:
            return False
        entry = min(idle_entries, key=lambda candidate: candidate.last_used)
        worker, size, entry.worker = entry.worker, entry.held_bytes(), None
        if entry.measured > self.memory_bytes:
            entry.measured = 0  # it grew while it answered; loaded anew it may well fit
        self._closing_bytes += size
        try:
            await worker.close()
        finally:
            self._closing_bytes -= size
        return True

    def _release(self, entry: Entry) -> None:
        """Let a worker go that nobody is to ask any more."""
        worker, size, entry.worker = entry.worker, entry.held_bytes(), None
        self._in_background(self._retire(worker, size))

    async def _retire(self, worker: Any, size: int) -> None:
        """Close a worker once it has ended its answers; who needs its memory waits."""
        self._closing_bytes += size
        try:
            await worker.retire()
        finally:
            self._closing_bytes -= size
        await self._notify_waiters()

    async def _notify_waiters(self) -> None:
        """After a load or an answer: close idle models while the bound is exceeded, and wake who waits for memory."""
        async with self._changed:
            if not self._closed:
                while self._held_bytes() > self.memory_bytes and await self._evict():
                    pass
            self._changed.notify_all()

    def _too_large(self, entry: Entry, size: int, verb_phrase: str) -> InputError:
        return InputError(
            f"{verb_phrase} {size_text(size)}, "
            f"more than the {size_text(self.memory_bytes)} that all models together may take",
            where=entry.model.id,
            fix="start the server with a larger --memory, or serve a smaller file of it (a GGUF)",
        )

    def _holders_text(self) -> str:
        rows = [(entry.held_bytes(), entry.model.id, entry.busy) for entry in self._entries.values()]
        holders = [f"{name} {size_text(size)}{', answering' if busy else ''}" for size, name, busy in rows if size]
        return f"{'; '.join(holders) or 'no model'}; the bound is {size_text(self.memory_bytes)}"

    async def close(self) -> None:
        """End every load and every worker."""
        self._closed = True
        tasks = [*(entry.task for entry in self._entries.values() if entry.task), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = [entry.worker for entry in self._entries.values() if entry.worker is not None]
        for entry in self._entries.values():
            entry.worker = None
        await asyncio.gather(*(worker.close() for worker in workers), return_exceptions=True)
