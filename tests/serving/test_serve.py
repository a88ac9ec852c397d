"""`athanor serve` as a process: what keeps it from starting, whom it answers, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.serving.live import PATIENCE, Live, environment

LONG = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 29_000, "stream": True}


def refusal(folder, *words: str) -> str:
    """The line of a server that does not start."""
    command = [sys.executable, "-m", "athanor", "serve", "--port", "0", *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Fix: " in done.stderr, done
    return done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--memory 0", "--memory: 0.0 is no number above 0"),
        ("--model ./kee", "--model ./kee: no model, experiment or path of this name"),
        ("--port 70000", "--port 70000: no number of a port. Fix: name one from 1 to 65535"),
        ("--allow-host a:80", "--allow-host a:80: no name of a host"),
        ("--api-key-file missing", "missing: there is no such file. Fix: write the key into it"),
        ("--api-key-file key", "key: a key has ASCII letters, digits and signs, no blanks"),
    ],
)
def test_what_cannot_be_started_says_why_in_one_line(tmp_path, words, told):
    (tmp_path / "key").write_text("ключ\n", encoding="utf-8")  # what a header cannot carry
    assert told in refusal(tmp_path, *words.split())


@pytest.mark.parametrize(("words", "more"), [("--api-key-file key", {}), ("", {"ATHANOR_API_KEY": "key-7!~"})])
def test_a_key_is_asked_for_where_models_are(tmp_path, words, more):
    (tmp_path / "key").write_text("key-7!~\n")
    with Live(tmp_path, *words.split(), **more) as server:
        for path, right in {"/v1/models": 200, "/api/state": 200, "/metrics": 200, "/nothing": 404}.items():
            sent = ("", "Bearer wrong", "key-7!~", "Basic key-7!~", "Bearer schlüssel".encode(), "bearer key-7!~")
            assert [server.ask(None, path, Authorization=one)[0] for one in sent] == [401] * 5 + [right]
        assert [server.ask(None, path)[0] for path in ("/", "/page/api.js", "/health")] == [200] * 3


LOCAL = "localhost:80 LOCALHOST [::1] [::1]:80 127.0.0.1"


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ("", LOCAL, "<b> [::2] 0.0.0.0 127.0.0.1.evil evil.example:80"),
        (
            "--host 127.0.0.2 --allow-host Box.local",
            f"{LOCAL} 127.0.0.2 BOX.local",
            "192.168.7.7:80 box.local.evil evil.example",
        ),
        ("--host 0.0.0.0", f"{LOCAL} 192.168.7.7:80 [fe80::1]:80", "0x7f000001 [evil] evil.example"),
    ],
)
def test_names_that_were_not_allowed_are_refused(tmp_path, words, good, bad):
    with Live(tmp_path, *words.split()) as server:
        assert {server.ask(None, "/health", Host=name)[0] for name in good.split()} == {200}
        for name in ("", *bad.split()):
            status, _, reply = server.ask(None, "/health", Host=name)
            assert status == 403 and "[::1]" in reply["error"]["message"] and "<b>" not in reply["error"]["message"]
        assert "add --allow-host evil.example to" in reply["error"]["message"]


def test_a_taken_port_is_named_with_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f'--port {port + 1} (make serve SERVE="--port' in refusal(tmp_path, "--port", str(port))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_engines_also_with_a_stream_open(tmp_path, endless, number):
    with Live(tmp_path, f"--model={endless}", "--memory=8") as server, server.connect() as client:
        client.sendall(server.raw(LONG))
        received = client.recv(4096)
        engines = psutil.Process(server.process.pid).children()
        server.process.send_signal(number)
        while part := client.recv(1 << 20):
            received += part
        server.process.wait(PATIENCE)
        assert engines and not psutil.wait_procs(engines, PATIENCE)[1]
        assert b"server_error" in received and b"ask again" in received and b"[DONE]" not in received
        assert "Traceback" not in server.said()
