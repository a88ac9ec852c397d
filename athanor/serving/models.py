"""The models of a server: loaded when first asked, one engine each, as many as memory holds.

Requests for a model that is being loaded share the load. A model that does not fit makes the least recently used idle
ones leave; those that answer are never interrupted, so a request may be refused until one of them has ended. A model
whose files were replaced is loaded again for the next request. The list follows the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError, InputError, suggest
from athanor.catalog.convert import gguf_of
from athanor.catalog.discover import AvailableModel, materialise, problem_of, unique
from athanor.catalog.files import template_beside, tokenizer_beside
from athanor.catalog.running import CONTINUES, UNDONE, continues
from athanor.export.gguf_reader import read_header
from athanor.export.llamacpp.engine import Engine, Job
from athanor.serving.about import SHAPE, starters
from athanor.tokenizer.tokenizer import Tokenizer

GIB = 2**30
ENGINE_BYTES = 64 << 20  # of a process with llama.cpp, before any weight: 63 MB measured
ELEMENT_BYTES = 2  # of a key or value in fp16, llama.cpp's default
LEAST_CONTEXT = 512
FEW_THREADS_BYTES = 120 << 20  # of weights: two threads of a smaller model take twice the processor time of one
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # as evaluated
UNTAUGHT = GREEDY | {"temperature": 0.8, "top_p": 0.95}  # the likeliest text of a base model goes in circles


class NoModel(InputError):
    """There is no model of that name."""

    status, code = 404, "model_not_found"


class MemoryHeld(InputError):
    """Models that are answering hold the memory; nothing is wrong with the requested model."""

    status = 503


@dataclass(frozen=True)
class Served:
    """A loaded model. `tokenizer`: None for a foreign file; `continues`: a base model, without a chat template."""

    engine: Engine
    tokenizer: Tokenizer | None
    context_tokens: int
    continues: bool
    defaults: Mapping[str, Any]


@dataclass(eq=False)
class Entry:
    """A model of the list. `users`: requests that ask it now; `bytes`: what its engine takes, as estimated."""

    model: AvailableModel
    reason: str  # why it cannot be served
    served: Served | None = None
    task: asyncio.Task[Served] | None = None
    users: int = 0
    last_used: float = 0.0
    bytes: int = 0

    def state(self) -> dict[str, Any]:
        """As the page gets it (GET /api/state)."""
        model, path = self.model, Path(self.model.path)
        state = "loading" if self.task else "ready" if self.served else "failed" if self.reason else "idle"
        return {
            **{name: getattr(model, name) for name in ("id", "label", "source", "created", *SHAPE)},
            "state": state,
            "reason": self.reason if state == "failed" else None,
            "starters": starters(path),
            "template": CONTINUES if continues(path) else None,
            "defaults": self.served and dict(self.served.defaults),
            **({"context_tokens": self.served.context_tokens} if self.served else {}),
        }


@dataclass
class Models:
    """The models that `listed` names, as they come and go. Belongs to one event loop.

    `rows`, `cache_bytes`: answers at a time of a model, and of their keys and values.
    """

    listed: Callable[[], Sequence[AvailableModel]]
    root: Path
    memory_bytes: int
    threads: int = 1
    rows: int = 8
    cache_bytes: int = 1 << 30
    accelerator: bool = False
    _entries: dict[str, Entry] = field(default_factory=dict)
    _left: set[Entry] = field(default_factory=set)  # no longer listed; each request ends those that nobody asks

    # -- the list -------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Follow the disk. A model whose files or id changed is another entry."""
        known, listed = self._entries, unique(self.listed())
        kept = {model.id: known[model.id] for model in listed if model.id in known and known[model.id].model == model}
        self._entries = {model.id: kept.get(model.id) or Entry(model, model.problem) for model in listed}
        self._left |= set(known.values()) - set(kept.values())

    def states(self) -> list[dict[str, Any]]:
        """Every model as the page gets it (GET /api/state)."""
        self.refresh()
        return [entry.state() for entry in self._entries.values()]

    def engines(self) -> dict[str, Engine]:
        """The engine of each loaded model."""
        return {name: entry.served.engine for name, entry in self._entries.items() if entry.served}

    def available(self, name: str | None = None) -> AvailableModel:
        """The model of that name; without one the first that is not known to be broken. NoModel if there is none."""
        self.refresh()
        if not (name or self._entries):
            raise NoModel("there is no model", where="models/export", fix="make one: make repro; or --model PATH")
        name = name or min(self._entries, key=lambda name: bool(self._entries[name].reason))
        if name not in self._entries:
            fix = suggest(name, self._entries, "GET /v1/models lists those there are", cutoff=0.6)
            raise NoModel(f"there is no model '{name[:200]}'", where="model", fix=fix)
        return self._entries[name].model

    # -- loading --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Served]:
        """The model, loaded; its engine stays until the block ends.

        InputError with the reason where it cannot be loaded, MemoryHeld where others hold the memory.
        """
        try:
            name = self.available(name).id  # its refresh makes new entries
        except NoModel:
            await self._sweep()
            raise
        entry = self._entries[name]
        entry.users, entry.last_used = entry.users + 1, time.monotonic()
        try:
            if entry.served and entry.users == 1 and not Path(entry.served.engine.job.path).is_file():
                await self._end(entry)  # it could not be started again
            await self._sweep()
            if entry.served is None and entry.task is None:
                entry.task = asyncio.create_task(self._load(entry))
                entry.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            # A request that goes away leaves the load to the others.
            yield entry.served or await asyncio.shield(entry.task)  # type: ignore[arg-type]
        finally:
            entry.users -= 1
            await self._sweep()

    async def _load(self, entry: Entry) -> Served:
        model, engine = entry.model, None
        try:
            if problem := await asyncio.to_thread(problem_of, self.root, model):
                raise InputError(problem, where=model.id)
            await asyncio.to_thread(materialise, self.root, model)
            path = await gguf_of(self.root, model, [Path(engine.job.path) for engine in self.engines().values()])
            header, size = await asyncio.to_thread(read_header, path), path.stat().st_size
            context, rows, cache = fit_cache(header, self.rows, self.cache_bytes)
            await self._make_room(entry, size + cache + ENGINE_BYTES)
            threads = 1 if size < FEW_THREADS_BYTES else self.threads
            accelerator = self.accelerator and model.source != UNDONE  # a training has it
            lora, template = ((model.path,), template_beside(Path(model.path))) if model.base else ((), "")
            engine = Engine(Job(str(path), context, rows, threads, False, accelerator, lora, template))
            entry.served = await self._served(model, engine, header)
            entry.reason = ""
            return entry.served
        except BaseException as error:
            entry.bytes = 0
            if engine is not None:
                await engine.close()
            if isinstance(error, (OSError, LookupError, TypeError, ValueError)):  # of an odd file
                error = InputError(f"{type(error).__name__}: {error}", where=model.id)
            if isinstance(error, AthanorError) and not isinstance(error, MemoryHeld):
                entry.reason = str(error)
            raise error from None
        finally:
            entry.task = None

    async def _served(self, model: AvailableModel, engine: Engine, header: Mapping[str, Any]) -> Served:
        shipped = (await engine.ask("/props"))["default_generation_settings"]
        # It rounds what it is asked for, and no model sees further than it was trained to.
        context = min(engine.job.context_tokens, int(shipped["n_ctx"]))
        beside = tokenizer_beside(Path(engine.job.path)) if "athanor.template_hash" in header else None
        if beside is None:
            values = {name: round(shipped["params"][name], 6) for name in GREEDY}
            return Served(engine, None, context, False, values | {"max_new_tokens": context})
        untaught = continues(Path(model.path))
        defaults = (UNTAUGHT if untaught else GREEDY) | {"max_new_tokens": max(1, context // 2)}
        return Served(engine, Tokenizer(beside.read_bytes(), str(beside)), context, untaught, defaults)

    async def _make_room(self, entry: Entry, size: int) -> None:
        name = entry.model.id
        if size > self.memory_bytes:
            what = f"it needs about {size_text(size)}, more than the {size_text(self.memory_bytes)} of all models"
            fix = "start the server with a larger --memory, or serve a smaller file of it"
            raise InputError(what, where=name, fix=fix)
        while True:
            holders = [other for other in (*self._entries.values(), *self._left) if other.bytes]
            if size + sum(other.bytes for other in holders) <= self.memory_bytes:
                entry.bytes = size
                return
            idle = [other for other in holders if not (other.task or other.users)]
            if not idle:
                what = f"needs {size_text(size)}, and models that answer hold the memory"
                raise MemoryHeld(what, where=name, fix="ask again later, or start the server with more --memory")
            await self._end(min(idle, key=lambda other: other.last_used))

    async def _sweep(self) -> None:
        for entry in [entry for entry in self._left if not entry.users]:
            self._left.discard(entry)
            await self._end(entry)

    async def _end(self, entry: Entry) -> None:
        """End the load or the engine of a model."""
        served, task, entry.served, entry.bytes = entry.served, entry.task, None, 0
        if task:
            task.cancel()
            await asyncio.wait({task})
        if served:
            await served.engine.close()

    async def close(self) -> None:
        """End every load and every engine."""
        await asyncio.gather(*(self._end(entry) for entry in (*self._entries.values(), *self._left)))


# -- memory -----------------------------------------------------------------------------------------------


def fit_cache(header: Mapping[str, Any], rows: int, cache_bytes: int) -> tuple[int, int, int]:
    """Tokens of context, answers at a time whose keys and values fit into `cache_bytes`, and the bytes of these.

    Fewer answers before a shorter context; one answer gets at least 512 tokens.
    """
    arch = header["general.architecture"]

    def number(name: str, default: int = 0) -> int:
        value = header.get(f"{arch}.{name}", default) if default else header[f"{arch}.{name}"]
        return int(max(value) if isinstance(value, list) else value)

    heads = number("attention.head_count")
    width = number("embedding_length") // max(heads, 1)
    keys, values = number("attention.key_length", width), number("attention.value_length", width)
    token = max(1, number("block_count") * number("attention.head_count_kv", heads) * (keys + values) * ELEMENT_BYTES)
    trained = number("context_length")
    rows = max(1, min(rows, cache_bytes // (token * trained)))
    context = min(trained, max(LEAST_CONTEXT, cache_bytes // (token * rows)))
    return context, rows, token * context * rows


def size_text(count: int) -> str:
    """A number of bytes as people read it."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
