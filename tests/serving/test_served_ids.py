"""What a model is sent is what it was trained on: ids of a thousand histories, by every way to the engine."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
import pytest
from athanor.serving.openai_bodies import ChatCompletion
from athanor.serving.turns import Turns

from athanor.serving.backends.base import Request, prepare, reserve
from athanor.serving.backends.torch_backend import TorchBackend
from athanor.serving.discover import discover
from athanor.serving.loading import load_export
from athanor.serving.models import Models
from athanor.serving.store import Store
from athanor.serving.terminal import Chat
from athanor.text.conversations import Message
from athanor.tokenizer.chat import render
from tests.serving.live import PATIENCE, Live, lay_out, until
from tests.serving.parrot import CONTEXT, LONG, PLAIN

HISTORIES = 1000
WORDS = (
    "What is 3 + 4?",
    " ",
    "\n",
    "\t\t",
    "  leading",
    "trailing  ",
    "<|stop|>",
    "<|user|>",
    "<|assistant|>hello",
    "<|bos|>",
    "<s>",
    "</s>",
    "[INST]",
    "\u2581",
    "é",
    "e\u0301",
    "日本語",
    "🦜",
    "👩‍👩‍👧",
    "\u200b",
    "\u202e",
    "\ufeff",
    "\x00",
    "\x7f",
    "\r\n",
    "def f(x):\n    return x",
    "`a`",
    "<b>&amp;</b>",
    "{{ bos_token }}",
    "0123456789",
    "ÄÖÜß",
    "\U0010ffff",
    "a" * 40,
)


def histories(seed: int = 7) -> list[list[Message]]:
    """Random conversations that end with a question: empty of turns up to far beyond the context."""
    draw = random.Random(seed)
    made = []
    for _ in range(HISTORIES):

        def text(longest: int) -> str:
            return "".join(draw.choices(WORDS, k=draw.randint(1, longest))).strip("\x00") or "x"

        turns = draw.choice((0, 0, 1, 2, 5, 20))
        roles = ["user", "assistant"] * turns + ["user"]
        system = [Message("system", f"{text(6)} .")] if draw.random() < 0.4 else []
        made.append(system + [Message(role, f"{text(12)}?") for role in roles])
    return made


@pytest.fixture(scope="module")
def export(parrot_dir):
    return load_export(parrot_dir)


class Recorded(TorchBackend):
    """The backend itself, which also keeps what its engine is given."""

    def _join(self, joining):
        self.given = getattr(self, "given", {}) | {a.request.id: a.prompt.ids for a in joining}
        super()._join(joining)


def test_the_ids_that_the_engine_gets_are_a_prefix_of_the_trained_ones(export):
    model, tokenizer = export
    backend = Recorded(model, tokenizer, {"max_new_tokens": 1}, rows=32, cache_bytes=1 << 30)
    ended, made = [], histories()
    for number, messages in enumerate(made):

        def emit(event, number=number):
            if event["type"] in ("end", "error"):
                ended.append((number, event))

        backend.submit(Request(messages, 1, id=number), emit)
    until(lambda: len(ended) == HISTORIES, "all answers")
    backend.close()
    failed = {number for number, event in ended if event["type"] == "error"}
    dropped = 0
    for number, messages in enumerate(made):
        system = messages[: messages[0].role == "system"]
        turns = messages[len(system) :]
        free = CONTEXT - reserve(CONTEXT, 1)
        for first in range(0, len(turns), 2):  # the most of the newest turns that leave room for the answer
            kept = [*system, *turns[first:]]
            ids, mask = render(tokenizer, [*kept, Message("assistant", "An answer.")])
            last = len(ids) - next(i for i, one in enumerate(reversed(mask)) if not one)  # where the answer begins
            if last <= free:
                break
        assert (number in failed) == (last > free)
        if number not in failed:
            assert backend.given[number] == ids[:last], messages
            dropped += first > 0
    assert dropped > 50 and len(failed) < 100


def served(messages: list[Message]) -> list[Message]:
    """As OpenAI's route reads it off a body."""
    rows = [{"role": one.role, "content": one.content} for one in messages]
    return ChatCompletion.model_validate_json(json.dumps({"messages": rows})).conversation()


def test_an_answer_that_is_begun_has_the_ids_of_training_up_to_there(parrot_dir):
    _, tokenizer = load_export(parrot_dir)
    for question, answer in (PLAIN, LONG):
        whole = [Message("system", "a"), Message("user", question), Message("assistant", answer)]
        trained, answer_ids = render(tokenizer, whole)[0], tokenizer.encode(answer)
        for count in range(len(answer_ids)):
            begun = tokenizer.decode(answer_ids[:count])
            if tokenizer.encode(begun) == answer_ids[:count]:
                history = [*whole[:-1], Message("assistant", begun)]
                ids = prepare(tokenizer, history, context_tokens=CONTEXT, max_new_tokens=5).ids
                assert ids == trained[: len(trained) - 1 - len(answer_ids) + count]


class Listening:
    """A registry that notes what the page's turns hand to it, and answers nothing."""

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []

    def refresh(self) -> None: ...

    def states(self):
        return [{"id": "parrot"}]

    def default(self):
        return "parrot"

    async def answer(self, model, request):
        self.heard.append(list(request.messages))
        yield {"type": "end", "reason": "stopped", "tokens": 0, "seconds": 0.0}


def test_the_page_the_protocol_and_the_terminal_hand_on_the_same_messages(tmp_path):
    async def page(some) -> list[list[Message]]:
        store, models = Store(tmp_path / "chat.sqlite3"), Listening()
        turns = Turns(store, models)
        for messages in some:
            system = messages[0].content if messages[0].role == "system" else ""
            chat = store.create(title="", system=system, models=["parrot"], sampling={})["id"]
            parent = None
            rest = [one.content for one in messages if one.role != "system"]
            for asked, said in zip(rest[:-1:2], rest[1::2], strict=True):
                _, answer = store.answer(chat, (parent, asked), said, model="parrot", stats={}, shown=True)
                parent = answer["id"]
            turn = await turns.start(chat, (parent, rest[-1]), names=None, sampling=None)
            async for _ in turn.events():
                pass
        await turns.close()
        return models.heard

    class Ears:
        """A backend that notes what it is asked."""

        def submit(self, request, emit):
            self.messages = list(request.messages)
            emit({"type": "end", "reason": "stop", "tokens": 0})

    some = histories()[:150]
    heard = asyncio.run(asyncio.wait_for(page(some), PATIENCE))
    for messages, from_page in zip(some, heard, strict=True):
        system = messages[0].content if messages[0].role == "system" else ""
        chat = Chat(Ears(), sampling={}, max_new_tokens=1, system=system)
        chat.turns = [one for one in messages[:-1] if one.role != "system"]
        assert list(chat.answer(messages[-1].content)) == []
        assert served(messages) == from_page == chat.backend.messages == messages


def test_the_real_worker_reads_as_many_ids_and_answers_as_the_terminal_does(export, parrot_dir, tmp_path):
    model, tokenizer = export
    folder = lay_out(tmp_path, ("parrot", parrot_dir))
    known = histories(3)[:40] + [[Message("user", PLAIN[0])]]
    with Live(folder, "--model", "parrot", "--memory", "8") as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:

            def ask(messages):
                rows = [{"role": one.role, "content": one.content} for one in messages]
                try:
                    made = client.chat.completions.create(model="parrot", messages=rows, max_tokens=12)
                except openai.BadRequestError as error:
                    return str(error)
                return made.usage.prompt_tokens, made.choices[0].message.content

            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, known))
    same, backend = 0, TorchBackend(model, tokenizer, {"max_new_tokens": 12}, rows=1, cache_bytes=0)
    for messages, answer in zip(known, answers, strict=True):
        system = messages[0].content if messages[0].role == "system" else ""
        chat = Chat(backend, sampling={}, max_new_tokens=12, system=system)
        chat.turns = [one for one in messages[:-1] if one.role != "system"]
        if isinstance(answer, str):
            assert "maximum context length is 512 tokens" in answer
            continue
        prompt = prepare(tokenizer, messages, context_tokens=CONTEXT, max_new_tokens=12)
        assert answer == (len(prompt.ids), "".join(chat.answer(messages[-1].content)))
        same += 1
    backend.close()
    assert same > 25


def test_an_export_of_another_template_is_refused_with_both_hashes(parrot_dir, tmp_path):
    facts = json.loads((parrot_dir / "athanor.json").read_text())
    for key in ("template_hash", "tokenizer_digest"):
        folder = lay_out(tmp_path / key, ("odd", parrot_dir)) / "odd" / "hf"
        (folder / "athanor.json").write_text(json.dumps(facts | {key: "feedface"}))
        (found,) = discover(tmp_path / key, [str(folder)])
        assert "feedface" in found.problem and facts[key] in found.problem
        with pytest.raises(Exception, match="feedface") as caught:
            load_export(folder)
        assert facts[key] in str(caught.value)


async def test_a_turn_that_failed_leaves_the_pages_history_as_it_was(parrot_dir, tmp_path):
    store = Store(tmp_path / "chat.sqlite3")
    spec = {"device": "cpu", "threads": 1, "rows": 2, "cache_bytes": 1 << 30}
    models = Models(discover(tmp_path, [str(parrot_dir)]), memory_bytes=8 << 30, root=tmp_path, spec=spec)
    turns = Turns(store, models)
    chat = store.create(title="", system="", models=[], sampling={})["id"]
    first = await turns.start(chat, (None, PLAIN[0]), names=None, sampling=None)
    events = [event async for event in first.events()]
    await first.wait()
    before = store.chat(chat)
    assert [one["content"] for one in before["messages"]] == list(PLAIN)
    leaf = events[-1]["leaf"]
    second = await turns.start(chat, (leaf, LONG[0]), names=None, sampling=None)
    told = []
    async for event in second.events():
        if event["type"] == "text" and len(told) < 5:
            (entry,) = models._entries.values()
            with suppress(ProcessLookupError):
                entry.worker.process.kill()
        told.append(event)
    assert told[-2]["type"] == "error" and told[-1] == {"type": "done", "user": None, "leaf": leaf}
    await second.wait()
    after = store.chat(chat)
    assert after["messages"] == before["messages"] and after["leaf"] == leaf
    again = await turns.start(chat, (leaf, PLAIN[0]), names=None, sampling=None)  # and it can be asked again
    assert [event async for event in again.events()][-2]["message"]["content"] == PLAIN[1]
    await turns.close()
    await models.close()
