"""The server as it stands on a port: slow clients and vanished ones, any request, the gate, starting and ending."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from urllib.parse import quote

import httpx2
import openai
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from athanor.serving import openai_bodies, openai_options
from athanor.serving.app import HEADERS, build_app
from athanor.serving.discover import discover
from athanor.serving.models import Models
from athanor.serving.store import Store
from tests.serving.endless import write_endless
from tests.serving.live import PATIENCE, Live, lay_out, serve, until
from tests.serving.parrot import PLAIN

QUESTION = [{"role": "user", "content": PLAIN[0]}]
LONG = {"model": "endless", "messages": QUESTION, "max_tokens": 20_000}
MEMORY = ("--memory", "8")


@pytest.fixture(scope="module")
def exports(parrot_dir, tmp_path_factory):
    """A directory with two exports: `parrot`, and `endless`, which talks until it is stopped."""
    folder = lay_out(tmp_path_factory.mktemp("served"), ("parrot", parrot_dir))
    write_endless(folder / "endless")
    return folder


@pytest.fixture(scope="module")
def server(exports):
    with Live(exports, "--model", "parrot", "--model", "endless", "--rows", "8", *MEMORY) as live:
        yield live


def answered(server, model="parrot") -> bool:
    made = server.post("/v1/chat/completions", {"model": model, "messages": QUESTION})
    return made["choices"][0]["message"]["content"] == PLAIN[1]


def still(server) -> None:
    """Nothing is being made any more, and the model's process has nothing to do."""
    until(lambda: server.under_way() == 0, "the answer of a client that is gone ends")
    endless = max(server.workers(), key=lambda one: one.cpu_times().user)

    def idle() -> bool:
        before = endless.cpu_times().user
        time.sleep(0.3)
        return endless.cpu_times().user - before < 0.1

    until(idle, "the engine stops")


# -- slow clients and vanished ones --------------------------------------------------


def test_a_client_that_reads_a_byte_a_second_holds_nobody_up_and_no_answer_under_way(server):
    with server.connect(receive_bytes=1024) as slow:
        slow.sendall(server.raw({**LONG, "stream": True, "max_tokens": 2000}))
        assert slow.recv(1)
        assert answered(server)
        # The model goes on and ends, though its reader has taken next to nothing.
        until(lambda: server.under_way() == 0, "the answer ends while its reader reads")
        time.sleep(1)
        assert slow.recv(1)
        assert answered(server)


def test_clients_that_stall_in_the_middle_of_a_request_hold_nobody_up(server):
    whole = server.raw(LONG)
    with contextlib.ExitStack() as stack:
        for part in (b"", whole[:20], whole[: whole.index(b"\r\n\r\n") + 4], whole[:-5]):
            for _ in range(20):
                stack.enter_context(server.connect()).sendall(part)
        assert answered(server)
        assert server.under_way() == 0
    assert answered(server)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["at once", "after some text"])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_the_answer_of_a_client_that_goes_is_stopped(server, stream, when, how):
    before = server.metrics().get(("athanor_answers_total", "left"), 0)
    client = server.connect()
    client.sendall(server.raw({**LONG, "stream": stream}))
    if when == "after some text":
        if stream:
            assert client.recv(4096)
        until(lambda: server.under_way() == 1, "the answer is being made")
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    still(server)
    assert answered(server)
    if when == "after some text":
        assert server.metrics()[("athanor_answers_total", "left")] == before + 1
        assert server.made() < 20_000


def test_the_answer_of_a_killed_client_is_stopped(server):
    code = (
        "import sys, urllib.request as u\n"
        "r = u.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'})\n"
        "a = u.urlopen(r)\n"
        "print(a.readline(), flush=True)\n"
        "for line in a: pass\n"
    )
    words = [f"{server.url}/v1/chat/completions", json.dumps({**LONG, "stream": True})]
    client = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    assert client.stdout.readline()
    client.kill()
    client.communicate()
    still(server)
    assert answered(server)


# -- any request -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def app(exports, tmp_path_factory):
    """The application in this process, for many requests a second; ask with `ask`."""
    folder = tmp_path_factory.mktemp("app")
    runner = asyncio.Runner()

    async def make():
        spec = {"device": "cpu", "threads": 1, "rows": 4, "cache_bytes": 1 << 30}
        models = Models(discover(exports, [str(exports / "parrot")]), memory_bytes=8 << 30, root=folder, spec=spec)
        return models, build_app(models, Store(folder / "chat.sqlite3"))

    models, made = runner.run(make())

    def ask(method: str, path: str, content: bytes = b"", headers: dict | list | None = None):
        async def one():
            transport = httpx2.ASGITransport(app=made, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                request = client.build_request(method, "/", content=content, headers=headers)
                if "host" not in request.headers:
                    request.headers["host"] = "localhost"
                request.url = request.url.copy_with(raw_path=quote(path, safe="/%?&=.").encode())
                return await asyncio.wait_for(client.send(request), PATIENCE)

        return runner.run(one())

    yield ask
    runner.run(models.close())
    runner.close()


def good_form(answer: httpx2.Response) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]


JSON = {"Content-Type": "application/json"}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(allow_subnormal=False),
    st.text(max_size=30),
)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [*openai_bodies.ChatCompletion.model_fields, *openai_options.REFUSED, *openai_options.ALIASES]
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=10), ANY, max_size=5), st.booleans())
def test_any_options_are_answered_or_refused_in_the_one_form(app, options, sound):
    body = {"messages": QUESTION, "max_tokens": 2, **options} if sound else options
    good_form(app("POST", "/v1/chat/completions", json.dumps(body).encode(), JSON))


@QUICK
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), ANY) | ANY, max_size=4))
def test_any_messages_are_answered_or_refused_in_the_one_form(app, messages):
    body = {"messages": messages, "max_tokens": 2}
    good_form(app("POST", "/v1/chat/completions", json.dumps(body).encode(), JSON))


METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"]
PATHS = [
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/parrot",
    "/v1/chat/completions",
    "/v1/",
    "/page/",
    "/page/api.js",
    "/api/state",
    "/api/chats",
    "/api/corrections",
    "/docs",
    "/openapi.json",
    "/redoc",
]
ODD = st.sampled_from(
    [
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/%00",
        "/page/" + "a" * 5000,
        "//",
        "/v1/models/%ff",
        "/api/chats/%00",
        "/api/chats?q=%00%ff",
        "/api/messages/99999999999999999999/feedback",
    ]
)
HEADER = st.dictionaries(
    st.sampled_from(
        [
            "content-type",
            "accept",
            "authorization",
            "range",
            "if-none-match",
            "if-modified-since",
            "cookie",
            "origin",
            "transfer-encoding",
            "expect",
            "upgrade",
            "connection",
            "x-any",
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30) | st.just("application/json"),
    max_size=4,
)


@settings(QUICK, max_examples=250)
@example("GET", "/", b"", {"range": "application/json"})
@given(
    st.sampled_from(METHODS),
    st.sampled_from(PATHS) | ODD | st.text("abc/%.?&=0é ", max_size=20).map("/".__add__),
    st.binary(max_size=60) | ANY.map(lambda value: json.dumps(value).encode()),
    HEADER,
)
def test_any_request_is_answered_or_refused_in_the_one_form(app, method, path, body, headers):
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    good_form(app(method, path, body, raw))


NASTY = {
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep-option": b'{"messages": [{"role": "user", "content": "a"}], "metadata": '
    + b'{"a":' * 5000
    + b"1"
    + b"}" * 5000
    + b"}",
    "huge-int": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + b"9" * 5000 + b"}",
    "huge-float": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "nan": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "surrogate-option": b'{"messages": [{"role": "user", "content": "a"}], "\\udc00": 1}',
    "bytes": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "utf-16": '{"messages": []}'.encode("utf-16"),
    "zero": b"",
    "null": b"null",
    "list": b"[]",
    "half": b'{"messages": [{"role": "user"',
    "large": b'{"messages": [{"role": "user", "content": "' + b"a" * (3 << 20) + b'"}]}',
    "long": b'{"messages": [{"role": "user", "content": "' + b"a" * 900_000 + b'"}]}',
    "many": json.dumps({"messages": QUESTION * 10_001}).encode(),
    "stops": json.dumps({"messages": QUESTION, "stop": ["a"] * 17}).encode(),
    "greeting-only": json.dumps({"messages": [{"role": "assistant", "content": "a"}] * 2}).encode(),
    "no-user": json.dumps({"messages": [{"role": "system", "content": ""}]}).encode(),
    "tool": json.dumps({"messages": [*QUESTION, {"role": "tool", "content": "5"}]}).encode(),
}


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_body_is_refused_in_one_line(app, name):
    answer = app("POST", "/v1/chat/completions", NASTY[name], JSON)
    good_form(answer)
    assert 400 <= answer.status_code < 500
    assert len(answer.json()["error"]["message"]) < 2000 and "\n" not in answer.json()["error"]["message"]


def test_after_all_of_it_the_server_answers(app):
    made = app("POST", "/v1/chat/completions", json.dumps({"messages": QUESTION}).encode(), JSON).json()
    assert made["choices"][0]["message"]["content"] == PLAIN[1]


def test_bytes_that_are_no_request_do_no_harm(server):
    for junk in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100, b"A" * 100_000):
        with server.connect() as client:
            with contextlib.suppress(OSError):
                client.sendall(junk)
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass
    assert answered(server)


def test_head_is_answered_as_get(server):
    for path in ("/", "/health", "/v1/models"):
        answer = httpx2.head(server.url + path, timeout=PATIENCE)
        assert answer.status_code == 200 and not answer.content and int(answer.headers["content-length"]) > 0


def test_pages_that_load_from_elsewhere_are_not_there(app):
    assert {app("GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {404}


# -- the gate --------------------------------------------------------------------------


def status(url: str, **headers: str) -> tuple[int, str, httpx2.Headers]:
    answer = httpx2.get(url, headers=headers, timeout=PATIENCE)
    return answer.status_code, answer.text, answer.headers


def test_a_foreign_name_is_refused_on_loopback(server):
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "0.0.0.0", "[::2]", ""):
        code, text, headers = status(f"{server.url}/v1/models", Host=host)
        assert code == 403 and "answers to 127.0.0.1, localhost, [::1] only" in text
        assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    for host in (f"localhost:{server.port}", "LOCALHOST", "[::1]", f"[::1]:{server.port}", "127.0.0.1"):
        assert status(f"{server.url}/v1/models", Host=host)[0] == 200


def test_every_answer_has_the_policy_and_none_lets_other_pages_read_it(server):
    origin = {"Origin": "https://evil.example"}
    for path in ("/", "/page/api.js", "/health", "/metrics", "/v1/models", "/api/state", "/nothing", "/page/nothing"):
        code, _, headers = status(server.url + path, **origin)
        assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"], path
        assert not [name for name in headers if name.startswith("access-control")]
    asked = httpx2.request(
        "OPTIONS", f"{server.url}/v1/chat/completions", headers={**origin, "Access-Control-Request-Method": "POST"}
    )
    assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("source", ["file", "environment"])
def test_a_key_is_asked_where_models_and_chats_are(exports, tmp_path, source):
    key, words, more = "key-7!~", (), {}
    if source == "file":
        (tmp_path / "key").write_text(key + "\n")
        words = ("--api-key-file", str(tmp_path / "key"))
    else:
        more = {"ATHANOR_API_KEY": key}
    with Live(
        exports, "--model", "parrot", *MEMORY, *words, "--history", str(tmp_path / "chat.sqlite3"), **more
    ) as live:
        for path in ("/v1/models", "/api/state", "/api/chats", "/metrics", "/nothing"):
            assert status(live.url + path)[0] == 401
            assert status(live.url + path, Authorization="Bearer wrong")[0] == 401
            assert status(live.url + path, Authorization=key.encode())[0] == 401
            right = status(live.url + path, Authorization=b"bearer " + key.encode())[0]
            assert right == (404 if path == "/nothing" else 200)
        for path in ("/", "/page/api.js", "/health"):
            assert status(live.url + path)[0] == 200
        if source == "file":
            return
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="not the server's API key") as told:
                client.models.list()
        assert told.value.code == "invalid_api_key" and "an API key is needed" in status(live.url + "/v1/models")[1]


def test_another_loopback_address_answers_to_its_own_name(exports, tmp_path):
    history = ("--history", str(tmp_path / "chat.sqlite3"))
    with Live(exports, "--model", "parrot", "--host", "127.0.0.2", *MEMORY, *history) as live:
        assert json.loads(live.get("/health")) == {"status": "ok"}
        assert status(f"{live.url}/health", Host="evil.example")[0] == 403


# -- starting and ending -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "0"], "--memory: 0.0 is no number above 0"),
        (["--memory", "nan"], "--memory"),
        (["--memory", "inf"], "--memory"),
        (["--rows", "-1"], "--rows: -1 is no number above 0"),
        (
            ["--model", "./parot"],
            "--model ./parot: no model, experiment or path of this name. Fix: did you mean 'parrot'",
        ),
        (["--model", "/nowhere/at/all"], "--model /nowhere/at/all: no model, experiment or path of this name"),
        (["--host", "300.1.1.1"], "300.1.1.1"),
        (["--port", "70000"], "--port 70000: no number of a port. Fix: name one from 1 to 65535"),
        (["--api-key-file", "missing"], "missing: there is no such file. Fix: write the key into it"),
        (["--api-key-file", "cyrillic"], "cyrillic: a key has ASCII letters, digits and signs, no blanks"),
        (["--history", "/proc/nothing/chat.sqlite3"], "/proc/nothing"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, list) else "",
)
def test_what_cannot_be_started_says_why_in_one_line(exports, words, told):
    if "cyrillic" in words:  # what a header cannot carry
        (exports / "cyrillic").write_text("ключ\n", encoding="utf-8")
    done = serve(exports, *([] if "--port" in words else ["--port", "0"]), *words)
    assert done.returncode == 1, done
    assert told in done.stderr and "Fix: " in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_a_port_in_use_is_told_with_another_one(server, exports):
    done = serve(exports, "--port", str(server.port))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"--port {server.port + 1}" in done.stderr or "--port 8081" in done.stderr


def test_after_a_rebuild_the_new_model_answers_and_what_was_begun_comes_to_its_end(parrot_dir, tmp_path):
    """`athanor serve` went on with the model from before `athanor repro`, and called it ready."""
    folder = write_endless(tmp_path / "endless") / "hf"
    with Live(tmp_path, "--model", "endless", *MEMORY) as live, live.connect() as client:
        client.sendall(live.raw({**LONG, "max_tokens": 4_000, "stream": True}))
        assert client.recv(4096)
        (old,) = live.workers()
        folder.rename(tmp_path / "old")
        assert live.post("/v1/chat/completions", {**LONG, "max_tokens": 1})  # nothing is there: the loaded one answers
        shutil.copytree(parrot_dir, folder)
        assert answered(live, "endless")
        received = b""
        while b"[DONE]" not in received:
            received += client.recv(1 << 20)
        assert b'"finish_reason": "length"' in received
        until(lambda: old not in live.workers() and len(live.workers()) == 1, "the old model's process ends")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "term", "kill"])
def test_a_signal_ends_the_server_and_its_models_also_with_a_stream_open(exports, tmp_path, number):
    history = ("--history", str(tmp_path / "chat.sqlite3"))
    with Live(exports, "--model", "endless", "--rows", "8", *MEMORY, *history) as live:
        with live.connect() as client:
            client.sendall(live.raw({**LONG, "max_tokens": 29_000, "stream": True}))
            assert client.recv(4096)
            (worker,) = live.workers()
            live.process.send_signal(number)
            began = time.monotonic()
            live.process.wait(PATIENCE)
            print(f"ended after {time.monotonic() - began:.1f} s")
            until(
                lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the model's process ends"
            )
        assert "Traceback" not in live.said()
