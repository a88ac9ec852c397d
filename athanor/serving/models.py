"""The models of a server: loaded when first asked, one engine each, as many as memory holds.

Requests for a model that is being loaded share the load. A model that does not fit makes the least recently used idle
ones leave; those that answer are never interrupted, so a request may be refused until one of them has ended. A model
whose files were replaced is loaded again for the next request. The list follows the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, InputError, suggest
from athanor.export.gguf_reader import read_header
from athanor.llamacpp.engine import Engine, Job
from athanor.serving.about import SHAPE, file_states, shape
from athanor.serving.convert import gguf_of
from athanor.serving.discover import AvailableModel, materialise, problem_of, rank, unique
from athanor.serving.files import tokenizer_beside
from athanor.serving.memory import ENGINE_BYTES, fit_cache, size_text
from athanor.serving.running import CONTINUES, UNDONE, template_of
from athanor.serving.starters import starters
from athanor.tokenizer.tokenizer import Tokenizer

RETRY_SECONDS = 30.0
FEW_THREADS_BYTES = 120 << 20  # of weights: two threads of a smaller model take twice the processor time of one
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class NoModel(InputError):
    """There is no model of that name."""

    status, code = 404, "model_not_found"


class MemoryHeld(InputError):
    """Models that are answering hold the memory; nothing is wrong with the requested model."""

    status = 503


@dataclass(frozen=True)
class Served:
    """A loaded model. `tokenizer`: None for a foreign file; `continues`: a base model, without a chat template."""

    id: str
    engine: Engine
    tokenizer: Tokenizer | None
    context_tokens: int
    continues: bool
    rows: int
    defaults: Mapping[str, Any]


@dataclass
class Entry:
    """A model of the list. `bytes`: what its engine takes, as estimated."""

    model: AvailableModel
    served: Served | None = None
    task: asyncio.Task[Served] | None = None
    last_used: int = 0
    bytes: int = 0
    gone: bool = False  # from the disk; it stays in the list while its engine answers
    files: Any = None  # state of the files that it was loaded from
    failure: tuple[str, float, Any] | None = None  # reason, when, state of the files
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.describe(self.model)

    def describe(self, model: AvailableModel) -> None:
        path, self.model = Path(model.path), model
        self.info = shape(path) | template_of(path)
        self.failure = (model.problem, time.monotonic(), file_states(model)) if model.problem else None

    def follow(self, model: AvailableModel) -> None:
        """Take in how the model is on the disk now. It keeps its id, and its label while it is the same."""
        came_back, self.gone = self.gone, False
        if came_back or replace(model, id=self.model.id, label=self.model.label) != self.model:
            self.describe(replace(model, id=self.model.id))

    def at_work(self) -> bool:
        return bool(self.task or (self.served and self.served.engine.under_way))

    def resident_bytes(self) -> int:
        """Memory of its engine, 0 where it has none."""
        try:
            pid = self.served.engine.pid if self.served else None
            return psutil.Process(pid).memory_info().rss if pid else 0
        except psutil.NoSuchProcess:
            return 0

    def state(self) -> dict[str, Any]:
        """As the page gets it (GET /api/state)."""
        model = self.model
        state = "loading" if self.task else "ready" if self.served else "failed" if self.failure else "idle"
        return {
            **{name: getattr(model, name) for name in ("id", "label", "source", "created")},
            "state": state,
            "reason": self.failure[0] if self.failure and state == "failed" else None,
            "starters": starters(Path(model.path)),
            **{key: self.info.get(key) for key in (*SHAPE, "template")},
            "defaults": dict(self.served.defaults) if self.served else None,
        }


class Models:
    """The `available` models, and those that come and go. Belongs to one event loop.

    `running`: those that are not done. `local`: the checkout's own as they are now, None where they are as they were.
    `rows`, `cache_bytes`: answers at a time of a model, and of their keys and values.
    """

    def __init__(
        self,
        available: Sequence[AvailableModel],
        *,
        memory_bytes: int,
        root: Path = Path("."),
        threads: int = 1,
        rows: int = 8,
        cache_bytes: int = 1 << 30,
        accelerator: bool = False,
        running: Callable[[], Sequence[AvailableModel]] = tuple,
        local: Callable[[], Sequence[AvailableModel] | None] = lambda: None,
    ) -> None:
        self.memory_bytes, self.root = memory_bytes, root.resolve()
        self._threads, self._rows, self._cache_bytes, self._accelerator = threads, rows, cache_bytes, accelerator
        self._running, self._local = running, local
        self._entries: dict[str, Entry] = {}
        self._requests = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._add(available)
        self.refresh()

    # -- the list -------------------------------------------------------------------------------------------------

    def _add(self, models: Iterable[AvailableModel]) -> None:
        self._entries |= {model.id: Entry(model) for model in unique(models, self._entries)}

    def refresh(self) -> None:
        """Follow the trainings and the disk: add what is new, and drop what is gone and answers nobody."""
        self._look("export", self._local())
        self._look(UNDONE, self._running())
        order = lambda item: (item[1].model.source == UNDONE, rank(item[1].model))  # noqa: E731
        self._entries = dict(sorted(self._entries.items(), key=order))
        for name, entry in list(self._entries.items()):
            if entry.gone and not entry.at_work():
                del self._entries[name]
                self._end(entry)

    def _look(self, source: str, models: Sequence[AvailableModel] | None) -> None:
        if models is None:
            return
        present = {model.path: model for model in models}
        for entry in self._entries.values():
            if entry.model.source == source:
                if found := present.pop(entry.model.path, None):
                    entry.follow(found)
                else:
                    entry.gone = True
        self._add(present.values())

    def states(self) -> list[dict[str, Any]]:
        """Every model as the page gets it (GET /api/state)."""
        self.refresh()
        return [entry.state() for entry in self._entries.values()]

    def engines(self) -> dict[str, Engine]:
        """The engine of each loaded model."""
        return {name: entry.served.engine for name, entry in self._entries.items() if entry.served}

    def default(self) -> str:
        """The first model that is not known to be broken. InputError if there is none at all."""
        self.refresh()
        if not self._entries:
            raise InputError("there is no model", where="models/export", fix="make one: make repro; or --model PATH")
        usable = [name for name, entry in self._entries.items() if not (entry.failure or entry.gone)]
        return (usable or list(self._entries))[0]

    def available(self, name: str) -> AvailableModel:
        """The model of that name. NoModel for an unknown one."""
        return self._entry(name).model

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            self.refresh()
        if name not in self._entries:
            names = ", ".join([*self._entries][:8]) or "nothing yet; make a model: make repro"
            fix = suggest(name, self._entries, f"served here: {names}", cutoff=0.6)
            raise NoModel(f"there is no model '{name[:200]}'", where="model", fix=fix)
        return self._entries[name]

    # -- loading --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Served]:
        yield await self.served(name)

    async def served(self, name: str) -> Served:
        """The model, loaded. InputError with the reason where it cannot be, MemoryHeld where others hold the memory."""
        entry = self._entry(name)
        self._requests += 1
        entry.last_used = self._requests
        files = await asyncio.to_thread(file_states, entry.model)
        if entry.served and files not in (None, entry.files):
            self._end(entry)
        if entry.served:
            return entry.served
        if entry.task is None:
            if entry.failure and time.monotonic() - entry.failure[1] < RETRY_SECONDS and files == entry.failure[2]:
                raise InputError(entry.failure[0])
            entry.task = asyncio.create_task(self._load(entry))
            entry.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(entry.task)  # a request that goes away leaves the load to the others

    async def _load(self, entry: Entry) -> Served:
        model, files, engine = entry.model, None, None
        try:
            undone = model.source == UNDONE
            if problem := await asyncio.to_thread(problem_of, self.root, model):
                raise InputError(problem, where=model.id)
            await asyncio.to_thread(materialise, self.root, model)
            files = await asyncio.to_thread(file_states, model)
            path = await gguf_of(self.root, model)
            header = await asyncio.to_thread(read_header, path)
            context, rows, cache = fit_cache(header, self._rows, self._cache_bytes)
            entry.bytes = path.stat().st_size + cache + ENGINE_BYTES
            await self._make_room(entry)
            small = path.stat().st_size < FEW_THREADS_BYTES
            lora = (model.path,) if model.base else ()
            job = Job(
                str(path), context, rows, 1 if small else self._threads, False, self._accelerator and not undone, lora
            )
            engine = Engine(job)
            shipped = (await engine.ask("/props"))["default_generation_settings"]
            entry.served = self._served(entry, engine, header, shipped)
            entry.files, entry.failure = files, None
            return entry.served
        except BaseException as error:
            if engine is not None:
                await engine.close()
            if isinstance(error, OSError):
                error = InputError(f"{model.id}: {error}")
            if isinstance(error, AthanorError) and not isinstance(error, MemoryHeld):
                entry.failure = (str(error), time.monotonic(), files)
            raise error from None
        finally:
            entry.task = None

    def _served(self, entry: Entry, engine: Engine, header: Mapping[str, Any], shipped: Mapping[str, Any]) -> Served:
        path, model = Path(engine.job.path), Path(entry.model.path)
        beside = tokenizer_beside(path) if "athanor.template_hash" in header else None
        tokenizer = Tokenizer(beside.read_bytes(), str(beside)) if beside else None
        # It rounds what it is asked for, and no model sees further than it was trained to.
        context = min(engine.job.context_tokens, int(shipped["n_ctx"]))
        if tokenizer is None:
            names = GREEDY.keys() & shipped["params"].keys()
            defaults = {name: round(shipped["params"][name], 6) for name in names} | {"max_new_tokens": context}
        else:
            folders = (model, model.parent / "hf", model.parent)
            files = (folder / "generation_config.json" for folder in folders)
            values = next((read_json(file) for file in files if file.is_file()), {})
            sampled = {name: values.get(name, GREEDY[name]) for name in GREEDY}
            # Ours are greedy, as evaluated, and carry no sampling settings.
            defaults = sampled if values.get("do_sample") else dict(GREEDY)
            defaults["max_new_tokens"] = int(values.get("max_new_tokens", max(1, context // 2)))
        continues = template_of(model).get("template") == CONTINUES
        entry.info = {**entry.info, "context_tokens": context}
        return Served(entry.model.id, engine, tokenizer, context, continues, engine.job.rows, defaults)

    async def _make_room(self, entry: Entry) -> None:
        if entry.bytes > self.memory_bytes:
            what = (
                f"it needs about {size_text(entry.bytes)}, more than the {size_text(self.memory_bytes)} of all models"
            )
            fix = "start the server with a larger --memory, or serve a smaller file of it"
            raise InputError(what, where=entry.model.id, fix=fix)
        others = [other for other in self._entries.values() if other is not entry and (other.served or other.task)]
        idle = sorted((other for other in others if not other.at_work()), key=lambda other: other.last_used)
        while sum(other.bytes for other in others) + entry.bytes > self.memory_bytes:
            if not idle:
                holders = "; ".join(f"{other.model.id} {size_text(other.bytes)}" for other in others)
                what = f"needs {size_text(entry.bytes)}, and models that answer hold the memory: {holders}"
                raise MemoryHeld(
                    what, where=entry.model.id, fix="ask again later, or start the server with more --memory"
                )
            self._end(idle[0])
            others.remove(idle.pop(0))
        if self._ending:  # their memory is free once they have ended
            await asyncio.wait(set(self._ending))

    def _end(self, entry: Entry) -> None:
        """Let an engine go once it has ended its answers."""
        served, entry.served = entry.served, None
        if served is None:
            return

        async def ended() -> None:
            while served.engine.under_way:
                await asyncio.sleep(0.1)
            await served.engine.close()

        task = asyncio.get_running_loop().create_task(ended())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End every load and every engine."""
        loads = [entry.task for entry in self._entries.values() if entry.task]
        for task in (*loads, *self._ending):
            task.cancel()
        await asyncio.gather(*loads, *self._ending, return_exceptions=True)
        engines = [entry.served.engine for entry in self._entries.values() if entry.served]
        await asyncio.gather(*(engine.close() for engine in engines))
