"""A run tells somebody elsewhere what happens to it: a command, an address, and what goes wrong on the way."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from athanor.runtime.notify import notify
from tests.runtime.guarded_stage import Place

WRITES = 'printf "%s: %s" "$ATHANOR_EVENT" "$ATHANOR_TEXT" > told'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


def test_a_command_finds_the_text_whatever_it_holds_and_no_secret(monkeypatch):
    monkeypatch.setenv("ATHANOR_NOTIFY", WRITES)
    notify("failed", 'sft: "$(touch planted)" at https://me:password@host/x')
    assert Path("told").read_text() == 'failed: sft: "$(touch planted)" at https://***@host/x'
    assert not Path("planted").exists()


def test_an_address_is_sent_what_chat_services_read(monkeypatch):
    bodies = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("ATHANOR_NOTIFY", f"http://127.0.0.1:{server.server_port}/hook")
        notify("done", "three days later")
        server.shutdown()
    assert bodies == [{"event": "done", "text": "three days later", "content": "three days later"}]


@pytest.mark.parametrize("target", ["exit 3", "http://127.0.0.1:9/secret-path", "http://[broken/secret-path"])
def test_a_notice_that_fails_is_a_line_without_the_address(monkeypatch, capsys, target):
    monkeypatch.setenv("ATHANOR_NOTIFY", target)
    notify("done", "x")
    said = capsys.readouterr().err
    assert "did not work" in said and "secret-path" not in said


def test_a_stage_that_fails_tells_why_and_one_that_is_stopped_tells_nothing(tmp_path):
    place = Place(tmp_path / "place")
    try:
        code, said = place.run({"train": True, "3": "raises"}, ATHANOR_NOTIFY=WRITES)
        assert code == 1, said
        assert (place.path / "told").read_text().startswith("failed: ")
        (place.path / "told").unlink()
        assert place.run({"train": True, "4": "sleeps"}, ATHANOR_NOTIFY=WRITES, ATHANOR_MAX_MINUTES="0.001")[0] == 75
        assert not (place.path / "told").exists()
    finally:
        place.close()
