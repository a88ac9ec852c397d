"""What strangers cannot do to a server: hold it by reading nothing, fill it by two doors, or reach it by another name."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error

import httpx2
import psutil
import pytest

from athanor.serving.app import LOOPBACK, AccessMiddleware
from tests.serving.endless import write_endless
from tests.serving.live import PATIENCE, Live, lay_out, serve, until

# A server that waits three seconds for its readers, and whose sockets hold little.
IMPATIENT = """
import socket, sys
from athanor.cli import cli, serve
from athanor.serving import app as running
running.SEND_SECONDS, listen = 3.0, serve.listen
def small(*where):
    one = listen(*where)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return one
serve.listen = small
sys.exit(cli.call('serve', sys.argv[1:]))
"""
QUESTION = [{"role": "user", "content": "Go on"}]


class Impatient(Live):
    command = ("-c", IMPATIENT)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = lay_out(tmp_path_factory.mktemp("served"))
    write_endless(folder / "endless")
    return folder


@pytest.fixture(scope="module")
def server(exports, tmp_path_factory):
    history = str(tmp_path_factory.mktemp("history") / "chat.sqlite3")
    words = ("--model", "endless", "--rows", "8", "--memory", "8", "--max-requests", "2", "--history", history)
    with Impatient(exports, *words) as live:
        yield live


def asking(server, where: str, tokens: int) -> bytes:
    """A request for a long streamed answer by one of the two doors."""
    if where == "page":
        chat = server.post("/api/chats", {"sampling": {"max_new_tokens": tokens}})["id"]
        return server.raw({"content": "Go on"}, f"/api/chats/{chat}/answers")
    return server.raw({"messages": QUESTION, "max_tokens": tokens, "stream": True})


def ports(server) -> set[int]:
    """The far ends of the server's connections, as the kernel knows them."""
    return {one.raddr.port for one in psutil.Process(server.process.pid).net_connections("tcp") if one.raddr}


@pytest.mark.parametrize("where", ["page", "v1"])
def test_a_reader_that_takes_nothing_loses_its_socket(server, where):
    with server.connect(receive_bytes=1024) as stalled:
        stalled.sendall(asking(server, where, 28_000))
        assert stalled.recv(1)
        port = stalled.getsockname()[1]
        assert port in ports(server)
        until(lambda: port not in ports(server), "the socket of a reader that takes nothing is closed")
    until(lambda: server.under_way() == 0, "its answer ends")


@pytest.mark.parametrize("where", ["page", "v1"])
def test_a_reader_that_takes_little_keeps_its_socket(server, where):
    with server.connect(receive_bytes=1024) as slow:
        slow.sendall(asking(server, where, 3000))
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert slow.recv(4096)
            time.sleep(0.2)
        assert slow.getsockname()[1] in ports(server)
    until(lambda: server.under_way() == 0, "its answer ends")


@pytest.mark.parametrize("first", ["page", "v1"])
def test_both_doors_count_what_is_under_way_together(server, first):
    other = {"page": "v1", "v1": "page"}[first]
    with contextlib.ExitStack() as stack:
        for where in (first, other):
            client = stack.enter_context(server.connect())
            client.sendall(asking(server, where, 28_000))
            assert client.recv(4096)
        for where in (first, other):
            client = stack.enter_context(server.connect())
            client.sendall(asking(server, where, 10))
            said = b""
            while b"}}" not in said:
                said += client.recv(4096)
            assert b" 429 " in said.splitlines()[0] and b"2 answers are under way" in said
    until(lambda: server.under_way() == 0, "what clients that are gone asked for ends")

    def answered() -> bool:  # the last of them may be counted a moment longer
        with contextlib.suppress(urllib.error.HTTPError):
            return bool(server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2})["choices"])
        return False

    until(answered, "there is room again")


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_fail_before_their_answer_leave_room(server, stream):
    # More than any context holds: the model's process refuses.
    refused = {"messages": [{"role": "user", "content": "Go on " * 50_000}], "stream": stream}
    for _ in range(3):  # one more than may be under way
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.post("/v1/chat/completions", refused)
    assert server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2})["choices"]


def test_a_name_is_answered_only_if_it_was_allowed_also_on_every_address(exports, tmp_path):
    words = ("--host", "0.0.0.0", "--allow-host", "My-Box.local", "--history", str(tmp_path / "chat.sqlite3"))
    with Live(exports, "--model", "endless", *words) as live:

        def answer(host: str) -> httpx2.Response:
            return httpx2.get(f"{live.url}/api/chats", headers={"Host": host}, timeout=PATIENCE)

        for host in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "my-box.local.evil.example",
            "0x7f000001",
            "",
        ):
            assert answer(host).status_code == 403, host
        assert "Fix: add --allow-host evil.example to the options" in answer("evil.example:80").text
        for host in (
            "192.168.7.7:8080",
            "[fe80::1]:8080",
            "localhost",
            "127.0.0.1",
            "my-box.local:8080",
            "MY-BOX.LOCAL",
        ):
            assert answer(host).status_code == 200, host


@pytest.mark.parametrize("name", ["a:80", "http://a", "", "*", "a b"])
def test_a_name_that_is_none_is_refused(exports, name):
    done = serve(exports, "--port", "0", "--allow-host", name)
    assert done.returncode == 1 and "no name of a host" in done.stderr and "Fix: " in done.stderr


def test_loopback_answers_to_no_other_address():
    gate = AccessMiddleware(None, key="", hosts=LOOPBACK, addresses=False)
    assert gate._refusal({"host": "0.0.0.0:80"}, "/").status_code == 403
    assert gate._refusal({"host": "127.0.0.1:80"}, "/") is None
    said = json.loads(gate._refusal({"host": "<b>"}, "/").body)["error"]["message"]
    assert "<b>" not in said


def test_localhost_is_answered_whichever_loopback_address_a_client_takes_it_for(server):
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("there is no ::1 here")
    for host in ("127.0.0.1", "[::1]", "localhost"):
        assert httpx2.get(f"http://{host}:{server.port}/health", timeout=PATIENCE).json() == {"status": "ok"}
