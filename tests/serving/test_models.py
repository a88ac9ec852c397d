"""The registry: sharing loads, the bound on memory, failures. Workers are a small class of the real one's interface."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from athanor.base.errors import InputError
from athanor.serving.backends.base import Request
from athanor.serving.discover import AvailableModel
from athanor.serving.memory import RUNTIME_BYTES, default_memory_bytes
from athanor.serving.models import Models
from athanor.text.conversations import Message
from tests.evaluation.tiny import make_model, write_tiny_tokenizer
from tests.serving.models_tiny import write_export

MIB = 1 << 20
PATIENCE = 60.0
HELLO = Request((Message("user", "hello"),))


class Workers:
    """Starts workers of `sizes` bytes, counts them, and holds back what a test wants held."""

    def __init__(self, **sizes):
        self.sizes, self.started, self.closed, self.alive = sizes, [], [], {}
        self.may_load, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_load.set(), self.may_end.set()
        self.fails = {}
        self.cancelled = 0

    async def start(self, spec):
        name = spec["path"].rsplit("/", 1)[-1]
        self.started.append(name)
        await self.may_load.wait()
        if name in self.fails:
            raise InputError(self.fails[name], where=name)
        self.alive[name] = worker = Worker(self, name)
        return worker


class Worker:
    def __init__(self, workers, name):
        self.workers, self.name, self.alive, self.running = workers, name, True, 0
        self.info = {"context_tokens": 64, "parameters": 7, "defaults": {"temperature": 0.0}, "template": "athanor"}

    def resident_bytes(self):
        return self.workers.sizes[self.name]

    async def answer(self, request):
        self.running += 1
        try:
            yield {"type": "start", "prompt_tokens": 3, "forgotten": 0}
            waiting = asyncio.create_task(self.workers.may_end.wait())
            try:
                while not waiting.done() and self.alive:
                    await asyncio.wait([waiting], timeout=0.01)
            finally:
                waiting.cancel()
            if not self.alive:
                yield {"type": "error", "kind": "model", "message": "its process was killed"}
                return
            yield {"type": "end", "reason": "stop", "tokens": 0, "seconds": 0.0}
        except GeneratorExit:
            self.workers.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def retire(self):
        try:
            await until(lambda: self.workers.may_end.is_set() and not self.running)
        finally:
            await self.close()

    async def close(self):
        self.alive = False
        self.workers.closed.append(self.name)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    return write_export(folder / "export", make_model(tokenizer), tokenizer, folder / "tokenizer") / "hf"


@pytest.fixture
def world(export, tmp_path):
    """Makes a registry of models a, b, c, ... of given sizes (MiB)."""

    def make(bound, *, retry=3600.0, wait=PATIENCE, **sizes):
        workers = Workers(**{name: size * MIB for name, size in sizes.items()})
        found = []
        for number, name in enumerate(sizes):
            path = tmp_path / name
            path.symlink_to(export, target_is_directory=True)
            found.append(AvailableModel(name, name, str(path), "torch", "export", float(number), 1000))
        models = Models(
            found,
            memory_bytes=bound * MIB,
            root=tmp_path,
            start=workers.start,
            wait_seconds=wait,
            retry_seconds=retry,
            spec={"threads": 1},
        )
        return models, workers

    return make


async def ask(models, name):
    return [event async for event in models.answer(name, HELLO)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def states(models):
    return {one["id"]: one["state"] for one in models.states()}


def kinds(events):
    return [event["type"] for event in events]


async def test_a_model_is_loaded_when_first_asked_and_once_for_all(world):
    models, workers = world(2000, a=1, b=1)
    assert states(models) == {"a": "idle", "b": "idle"} and not workers.started
    assert models.default() == "a"
    workers.may_load.clear()
    first, second = (asyncio.create_task(ask(models, "a")) for _ in range(2))
    await until(lambda: workers.started)
    assert states(models)["a"] == "loading"
    gone = asyncio.create_task(ask(models, "a"))  # who goes away takes the load from nobody
    await asyncio.sleep(0)
    gone.cancel()
    workers.may_load.set()
    for task in (first, second):
        assert kinds(await task) == ["loading", "start", "end"]
    assert kinds(await ask(models, "a")) == ["start", "end"]
    assert workers.started == ["a"]
    state = models.states()[0]
    assert state["state"] == "ready" and state["parameters"] == 7 and state["context_tokens"] == 64
    await models.close()
    assert workers.closed == ["a"]


async def test_loading_one_model_keeps_no_other_waiting(world):
    models, workers = world(2000, a=1, b=1)
    await ask(models, "b")
    workers.may_load.clear()
    slow = asyncio.create_task(ask(models, "a"))
    await until(lambda: states(models)["a"] == "loading")
    assert kinds(await ask(models, "b")) == ["start", "end"]
    workers.may_load.set()
    await slow
    await models.close()


async def test_the_model_used_longest_ago_makes_room(world):
    base = RUNTIME_BYTES // MIB
    models, workers = world(3 * base + 100, a=base, b=base, c=base, d=base)
    for name in "abcab":
        await ask(models, name)
    await ask(models, "d")
    assert workers.closed == ["c"]
    await ask(models, "c")
    assert workers.closed == ["c", "a"]
    assert states(models) == {"a": "idle", "b": "ready", "c": "ready", "d": "ready"}
    await models.close()


async def test_a_busy_model_is_not_evicted_and_who_waits_comes_next(world):
    base = RUNTIME_BYTES // MIB
    models, workers = world(base + 100, a=base, b=base)
    workers.may_end.clear()
    busy = asyncio.create_task(ask(models, "a"))
    await until(lambda: "a" in workers.alive)
    waits = asyncio.create_task(ask(models, "b"))
    await until(lambda: states(models)["b"] == "loading")
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert workers.started == ["a"] and not workers.closed
    workers.may_end.set()
    assert kinds(await busy)[-1] == "end" and kinds(await waits) == ["loading", "start", "end"]
    assert workers.closed == ["a"]
    await models.close()


async def test_waiting_for_memory_ends_with_what_holds_it(world):
    base = RUNTIME_BYTES // MIB
    models, workers = world(base + 100, wait=0.05, a=base, b=base)
    workers.may_end.clear()
    busy = asyncio.create_task(ask(models, "a"))
    await until(lambda: "a" in workers.alive)
    error = (await ask(models, "b"))[-1]
    assert error["kind"] == "model"
    assert "a 400 MiB, answering" in error["message"] and "--memory" in error["message"]
    workers.may_end.set()
    await busy
    assert kinds(await ask(models, "b"))[-1] == "end"  # that was no failure of the model
    await models.close()


async def test_a_model_larger_than_the_bound_says_so_before_and_after_loading(world):
    base = RUNTIME_BYTES // MIB
    models, workers = world(base - 10, a=1)
    assert "all models together" in (await ask(models, "a"))[-1]["message"] and not workers.started
    models, workers = world(base + 10, b=base + 20, c=1)
    assert "it takes" in (await ask(models, "b"))[-1]["message"]
    assert workers.closed == ["b"] and states(models)["b"] == "failed" and models.default() == "c"
    await models.close()


async def test_a_model_that_outgrew_the_bound_can_be_asked_again(world):
    base = RUNTIME_BYTES // MIB
    models, workers = world(base + 20, a=base)
    await ask(models, "a")
    workers.sizes["a"] *= 2
    await ask(models, "a")
    await until(lambda: workers.closed == ["a"])
    workers.sizes["a"] //= 2  # as a fresh process has it
    assert kinds(await ask(models, "a"))[-1] == "end"
    await models.close()


async def test_a_model_that_grew_is_cut_back_after_the_answer(world):
    base = RUNTIME_BYTES // MIB
    models, workers = world(2 * base + 20, a=base, b=base)
    await ask(models, "a")
    await ask(models, "b")
    workers.sizes["b"] *= 2
    await ask(models, "b")
    await until(lambda: workers.closed == ["a"])
    assert states(models)["b"] == "ready"
    await models.close()


async def test_a_failed_load_is_remembered_until_the_files_change_or_time_passes(world, export):
    models, workers = world(2000, a=1)
    workers.fails["a"] = "it is broken"
    for _ in range(2):
        error = (await ask(models, "a"))[-1]
        assert error["kind"] == "model" and "it is broken" in error["message"]
    assert workers.started == ["a"]
    assert models.states()[0]["state"] == "failed" and "it is broken" in models.states()[0]["reason"]
    (export / "note.txt").write_text("changed")
    del workers.fails["a"]
    assert kinds(await ask(models, "a"))[-1] == "end" and models.states()[0]["reason"] is None
    models.retry_seconds = 0.0
    workers.alive["a"].alive = False
    workers.fails["a"] = "again"
    await ask(models, "a")
    await ask(models, "a")
    assert workers.started == ["a"] * 4
    await models.close()


async def test_a_model_whose_files_changed_is_loaded_anew_and_its_answers_come_to_their_end(world, export):
    base = RUNTIME_BYTES // MIB
    models, workers = world(base + 20, a=base)
    workers.may_end.clear()
    began = asyncio.create_task(ask(models, "a"))
    await until(lambda: "a" in workers.alive)
    (export / "note.txt").write_text("as rebuilt")
    following = [asyncio.create_task(ask(models, "a")) for _ in range(2)]
    await until(lambda: states(models)["a"] == "loading")
    assert workers.started == ["a"]  # there is memory for one of both
    workers.may_end.set()
    assert kinds(await began)[-1] == "end"
    assert [kinds(await one) for one in following] == [["loading", "start", "end"]] * 2
    assert workers.started == ["a", "a"] and workers.closed == ["a"]
    workers.may_end.clear()
    (export / "note.txt").write_text("as rebuilt once more")
    following = [asyncio.create_task(ask(models, "a"))]
    await until(lambda: states(models)["a"] == "loading")
    await models.close()  # waits for no answer
    await asyncio.gather(*following)
    assert workers.closed == ["a", "a"]


async def test_a_worker_that_dies_fails_its_answers_and_the_next_request_starts_another(world):
    models, workers = world(2000, a=1)
    workers.may_end.clear()
    answers = [asyncio.create_task(ask(models, "a")) for _ in range(2)]
    await until(lambda: "a" in workers.alive)
    for _ in range(5):
        await asyncio.sleep(0.005)
    workers.alive["a"].alive = False
    for answer in answers:
        events = await answer
        assert events[-1]["type"] == "error" and events[-1]["kind"] == "model"
    assert states(models)["a"] == "idle"
    workers.may_end.set()
    assert kinds(await ask(models, "a")) == ["loading", "start", "end"]
    assert workers.started == ["a", "a"]
    await models.close()


async def test_closing_the_iterator_cancels_the_answer_and_frees_the_model(world):
    models, workers = world(2000, a=1)
    workers.may_end.clear()
    async with contextlib.aclosing(models.answer("a", HELLO)) as events:
        async for event in events:
            if event["type"] == "start":
                break
    assert workers.cancelled == 1
    task = asyncio.create_task(ask(models, "a"))
    await asyncio.sleep(0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert [entry.busy for entry in models._entries.values()] == [0]
    await models.close()


async def test_an_unknown_model_is_named_with_the_nearest(world):
    models, _ = world(2000, athanor=1, other=1)
    with pytest.raises(InputError, match="did you mean 'athanor'"):
        models.answer("athnor", HELLO)
    with pytest.raises(InputError, match="served here: athanor, other"):  # nothing like it: a guess would mislead
        models.answer("gold-fig", HELLO)
    with pytest.raises(InputError, match="nothing yet; make a model: make repro"):
        Models([], memory_bytes=1).answer("athanor", HELLO)
    with pytest.raises(InputError, match="make repro"):
        Models([], memory_bytes=1).default()


async def test_a_model_known_to_be_broken_has_its_reason_and_is_no_default(world, tmp_path):
    models, workers = world(2000, a=1)
    broken = AvailableModel("broken", "", str(tmp_path / "gone"), "torch", "path", 9.0, 0, problem="it is gone")
    models = Models([broken, models._entries["a"].model], memory_bytes=1 << 40, root=tmp_path, start=workers.start)
    assert models.default() == "a" and states(models) == {"broken": "failed", "a": "idle"}
    assert (await ask(models, "broken"))[-1]["message"] == "it is gone"
    assert kinds(await ask(models, "a"))[-1] == "end"
    await models.close()


async def test_closing_ends_loads_and_answers_nothing_more(world):
    models, workers = world(2000, a=1, b=1)
    await ask(models, "a")
    workers.may_load.clear()
    task = asyncio.create_task(ask(models, "b"))
    await until(lambda: states(models)["b"] == "loading")
    await models.close()
    assert "stopping" in (await task)[-1]["message"]
    assert workers.closed == ["a"]
    assert "stopping" in (await ask(models, "a"))[-1]["message"]


def test_the_default_bound_is_less_than_the_memory_of_the_machine():
    import psutil

    assert 0 < default_memory_bytes() < psutil.virtual_memory().total
