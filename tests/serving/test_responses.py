"""/v1/responses as a stream: each event of OpenAI's protocol in its place, also where the engine fails."""

from __future__ import annotations

import json
from types import SimpleNamespace

import psutil
import pytest

from tests.serving.fake_models import FakeModels, Running, endless, parrot  # noqa: F401
from tests.serving.parrot import PLAIN

BEGIN = ["created", "in_progress", "output_item.added", "content_part.added"]
END = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture(scope="module")
def server(parrot, endless):
    with Running(FakeModels({"parrot": parrot, "endless": endless})) as running:
        yield running


def asked(server, **body):
    events = server.ask({"stream": True, **body}, "/v1/responses")[2]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert names[: len(BEGIN)] == BEGIN and names[len(BEGIN) :][: len(deltas)] == ["output_text.delta"] * len(deltas)
    return SimpleNamespace(
        events=events, after=names[len(BEGIN) + len(deltas) :], text="".join(event["delta"] for event in deltas)
    )


@pytest.mark.parametrize(("more", "status"), [({}, "completed"), ({"max_output_tokens": 2}, "incomplete")])
def test_the_events_of_a_stream_come_in_their_order_and_agree(server, more, status):
    answer = asked(server, model="parrot", input=PLAIN[0], **more)
    assert answer.after == [*END, status]
    text, part, item, whole = answer.events[-4:]
    assert text["text"] == answer.text == (PLAIN[1] if not more else answer.text) and answer.text
    assert part["part"] == item["item"]["content"][0] and item["item"] == whole["response"]["output"][0]
    assert part["part"]["text"] == answer.text and whole["response"]["status"] == status
    assert {event["item_id"] for event in (text, part)} == {item["item"]["id"]}


def test_an_answer_that_breaks_ends_with_the_event_that_says_so(server):
    with server.connect() as client:
        body = json.dumps({"model": "endless", "input": "Go", "stream": True, "max_output_tokens": 20_000}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        read = b""
        while b"output_text.delta" not in read:
            read += client.recv(1 << 16)
        psutil.Process(server.models.all["endless"].engine.pid).kill()
        while more := client.recv(1 << 16):
            read += more
    events = [json.loads(line[6:]) for line in read.splitlines() if line.startswith(b"data: {")]
    failed = events[-1]
    assert failed["type"] == "response.failed" and failed["sequence_number"] == len(events) - 1
    response = failed["response"]
    assert (
        response["status"] == "failed" and response["error"]["code"] == "server_error" and response["error"]["message"]
    )
