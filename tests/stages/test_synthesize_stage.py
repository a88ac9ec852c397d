"""The synthetic stage against a real server: budget, kills, keys, DVC. About 40 s."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import read_json, read_manifest
from athanor.base.errors import AthanorError
from athanor.runtime import presets
from athanor.runtime.run import Run
from athanor.runtime.schema import check_file
from athanor.synthesis.endpoint import Ledger
from stages import synthesize
from tests.e2e.clone import Clone, environment
from tests.stages.conftest import text_documents, write_battery, write_clean
from tests.synthesis.model_server import Fault, model_server, talks, written

ROOT = Path(__file__).resolve().parents[2]
KEY = "Zq9/secret+0123456789abcdef=="  # of no shape that is known, under a name that does not say what it is
QUIET = {"ATHANOR_TRACKING": "off", "ATHANOR_THREADS": "1", "http_proxy": "http://127.0.0.1:9"}  # nobody is there
NO_SDK = pytest.mark.skipif(not importlib.util.find_spec("anthropic"), reason="pip install -r requirements-side.txt")
APIS = ["openai", pytest.param("anthropic", marks=[pytest.mark.extra, NO_SDK])]


@pytest.fixture
def server():
    with model_server() as found:
        yield found


def write_world(folder: Path, url: str, **changes: object) -> Path:
    """A checkout with clean documents, a battery and complete parameters; written again, only the parameters change."""
    values = presets.values(ROOT / "presets/micro.yaml")
    own = {"name": "chats", "api": "openai", "base_url": url, "model": "m", "key_env": "MY_LLM", "license": "X"}
    own |= {"requests": 20, "max_output_tokens": 600, "concurrency": 3, "gates": {"min_conversations": 10}}
    values["synthetic"] |= own | changes
    folder.mkdir(exist_ok=True)
    YAML().dump(values, folder / "params.yaml")
    if not (folder / "data").exists():
        write_clean(folder, text_documents())
        write_battery(folder)
        for name in ("athanor", "stages"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "probes", folder / "probes", ignore=shutil.ignore_patterns("dvc.*"))
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stages.synthesize"]
    env = environment(**QUIET, MY_LLM=KEY)
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def here(folder: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    """The stage's body in this process, which is quicker; "" or its error."""
    monkeypatch.chdir(folder)
    for name, value in {**QUIET, "MY_LLM": KEY, **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    run = Run("synthesize", "stages.synthesize")
    try:
        synthesize.run(run)
        run.finish()
    except AthanorError as error:
        run.fail("FAILED", str(error))
        return str(error)
    return ""


def outputs(folder: Path) -> list[bytes]:
    names = ("data/synthetic/manifest.json", "data/synthetic/chats.jsonl", "metrics/synthesize.json")
    return [(folder / name).read_bytes() for name in names]


def spent(folder: Path) -> Ledger:
    return Ledger(folder / ".athanor/synthetic", check_file(folder / "params.yaml")["synthetic"])


@pytest.mark.parametrize("api", APIS)
def test_every_request_is_answered_once(server, tmp_path, monkeypatch, api):
    folder = write_world(tmp_path / "work", f"{server.url}/v1/", api=api)
    assert here(folder, monkeypatch) == ""
    assert set(server.charged.values()) == {1} and server.seen == 20 and server.most_flying <= 3
    assert server.keys == {f"Bearer {KEY}"}
    counts = {"requests": 20, "replies": 20, "malformed": 0, "conversations": 40, "kept": 40}
    assert read_manifest(folder / "data/synthetic", "synthetic", 2)["counts"] == counts
    assert read_json(folder / "metrics/runs/synthesize.json")["facts"]["spent_tokens"] == server.tokens
    before = outputs(folder)
    assert here(folder, monkeypatch, MY_LLM="") == "" and server.seen == 20  # not even the key is needed
    assert outputs(folder) == before


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("limit", [{"requests": 9}, {"tokens": 9000}])
def test_no_limit_is_ever_passed(server, tmp_path, monkeypatch, api, limit):
    """With eight in flight, refusals, and two replies that break off: those are charged, and counted at their most."""
    server.script = [None, Fault(429), Fault(500), Fault(), None, Fault(529), Fault(), None, Fault(429)]
    budget = {"requests": 1000, "tokens": 10**6} | limit
    changes = {"api": api, "concurrency": 8, "gates": {"min_conversations": 1}}
    folder = write_world(tmp_path / "work", server.url, budget=budget, **changes)
    assert here(folder, monkeypatch) == ""
    ledger = spent(folder)
    assert 2 <= len(ledger.replies) < 20
    assert server.charged.total() <= ledger.requests <= budget["requests"]
    assert server.tokens <= ledger.tokens <= budget["tokens"]
    seen = server.seen
    assert here(folder, monkeypatch) == "" and server.seen == seen
    write_world(folder, server.url, budget={"requests": 1000, "tokens": 10**6}, **changes)
    assert here(folder, monkeypatch) == "" and len(spent(folder).replies) == 20
    assert sum(count - 1 for count in server.charged.values()) == 2


def test_killed_again_and_again_it_ends_with_the_same_bytes_and_asks_for_no_reply_twice(server, tmp_path, monkeypatch):
    """The server's address is a part of what is asked, so one server answers both runs."""
    whole = write_world(tmp_path / "whole", server.url)
    assert here(whole, monkeypatch) == ""
    charged, folder = server.charged.copy(), write_world(tmp_path / "work", server.url)
    victim: list[subprocess.Popen[str]] = []
    server.on_request = lambda number: number in (21, 24, 31, 36) and os.kill(victim[-1].pid, signal.SIGKILL)
    while True:
        victim.append(start(folder))
        said = victim[-1].communicate(timeout=300)[1]
        if victim[-1].returncode == 0:
            break
        assert victim[-1].returncode == -signal.SIGKILL and not (folder / "data/synthetic").exists(), said
    kills = len(victim) - 1
    assert kills == 4 and outputs(folder) == outputs(whole)
    answered: set[str] = set()
    for line in map(json.loads, filter(None, (folder / ".athanor/synthetic/chats.jsonl").read_bytes().split(b"\n"))):
        assert line["request"] not in answered
        answered |= {line["request"]} if line["type"] == "answer" else set()
    assert len(answered) == 20 and (server.charged - charged).total() <= spent(folder).requests <= 20 + 3 * kills


def test_asked_to_stop_it_waits_for_what_is_paid_for(server, tmp_path):
    folder, victim = write_world(tmp_path / "work", server.url), []
    server.on_request = lambda count: count == 4 and victim[0].send_signal(signal.SIGINT)
    victim.append(start(folder))
    said = victim[0].communicate(timeout=300)[1]
    assert victim[0].returncode == 75 and "every reply is kept" in said
    assert len(spent(folder).replies) == server.charged.total() < 20
    again = start(folder)
    assert again.communicate(timeout=300) and again.returncode == 0 and set(server.charged.values()) == {1}


@pytest.mark.parametrize("api", APIS)
def test_the_key_is_nowhere(server, tmp_path, api):
    """A server that repeats it wherever it can, in replies and in refusals; then a run that ends in an error."""
    folder = write_world(tmp_path / "work", server.url, api=api)
    server.say = lambda identity: written([[f"{talk[0]} {KEY}", talk[1]] for talk in talks(identity)])
    error = {"error": {"type": KEY, "message": f"Incorrect API key provided: {KEY}"}}
    server.script = [Fault(429, error), Fault(400, error), Fault(500, KEY)]
    first = start(folder)
    said = first.communicate(timeout=300)[1]
    assert first.returncode == 0, said
    write_world(folder, server.url, api=api, requests=30)
    server.script = [Fault(401, error)] * 9
    second = start(folder)
    said += (failed := second.communicate(timeout=300)[1])
    assert second.returncode == 1 and "5 requests in a row failed" in failed and "Traceback" not in failed
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    everything = b"".join(path.read_bytes() for path in files) + said.encode()
    assert len(files) > 10 and b"***" in everything and b'"sent"' in everything
    for form in (KEY, KEY.replace("/", "%2F"), KEY.replace("/", "\\/"), KEY[:12], KEY[-12:]):
        assert form.encode() not in everything


def test_what_cannot_work_is_told_in_one_line_and_costs_nothing(server, tmp_path, monkeypatch):
    folder = write_world(tmp_path / "work", server.url)
    for env in ({"MY_LLM": ""}, {"MY_LLM": "short"}, {"MY_LLM": f"{KEY}\nx"}):
        said = here(folder, monkeypatch, **env)
        assert "environment variable MY_LLM: holds no key" in said and KEY not in said
    monkeypatch.setitem(sys.modules, "openai", None)
    assert "pip install -r requirements-side.txt" in here(folder, monkeypatch)
    monkeypatch.undo()
    for change, told in (
        ({"base_url": "http://api.somewhere.com"}, "synthetic.base_url"),
        ({"model": None}, "synthetic.model"),
        ({"budget": {"requests": 9, "tokens": 99}}, "gates.min_conversations"),
    ):
        assert told in here(write_world(folder, **({"url": server.url} | change)), monkeypatch)
    assert server.seen == 0 and not (folder / "data/synthetic").exists()


@pytest.mark.parametrize("api", APIS)
def test_redirects_long_pauses_and_a_server_that_is_not_there_cost_nothing(server, tmp_path, monkeypatch, api):
    with model_server() as thief:
        server.script = [Fault(307, "", {"Location": f"{thief.url}/v1"})] * 20
        folder = write_world(tmp_path / "work", server.url, api=api)
        assert "5 requests in a row failed" in here(folder, monkeypatch) and thief.seen == 0
    server.script = [Fault(429, "", {"Retry-After": "7200"})] * 20
    assert "5 requests in a row failed" in here(folder, monkeypatch)
    assert server.seen <= 20
    monkeypatch.setattr("athanor.synthesis.endpoint.MAX_RETRIES", 0)
    # A folder of its own: a kept connection that a server closes breaks a try off, which counts at its most.
    folder = write_world(tmp_path / "gone", "http://127.0.0.1:9", api=api, key_env=None)
    assert "5 requests in a row failed" in here(folder, monkeypatch) and spent(folder).requests == 0


def test_the_command_shows_publishes_and_remembers(server, tmp_path):
    folder = write_world(tmp_path / "work", server.url)
    for name in ("athanor", "stages"):  # DVC follows no links
        (folder / name).unlink()
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "dvc.yaml").write_text("stages: {}")
    clone = Clone(folder)
    clone.run("git", "init", "-q", "-b", "main")
    clone.dvc("init", "-q")
    env = {**QUIET, "MY_LLM": KEY, "DVC_SITE_CACHE_DIR": str(tmp_path / "site")}

    def call(*words: str) -> str:
        return clone.run(sys.executable, "-m", "athanor", "synthesize", *words, **env).stdout

    shown = call("--dry-run")
    assert server.seen == 0 and "Nothing was sent." in shown and shown.count("<text>") == 2 and KEY not in shown
    assert "0 answered already" in shown and "12,000 written" in shown
    first = call()
    target = folder / "corpus/synthetic/chats.jsonl"
    assert "Conversations  40 in corpus/synthetic/chats.jsonl" in first
    assert target.read_bytes() == (folder / "data/synthetic/chats.jsonl").read_bytes()
    card = target.with_suffix(".md").read_text()
    assert server.url in card and "Model: m" in card and "License given: X" in card
    assert "didn't change, skipping" in call() and "20 answered already" in call("--dry-run")
    assert server.seen == 20 and not (folder / "probes/dvc.yaml").exists()
