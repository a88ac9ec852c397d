"""The page's routes, over a real server and a real file; the models are scripts that speak the registry's protocol."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from athanor.base.errors import InputError
from athanor.serving.page_api import CONTENT_CHARS, _fenced, file_name, page_router
from athanor.serving.requests import MAX_BODY_BYTES, Limit
from athanor.serving.store import Store
from athanor.text.conversations import Message, check_messages

PATIENCE = 60.0  # seconds for what takes milliseconds on a quiet machine


class Scripted:
    """Answers as `Models` gives them, by the name of the model; `asked` holds what each answer was asked."""

    names = (
        "echo",
        "endless",
        "silent",
        "fails",
        "fails-late",
        "raises",
        "refuses",
        "breaks-off",
        "empty",
        "gated",
        "flood",
        "pair-a",
        "pair-b",
    )

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.closed: list[str] = []
        self.finished = threading.Event()  # of "flood"
        self.loop: asyncio.AbstractEventLoop | None = None
        self.gate: asyncio.Event | None = None
        self.pair: asyncio.Barrier | None = None

    def refresh(self) -> None: ...

    def states(self) -> list[dict]:
        backends = {"flood": "transformers"}
        return [{"id": name, "backend": backends.get(name, "torch")} for name in self.names]

    def default(self) -> str:
        return "echo"

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    async def answer(self, model, request) -> AsyncIterator[dict]:
        messages = request.messages
        self.loop = asyncio.get_running_loop()
        self.gate, self.pair = self.gate or asyncio.Event(), self.pair or asyncio.Barrier(2)
        self.asked.append(
            {
                "model": model,
                "messages": messages,
                "limit": request.max_new_tokens,
                "sampling": request.sampling,
                "steering": request.steering,
            }
        )
        assert all(isinstance(message, Message) for message in messages)
        begun = messages[-1].role == "assistant"
        check_messages(messages if begun else [*messages, Message("assistant", "x")], "what a model is sent")
        try:
            async for event in self._script(model, messages):
                yield event
        finally:
            self.closed.append(model)

    async def _script(self, model: str, messages: list[Message]) -> AsyncIterator[dict]:
        if model == "refuses":
            raise InputError("the prompt does not fit")
        if model == "fails":
            yield {"type": "error", "kind": "model", "message": "out of memory"}
            return
        if model == "echo":
            yield {"type": "loading"}
        yield {"type": "start", "prompt_tokens": 9, "forgotten": 1}
        pieces = {"echo": [f"You said: {messages[-1].content}", "\n\u2028ende"], "flood": ["x" * 1000] * 5000}
        said = 0
        for said, piece in enumerate(pieces.get(model, []), 1):
            row = {"token": piece, "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -0.1}]}
            likely = {"logprobs": [row]} if self.asked[-1]["steering"] else {}
            yield {"type": "text", "text": piece, "tokens": said} | likely
        if model in ("silent", "gated"):
            await (self.gate if model == "gated" else asyncio.Event()).wait()
        if model == "raises":
            raise RuntimeError("a bug")
        while model == "endless":
            said += 1
            yield {"type": "text", "text": f"{said} ", "tokens": said}
            await asyncio.sleep(0.001)
        if model in ("fails-late", "breaks-off", "gated", "pair-a", "pair-b"):
            for said in (1, 2, 3):
                if model.startswith("pair"):
                    await self.pair.wait()  # neither gets anywhere without the other
                yield {"type": "text", "text": f"{model}{said} ", "tokens": said}
        if model == "flood":
            self.finished.set()
        if model == "fails-late":
            yield {"type": "error", "kind": "model", "message": "the worker died"}
        elif model != "breaks-off":
            yield {"type": "end", "reason": "stop", "tokens": said, "seconds": 0.25}


class World:
    """A server in a thread, its file, its models, and a client."""

    def __init__(self, folder, **options) -> None:
        self.store, self.models = Store(folder / "chat.sqlite3"), Scripted()
        app = FastAPI()
        app.include_router(page_router(self.store, self.models, Limit(256), version="1.2"))
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, **options)
        self.server = uvicorn.Server(config)
        # With its protocol named: of others asyncio does not switch off the delay that gathers small packets.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]})
        self.thread.start()
        until(lambda: self.server.started)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.client = httpx2.Client(base_url=address, timeout=PATIENCE)

    def shut_down(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def close(self) -> None:
        self.shut_down()
        self.client.close()
        self.store.close()

    def new(self, **body) -> str:
        return self.client.post("/api/chats", json=body).json()["id"]

    def chat(self, chat: str) -> dict:
        return self.client.get(f"/api/chats/{chat}").json()

    @contextmanager
    def stream(self, chat: str, **body):
        with self.client.stream("POST", f"/api/chats/{chat}/answers", json=body) as response:
            assert response.status_code == 200, response.read()
            yield (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line)

    def ask(self, chat: str, **body) -> list[dict]:
        with self.stream(chat, **body) as events:
            return list(events)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    opened = World(tmp_path_factory.mktemp("page"))
    yield opened
    opened.close()


def text_of(events: list[dict], slot: int = 0) -> str:
    return "".join(event["text"] for event in events if event["type"] == "text" and event["slot"] == slot)


def test_a_turn_streams_its_events_and_is_stored_with_its_last_one(world):
    chat = world.new(system="Be brief.", sampling={"temperature": 0.5, "max_new_tokens": 7})
    with world.client.stream("POST", f"/api/chats/{chat}/answers", json={"content": "Hi"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        blocks = response.read().decode().split("\n\n")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks if block]
    assert [event["type"] for event in events] == ["loading", "start", "text", "text", "end", "done"]
    assert all(event["slot"] == 0 for event in events[:-1])
    stored = world.chat(chat)
    question, answer = stored["messages"]
    assert events[-2]["message"] == answer and events[-1] == {"type": "done", "user": question, "leaf": answer["id"]}
    assert answer["content"] == text_of(events) == "You said: Hi\n\u2028ende"
    assert answer["stats"] == {"tokens": 2, "seconds": 0.25, "reason": "stop", "prompt_tokens": 9, "forgotten": 1}
    assert (question["parent"], answer["parent"], answer["model"]) == (None, question["id"], "echo")
    assert stored["leaf"] == answer["id"] and stored["title"] == "Hi"
    asked = world.models.asked[-1]
    assert asked["messages"] == [Message("system", "Be brief."), Message("user", "Hi")]
    assert (asked["limit"], asked["sampling"]) == (7, {"temperature": 0.5})
    # The next turn goes on from there, with settings of its own.
    world.ask(chat, content="And?", parent=answer["id"], sampling={"top_k": 3})
    asked = world.models.asked[-1]
    assert [message.role for message in asked["messages"]] == ["system", "user", "assistant", "user"]
    assert (asked["limit"], asked["sampling"]) == (None, {"top_k": 3})
    # Another answer to the first question forgets what came after it.
    again = world.ask(chat, user=question["id"])
    assert again[-1]["user"] == question and again[-2]["message"]["parent"] == question["id"]
    assert world.models.asked[-1]["messages"] == [Message("system", "Be brief."), Message("user", "Hi")]
    assert world.chat(chat)["leaf"] == again[-1]["leaf"] == again[-2]["message"]["id"]


def test_an_answer_is_gone_on_with_in_its_place(world):
    chat = world.new()
    answer = world.ask(chat, content="Hi", models=["echo"])[-2]["message"]
    world.client.put(f"/api/messages/{answer['id']}/feedback", json={"verdict": "up"})
    go_on = {"user": answer["parent"], "begun": answer["id"], "models": ["echo"]}
    events = world.ask(chat, **go_on, sampling={"top_logprobs": 1})
    more = events[-2]["message"]
    assert world.models.asked[-1]["messages"][-1] == Message("assistant", answer["content"])
    assert more["content"] == answer["content"] + text_of(events) and more["feedback"]["verdict"] == "up"
    assert (more["id"], more["stats"]["tokens"], more["stats"]["seconds"]) == (answer["id"], 4, 0.5)
    assert more["stats"]["likely"][0] == [answer["content"], None, []]  # of the beginning nothing is known
    assert more["stats"]["likely"][2] == ["\n\u2028ende", 0.6065, [["x", 0.9048]]]
    assert world.chat(chat)["messages"][1] == more and world.chat(chat)["leaf"] == answer["id"]
    for wrong in ({"begun": answer["parent"]}, {"begun": 10**9}, {"models": ["echo", "empty"]}, {"models": None}):
        assert world.client.post(f"/api/chats/{chat}/answers", json=go_on | wrong).status_code == 422, wrong


def test_a_model_that_tells_no_probabilities_answers_all_the_same(world):
    chat = world.new(sampling={"top_logprobs": 5})
    for model, steering in (("empty", {"top_logprobs": 5}), ("flood", {})):
        world.ask(chat, content="Hi", models=[model])
        assert world.models.asked[-1]["steering"] == steering and world.models.asked[-1]["sampling"] == {}


def test_two_models_answer_at_the_same_time(world):
    chat = world.new()
    events = world.ask(chat, content="Hi", models=["pair-a", "pair-b"])
    ends = {event["slot"]: event["message"] for event in events if event["type"] == "end"}
    assert text_of(events, 0) == "pair-a1 pair-a2 pair-a3 " and text_of(events, 1) == "pair-b1 pair-b2 pair-b3 "
    assert [message["model"] for _, message in sorted(ends.items())] == ["pair-a", "pair-b"]
    assert ends[0]["parent"] == ends[1]["parent"] == events[-1]["user"]["id"]
    assert len(world.chat(chat)["messages"]) == 3


def test_of_two_answers_the_first_slot_is_shown_even_when_it_ends_last(world):
    chat = world.new()
    with world.stream(chat, content="Hi", models=["gated", "echo"]) as events:
        early = next(event for event in events if event["type"] == "end")
        assert early["slot"] == 1 and world.chat(chat)["leaf"] == early["message"]["id"]
        world.models.open_gate()
        rest = list(events)
    assert rest[-2]["slot"] == 0 and rest[-1]["leaf"] == rest[-2]["message"]["id"] == world.chat(chat)["leaf"]


@pytest.mark.parametrize(
    ("model", "kind"),
    [("fails", "model"), ("fails-late", "model"), ("raises", "model"), ("breaks-off", "model"), ("refuses", "request")],
)
def test_an_answer_that_fails_is_not_stored_and_hurts_no_other(world, model, kind):
    chat = world.new()
    events = world.ask(chat, content="Hi", models=[model])
    assert events[-2]["type"] == "error" and events[-2]["kind"] == kind and events[-2]["message"]
    assert events[-1] == {"type": "done", "user": None, "leaf": None} and world.chat(chat)["messages"] == []
    events = world.ask(chat, content="Hi", models=[model, "echo"])
    assert {event["type"] for event in events if event.get("slot") == 0} <= {"start", "text", "error"}
    (question, answer) = world.chat(chat)["messages"]
    assert answer["model"] == "echo" and events[-1] == {"type": "done", "user": question, "leaf": answer["id"]}


def test_an_answer_without_a_word_is_an_answer(world):
    chat = world.new()
    assert world.ask(chat, content="Hi", models=["empty"])[-2]["message"]["content"] == ""
    assert len(world.chat(chat)["messages"]) == 2


def test_a_stopped_answer_keeps_what_was_said(world):
    chat = world.new()
    with world.stream(chat, content="Hi", models=["endless"]) as events:
        said = [next(events) for _ in range(4)]
        assert world.client.post(f"/api/chats/{chat}/stop", json={}).status_code == 204
        said += events
    end, done = said[-2:]
    assert end["reason"] == "stopped" and end["message"]["content"] == text_of(said)
    assert end["tokens"] == len(text_of(said).split()) and end["seconds"] > 0
    assert done["leaf"] == end["message"]["id"] and world.models.closed[-1] == "endless"
    assert world.client.post(f"/api/chats/{chat}/stop", json={}).status_code == 204  # nothing left to stop


def test_what_is_stopped_before_its_first_word_leaves_nothing(world):
    chat = world.new()
    with world.stream(chat, content="Hi", models=["silent"]) as events:
        assert next(events)["type"] == "start"
        world.client.post(f"/api/chats/{chat}/stop", json={})
        end, done = events
    assert (end["reason"], end["message"], done["user"], done["leaf"]) == ("stopped", None, None, None)
    assert world.chat(chat)["messages"] == [] and world.models.closed[-1] == "silent"


def test_a_client_that_leaves_stops_the_answer_and_what_was_said_is_stored(world):
    chat = world.new()
    with world.stream(chat, content="Hi", models=["endless", "silent"]) as events:
        said = [next(events) for _ in range(6)]
    until(lambda: world.chat(chat)["messages"])
    _, answer = world.chat(chat)["messages"]
    assert answer["stats"]["reason"] == "stopped" and answer["content"].startswith(text_of(said))
    until(lambda: {"endless", "silent"} <= set(world.models.closed[-2:]))
    assert world.ask(chat, content="Go on", parent=answer["id"])[-1]["user"]  # the chat is free again


def test_a_chat_has_one_turn_at_a_time_and_others_go_on(world):
    chat, other = world.new(), world.new()
    with world.stream(chat, content="Hi", models=["endless"]) as events:
        next(events)
        refused = world.client.post(f"/api/chats/{chat}/answers", json={"content": "And?"})
        assert refused.status_code == 409 and refused.json()["error"]["type"] == "invalid_request_error"
        assert world.ask(other, content="Hi")[-1]["user"]
        world.client.post(f"/api/chats/{chat}/stop", json={})
        assert world.ask(chat, content="And?")[-1]["user"]  # at once after a stop
        list(events)


def test_a_slow_reader_does_not_hold_back_the_model(world):
    world.models.finished.clear()
    chat = world.new()
    with world.stream(chat, content="Hi", models=["flood"]) as events:
        assert world.models.finished.wait(PATIENCE)  # 5 MB, of which nothing has been read
        until(lambda: world.chat(chat)["messages"])
        assert len(text_of(list(events))) == 5_000_000


def test_a_chat_deleted_while_it_is_answered_is_gone(world):
    chat = world.new()
    with world.stream(chat, content="Hi", models=["endless"]) as events:
        next(events)
        assert world.client.delete(f"/api/chats/{chat}").status_code == 204
        assert list(events)[-1]["type"] == "done"
    assert world.client.get(f"/api/chats/{chat}").status_code == 404
    assert world.client.delete(f"/api/chats/{chat}").status_code == 404


def test_a_server_that_is_shut_down_stores_what_was_said(tmp_path):
    world = World(tmp_path)
    chat = world.new()
    with world.stream(chat, content="Hi", models=["endless"]) as events:
        for _ in range(3):
            next(events)
        world.shut_down()
    messages = world.store.chat(chat)["messages"]
    assert len(messages) == 2 and messages[1]["stats"]["reason"] == "stopped"
    world.close()


def test_a_full_disk_is_a_503_and_an_answer_that_cannot_be_stored_says_so(tmp_path):
    world = World(tmp_path)
    chat = world.new()
    database = world.store._file._db
    database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
    full = world.client.post("/api/chats", json={"system": "x" * 100_000})
    assert full.status_code == 503 and "full" in full.json()["error"]["message"]
    events = world.ask(chat, content="x" * 100_000)
    assert events[-2]["type"] == "error" and "full" in events[-2]["message"] and events[-1]["user"] is None
    assert world.chat(chat)["messages"] == []
    world.close()


def test_the_state_names_the_models_and_a_chat_begins_with_the_default_one(world):
    state = world.client.get("/api/state").json()
    assert (state["version"], state["default_model"], state["models"]) == ("1.2", "echo", world.models.states())
    made = world.client.post("/api/chats", json={})
    assert made.status_code == 201 and made.json()["models"] == ["echo"] and made.json()["leaf"] is None


def test_chats_are_changed_listed_and_searched(world):
    chat = world.new(title="Birds")
    events = world.ask(chat, content="What do ZYGODACTYL feet look like?")
    changed = world.client.patch(
        f"/api/chats/{chat}",
        json={"title": "Toes", "system": "Be kind.", "models": ["echo", "endless"], "sampling": {"top_p": 0.5}},
    ).json()
    assert (changed["title"], changed["system"], changed["models"]) == ("Toes", "Be kind.", ["echo", "endless"])
    assert changed["sampling"] == {"top_p": 0.5} and changed["leaf"] == events[-1]["leaf"]
    (found,) = world.client.get("/api/chats", params={"q": "feet zygodactyl"}).json()["chats"]
    assert found["id"] == chat and "ZYGODACTYL" in found["snippet"] and found["messages"] == 2
    assert world.client.get("/api/chats").json()["chats"][0]["id"] == chat
    again = world.client.patch(f"/api/chats/{chat}", json={"leaf": events[-1]["user"]["id"]}).json()
    assert again["leaf"] == events[-1]["leaf"]


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("post", "/answers", {}, "content"),
        ("post", "/answers", {"content": "x", "user": 1}, "content"),
        ("post", "/answers", {"content": " \n"}, "empty"),
        ("post", "/answers", {"user": 1, "parent": 2}, "parent"),
        ("post", "/answers", {"content": "x" * (CONTENT_CHARS + 1)}, "content"),
        ("post", "/answers", {"content": "x", "models": ["ecko"]}, "did you mean 'echo'"),
        ("post", "/answers", {"content": "x", "models": []}, "models"),
        ("post", "/answers", {"content": "x", "models": ["echo"] * 3}, "models"),
        ("post", "/answers", {"content": "x", "parent": 10**9}, "not in this chat"),
        ("post", "/answers", {"user": 10**9}, "not in this chat"),
        ("post", "/answers", {"content": "x", "sampling": {"top_p": 0}}, "sampling.top_p"),
        ("post", "/answers", {"content": "x", "sampling": {"heat": 1}}, "sampling.heat"),
        ("patch", "", {"title": "x" * 201}, "title"),
        ("patch", "", {"title": None}, "title"),
        ("patch", "", {"name": "x"}, "name"),
        ("patch", "", {"leaf": 10**9}, "not in this chat"),
        ("patch", "", {"leaf": "1"}, "leaf"),
        ("get", "/export?format=pdf", None, "markdown, json, messages"),
        ("get", "/export?format=messages", None, "no messages"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(world, method, path, body, words):
    chat = world.new()
    answer = world.client.request(method, f"/api/chats/{chat}{path}", json=body)
    assert answer.status_code == 422 and words in answer.json()["error"]["message"]
    assert world.chat(chat)["messages"] == []


def test_wrong_ids_are_404_and_wrong_kinds_of_body_are_refused(world):
    chat, plain = world.new(), {"content-type": "text/plain"}
    for path in ("/api/chats/nothing", "/api/chats/nothing/export"):
        assert world.client.get(path).status_code == 404
    for path in ("/api/chats/nothing/answers", "/api/chats/nothing/stop"):
        body = {"content": "x"} if path.endswith("answers") else {}
        assert world.client.post(path, json=body).status_code == 404
    for number in ("99999999", "0", "-1", "x", "9" * 30, "²"):
        assert world.client.put(f"/api/messages/{number}/feedback", json={"verdict": "up"}).status_code == 404
        assert world.client.patch(f"/api/corrections/{number}", json={"status": "accepted"}).status_code == 404
    assert world.client.post(f"/api/chats/{chat}/stop", content="{}", headers=plain).status_code == 415
    assert world.client.post("/api/chats", content="{}").status_code == 415
    huge = b'{"title": "' + b"x" * MAX_BODY_BYTES + b'"}'
    kind = {"content-type": "application/json"}
    assert world.client.post("/api/chats", content=huge, headers=kind).status_code == 413


def test_a_correction_goes_the_way_from_thumb_down_to_accepted(world):
    chat = world.new(system="Be brief.")
    events = world.ask(chat, content="Hi")
    answer, question = events[-2]["message"]["id"], events[-1]["user"]["id"]
    put = lambda number, **body: world.client.put(f"/api/messages/{number}/feedback", json=body)  # noqa: E731
    said = put(answer, verdict="down", correction="Hello!").json()
    assert said["feedback"] == {"verdict": "down", "correction": "Hello!", "status": "candidate"}
    (found,) = [row for row in world.client.get("/api/corrections").json()["corrections"] if row["id"] == answer]
    assert found["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (found["chat"], found["chat_title"], found["correction"]) == (chat, "Hi", "Hello!")
    settled = world.client.patch(f"/api/corrections/{answer}", json={"status": "accepted"}).json()
    assert settled == {**found, "status": "accepted"}
    assert world.client.patch(f"/api/corrections/{answer}", json={"status": "good"}).status_code == 422
    assert put(question, verdict="up").status_code == 422
    assert put(answer, verdict="up", correction="x").status_code == 422
    assert put(answer, verdict=None).json()["feedback"] is None
    assert world.client.patch(f"/api/corrections/{answer}", json={"status": "accepted"}).status_code == 404


def test_a_chat_is_exported_as_it_is_shown(world):
    chat = world.new(system="Be brief.", title='../Å "b"\r\nX: y/ über 日本.exe')
    first = world.ask(chat, content="Hi")
    world.ask(chat, user=first[-1]["user"]["id"], models=["empty"])
    world.client.patch(f"/api/chats/{chat}", json={"leaf": first[-1]["leaf"]})
    files = {
        form: world.client.get(f"/api/chats/{chat}/export", params={"format": form})
        for form in ("markdown", "json", "messages")
    }
    assert "## Question\n\nHi\n\n## Answer (echo)\n\nYou said: Hi" in files["markdown"].text
    assert json.loads(files["json"].text) == world.chat(chat)
    (line,) = files["messages"].text.split("\n")[:-1]
    messages = [Message(**row) for row in json.loads(line)["messages"]]
    assert [message.role for message in messages] == ["system", "user", "assistant"]
    check_messages(messages, "export")
    world.client.put(f"/api/messages/{first[-1]['leaf']}/feedback", json={"verdict": "down", "correction": "Hello!"})
    texts = [world.client.get(f"/api/chats/{chat}/export", params={"format": form}).text for form in files]
    assert texts[0].endswith("\n\n### It should have said\n\nHello!\n") and "You said" not in texts[2]
    assert json.loads(texts[2])["messages"][-1]["content"] == "Hello!"
    disposition = files["messages"].headers["content-disposition"]
    plain, _, encoded = disposition.partition("; filename*=UTF-8''")
    assert plain == 'attachment; filename="chat-A-b-X-y-uber-exe.jsonl"' and encoded.startswith("chat-%C3%85-b-")
    assert disposition.isascii() and "/" not in disposition


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            "def f(x):\n    y = x\n\n    return y\n\nThat is it.",
            "```\ndef f(x):\n    y = x\n\n    return y\n```\n\nThat is it.",
        ),
        ("So:\n  a = 1", "```\nSo:\n  a = 1\n```"),
        ("- one\n  more\n\nplain\ntext", "- one\n  more\n\nplain\ntext"),
        ("```\ndef f():\n  pass\n```", "```\ndef f():\n  pass\n```"),
    ],
)
def test_code_without_a_fence_is_exported_with_one(text, written):
    assert _fenced(text) == written


@pytest.mark.parametrize("title", ["", "../..", "CON", ".bashrc", "a\0b", "x" * 300, "?*:<>|", "日本" * 50])
def test_a_file_name_is_safe_whatever_the_title(title):
    name = file_name(title)
    assert name.startswith("chat") and 4 <= len(name) <= 60 and not set(name) & set("/\\:*?\"<>|\0\r\n.;' ")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "\0", "echo", "up", "accepted"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["title", "system", "models", "sampling", "leaf", "content", "parent", "user", "verdict", "correction", "status"]
GOOD = st.sampled_from([1, 2, "up", "down", "echo", ["echo"], {}, {"temperature": 0}, "accepted", None])
BODIES = st.dictionaries(st.sampled_from(KEYS), GOOD | JUNK, max_size=4) | JUNK
ROUTES = [
    ("POST", "/api/chats"),
    ("PATCH", "/api/chats/{}"),
    ("POST", "/api/chats/{}/answers"),
    ("POST", "/api/chats/{}/stop"),
    ("PUT", "/api/messages/{}/feedback"),
    ("PATCH", "/api/corrections/{}"),
    ("GET", "/api/chats/{}"),
    ("DELETE", "/api/chats/{}"),
    ("GET", "/api/chats/{}/export?format={}"),
    ("GET", "/api/chats?q={}"),
]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(ROUTES),
    body=BODIES,
    place=st.sampled_from(["1", "2", "%00", "%ff", "..%2f", "9" * 40, "chat"]),
    cut=st.integers(0, 40),
    loose=st.booleans(),
)
def test_no_request_whatever_is_a_fault_of_the_server(world, route, body, place, cut, loose):
    method, path = route
    if place == "chat" and method != "DELETE":
        place = getattr(world, "fuzzed", None) or world.new()
        world.fuzzed = place
    data = json.dumps(body).encode()  # with NaN, Infinity and lone surrogates, as a careless client sends them
    if loose:
        data = data[:cut] + b"\xff" + data[cut:]
    with world.client.stream(
        method,
        path.format(place, place),
        content=None if method in ("GET", "DELETE") else data,
        headers={"content-type": "application/json"},
    ) as answer:
        text = answer.read().decode()
    assert answer.status_code < 500, (answer.status_code, text)
    if answer.status_code >= 400 and answer.headers["content-type"] == "application/json" and "detail" not in text:
        assert {"message", "type"} <= set(json.loads(text)["error"])
