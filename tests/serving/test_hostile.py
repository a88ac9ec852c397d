"""Hostile clients: any request is answered or refused in one form, and a good client is answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from urllib.parse import quote

import pytest
import uvicorn
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from athanor.catalog.discover import described
from athanor.serving import app as application
from athanor.serving import fields
from athanor.serving.app import MOST_CONNECTIONS, OTHER_CONNECTIONS, Connection, Server, build_app
from athanor.serving.models import Models
from athanor.serving.requests import EventStream
from tests.serving.live import CHAT, PATIENCE, Live, said
from tests.serving.parrot import PLAIN

QUESTION = [{"role": "user", "content": PLAIN[0]}]
COMPLETIONS, JSON = "/v1/completions", {"Content-Type": "application/json"}
LONG = {"model": "tiny", "messages": QUESTION, "max_tokens": 28_000, "stream": True}


@pytest.fixture(scope="module")
def server(parrot_dir, endless, tmp_path_factory):
    words = (f"--model={parrot_dir}", f"--model={endless}", "--max-requests=8")
    with Live(tmp_path_factory.mktemp("hostile"), *words) as server:
        yield server


def answered(server) -> bool:
    return said(server.ask({"model": "parrot", "messages": QUESTION})[2]) == PLAIN[1]


# -- the server under them -----------------------------------------------------------------------------------------


# Of one address the newest are cut; of several the oldest, so that a newcomer is answered.
@pytest.mark.parametrize(
    ("addresses", "count", "gone"),
    [(1, MOST_CONNECTIONS + 5, slice(MOST_CONNECTIONS, None)), (9, OTHER_CONNECTIONS + 20, slice(10))],
)
def test_connections_beyond_the_limits_are_cut(server, addresses, count, gone):
    with contextlib.ExitStack() as stack:
        sources = (f"127.0.1.{number % addresses + 1}" for number in range(count))
        many = [stack.enter_context(server.connect(source)) for source in sources]
        assert answered(server)
        for client in many[gone]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


def test_an_address_has_no_more_than_a_share_of_the_answers(server):
    with contextlib.ExitStack() as stack:
        for status in (200, 200, 429):
            client = stack.enter_context(server.connect("127.0.0.3"))
            client.sendall(server.raw(LONG))
            assert b" %d " % status in client.recv(4096).splitlines()[0]
        assert answered(server)
        assert server.ask({"prompt": ["a"] * 9, "max_tokens": 1}, COMPLETIONS)[0] == 429


def test_a_reader_that_takes_nothing_loses_its_connection(monkeypatch):
    monkeypatch.setattr(application, "SEND_SECONDS", 1.0)

    async def lines():
        while True:
            await asyncio.sleep(0)
            yield "a" * (1 << 20)

    async def end():
        server.should_exit = True

    server = Server(uvicorn.Config(EventStream(lines(), end, {}), http=Connection, lifespan="off"))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stalled,
    ):
        stalled.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        asyncio.run(asyncio.wait_for(server.serve([listener]), PATIENCE))


def test_clients_that_stall_or_leave_hold_nobody_up(server):
    whole = server.raw(LONG)
    with contextlib.ExitStack() as stack:
        for part in (b"", whole[:20], whole[: whole.index(b"\r\n\r\n") + 4], whole[:-5]):
            for _ in range(10):
                stack.enter_context(server.connect()).sendall(part)
        assert answered(server)
    for stream in (True, False):
        with server.connect("127.0.0.4") as client:
            client.sendall(server.raw({**LONG, "stream": stream}))
            if stream:
                assert client.recv(4096)
    while 'requests_processing{model="tiny"} 0\n' not in server.ask(None, "/metrics")[2]:
        assert answered(server)


# -- any request ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app(parrot_dir, tmp_path_factory):
    """The application in this process, for many requests a second."""
    models = Models(lambda: [described(parrot_dir, "path", "here")], tmp_path_factory.mktemp("app"), 1 << 33)
    app = build_app(models, lambda limit: [])
    with TestClient(app, "http://localhost", raise_server_exceptions=False, follow_redirects=False) as client:

        def ask(method, path, content, headers):
            request = client.build_request(method, "/", content=content, headers=headers)
            request.url = request.url.copy_with(raw_path=quote(path, safe="/%?&=.").encode())
            return client.send(request)

        yield ask


def good_form(answer) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text)
    assert "content-security-policy" in answer.headers and "access-control-allow-origin" not in answer.headers
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"]
        assert 0 < len(error["message"]) < 2000 and "\n" not in error["message"]


NUMBERS = st.integers() | st.integers(-(10**400), 10**400) | st.floats(allow_subnormal=False)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), ANY) | ANY
FIELDS = [*fields.CHECKS, *fields.UNSUPPORTED, *fields.ALIASES, *fields.CHAT.own, *fields.RESPONSE.own]
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
GOOD = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "a"}, "/v1/responses": {"input": "a"}}


@QUICK
@given(
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=10), ANY, max_size=5)
    | st.lists(MESSAGE, max_size=4).map(lambda rows: {"messages": rows, "input": rows}),
    st.sampled_from(sorted(GOOD)),
)
def test_any_fields_are_answered_or_refused_in_the_one_form(app, options, path):
    body = {**GOOD[path], "max_tokens": 2, **options}
    good_form(app("POST", path, json.dumps(body).encode(), JSON))


METHODS = "GET POST PUT PATCH DELETE HEAD OPTIONS TRACE BREW".split()
PATHS = """
    / // /health /metrics /docs /api/%00 /page/ /page/api.js /page/../app.py /page/%2e%2e/app.py /page/%00
    /v1/ /v1/models /v1/models/parrot /v1/models/%ff
""".split()
PATHS += [*GOOD, "/page/" + "a" * 5000]
HEADER_NAMES = "content-type accept authorization range if-none-match cookie origin transfer-encoding expect x-any"
VALUE = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30) | st.just("application/json")


@QUICK
@example("GET", "/", b"", {"range": "application/json"})
@given(
    st.sampled_from(METHODS),
    st.sampled_from(PATHS) | st.text("abc/%.?&=0é ", max_size=20).map("/".__add__),
    st.binary(max_size=60) | ANY.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(HEADER_NAMES.split()), VALUE, max_size=4),
)
def test_any_request_is_answered_or_refused_in_the_one_form(app, method, path, body, headers):
    good_form(app(method, path, body, [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]))


def asking(more: str, content: str = "a") -> bytes:
    return f'{{"messages": [{{"role": "user", "content": "{content}"}}], {more}}}'.encode()


NASTY = {
    "deep": asking('"x": ' + "[" * 100_000 + "]" * 100_000),
    "deep schema": asking('"json_schema": ' + '{"a":' * 900 + "1" + "}" * 900),
    "huge int": asking('"max_tokens": ' + "9" * 5000),
    "huge float": asking('"temperature": 1e999'),
    "nan": asking('"temperature": NaN'),
    "bytes": asking('"n": 1', "XX").replace(b"XX", b"\xff\xfe"),
    "utf-16": '{"messages": []}'.encode("utf-16"),
    "large": asking('"n": 1', "a" * (2 << 20)),
    "long": asking('"n": 1', "a" * 900_000),
    "long for it": asking('"n": 1', "a" * 200_000),
}


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_body_is_refused_and_the_next_request_answered(app, name):
    answer = app("POST", CHAT, NASTY[name], JSON)
    good_form(answer)
    assert 400 <= answer.status_code < 500
    assert said(app("POST", CHAT, json.dumps({"messages": QUESTION}).encode(), JSON).json()) == PLAIN[1]


def test_a_form_of_another_page_is_not_read(app):
    assert app("POST", CHAT, b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}).status_code == 415
