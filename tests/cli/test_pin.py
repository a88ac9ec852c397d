"""Pinning hub data sets: against a local server that speaks the hub's address, and without any. About 10 s."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from athanor.runtime import presets

ROOT = Path(__file__).resolve().parents[2]
PRESET = presets.complete(ROOT / "presets" / "plasma-1.1.yaml")
COMMITS = {"HuggingFaceFW/fineweb-edu": "a" * 40, "databricks/databricks-dolly-15k": "b" * 40}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        name = self.path.removeprefix("/api/datasets/").partition("?")[0]
        found = json.dumps({"id": name, "sha": COMMITS[name]} if name in COMMITS else {"error": "Repository not found"})
        self.send_response(200 if name in COMMITS else 404)
        self.send_header("Content-Type", "application/json")
        if name not in COMMITS:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(found)))
        self.end_headers()
        self.wfile.write(found.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def unpinned(tmp_path: Path, *datasets: str) -> Path:
    """params.yaml with the preset's text, the revisions of some data sets taken out."""
    text = PRESET
    for name in datasets:
        text, count = re.subn(rf"({name}\n(?:    .*\n)*?    revision:) [0-9a-f]{{40}}", r"\1", text)
        assert count
    (tmp_path / "params.yaml").write_text(text)
    return tmp_path / "params.yaml"


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    proxies = {"http_proxy", "https_proxy", "all_proxy", "hf_endpoint", "hf_hub_offline", "hf_token"}
    inherited = {key: value for key, value in os.environ.items() if key.lower() not in proxies}
    inherited |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home")} | environment
    command = [sys.executable, "-m", "athanor", "pin"]
    return subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, timeout=300)


def test_unpinned_sets_get_the_newest_commit_and_nothing_else_changes(tmp_path, hub):
    path = unpinned(tmp_path, *COMMITS)
    done = run(tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"download.sources[0].revision: {'a' * 40}",
        f"instruct.sources[1].revision: {'b' * 40}",
    ]
    before, after = PRESET.splitlines(), path.read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if new != old]
    assert changed == [f"    revision: {'a' * 40}", f"    revision: {'b' * 40}"]
    again = run(tmp_path, HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and "every hub data set in params.yaml is pinned" in again.stdout


def test_without_every_answer_nothing_is_written(tmp_path, hub):
    path = unpinned(tmp_path, "HuggingFaceFW/fineweb-edu", "wikimedia/wikipedia")
    before = path.read_bytes()
    done = run(tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 1 and "wikimedia/wikipedia" in done.stderr and "cannot be found" in done.stderr
    assert "Traceback" not in done.stderr and path.read_bytes() == before
    offline = run(tmp_path, HF_HUB_OFFLINE="1")
    assert offline.returncode == 1 and path.read_bytes() == before
    assert "HuggingFaceFW/fineweb-edu: the hub cannot be reached" in offline.stderr
    assert "check the network" in offline.stderr
