"""A worker and its process: why a load fails, death in the middle of an answer, and the end of its input."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys

import httpx2
import pytest

from athanor.base.errors import InputError
from athanor.serving.backends.base import Request
from athanor.serving.backends.torch_backend import open_backend
from athanor.serving.worker import Worker
from athanor.text.conversations import Message
from tests.serving.endless import write_endless
from tests.serving.live import PATIENCE, Live, environment, lay_out
from tests.serving.parrot import PLAIN

QUESTION = [{"role": "user", "content": PLAIN[0]}]


def spec(path, rows=2):
    return {"path": str(path), "backend": "torch", "device": "cpu", "threads": 1, "rows": rows, "cache_bytes": 1 << 30}


@pytest.fixture(scope="module")
def broken(parrot_dir, tmp_path_factory):
    """Copies of the parrot, each with one thing wrong, and one that is well."""
    folder = lay_out(
        tmp_path_factory.mktemp("broken"),
        *((n, parrot_dir) for n in ("well", "missing", "template", "tokenizer", "torn")),
    )
    (folder / "missing/hf/generation_config.json").unlink()
    for name, key in (("template", "template_hash"), ("tokenizer", "tokenizer_digest")):
        own = folder / name / "hf/athanor.json"
        own.write_text(json.dumps(json.loads(own.read_text()) | {key: "0123456789abcdef"}))
    weights = folder / "torn/hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    write_endless(folder / "endless")
    return folder


REASONS = {
    "missing": "generation_config.json",
    "template": "another chat template (0123456789abcdef) than",
    "tokenizer": "another tokenizer (0123456789abcdef) than",
    "torn": "model.safetensors",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_worker_that_cannot_load_tells_the_reason(broken, name):
    async def load():
        with pytest.raises(InputError) as caught:
            await asyncio.wait_for(Worker.start(spec(broken / name / "hf")), PATIENCE)
        return str(caught.value)

    assert REASONS[name] in asyncio.run(load())


def test_a_server_of_broken_models_tells_why_of_each_and_serves_the_others(broken):
    named = [word for name in ("torn", "template", "tokenizer", "missing", "well") for word in ("--model", name)]
    with Live(broken, *named, "--memory", "8") as live:
        listed = {one["athanor"]["label"]: one for one in json.loads(live.get("/v1/models"))["data"]}
        for name in ("template", "tokenizer"):  # known without loading
            facts = listed[f"parrot ({name})"]["athanor"]
            assert facts["state"] == "failed" and REASONS[name].split(" (")[0] in facts["reason"]
            assert "0123456789abcdef" in facts["reason"]
        for name, reason in REASONS.items():
            body = {"model": listed[f"parrot ({name})"]["id"], "messages": QUESTION}
            told = httpx2.post(f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE)
            assert told.status_code == 503 and told.json()["error"]["type"] == "server_error"
            assert reason in told.json()["error"]["message"]
        well = {"model": listed["parrot (well)"]["id"], "messages": QUESTION}
        assert live.post("/v1/chat/completions", well)["choices"][0]["message"]["content"] == PLAIN[1]


def test_a_client_of_a_killed_worker_is_told_and_the_next_gets_a_new_one(broken):
    with Live(broken, "--model", "endless", "--rows", "4", "--memory", "8") as live:
        body = {"messages": QUESTION, "max_tokens": 20_000, "stream": True}
        with httpx2.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert json.loads(next(lines)[6:])["choices"]
            (worker,) = live.workers()
            worker.kill()
            *_, last = lines
        error = json.loads(last[6:])["error"]
        assert "was killed by signal 9" in error["message"] and set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "server_error"
        made = live.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 3})
        assert made["usage"]["completion_tokens"] == 3
        assert live.workers() != [worker]
        assert live.under_way() == 0


def test_a_worker_that_dies_in_the_middle_of_a_line_ends_its_answers():
    """A real process that writes half a line and stays: its reader must not wait for the rest for ever."""

    async def body():
        code = "import os, sys, time; sys.stdout.write('[{\"id\": 1'); sys.stdout.flush(); os.close(1); time.sleep(600)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        with open("/dev/null", "rb") as log:
            worker = Worker(process, log)
            worker.reader = asyncio.create_task(worker._read())
            events = [event async for event in worker.answer(Request([Message("user", "hello")]))]
            await worker.close()
        return events

    (only,) = asyncio.run(asyncio.wait_for(body(), PATIENCE))
    assert only["type"] == "error" and only["kind"] == "model"


@pytest.mark.parametrize("when", ["loading", "answering"])
def test_the_end_of_its_input_ends_a_worker(broken, when):
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "athanor.serving.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    worker.stdin.write(json.dumps(spec(broken / "endless/hf")).encode() + b"\n")
    worker.stdin.flush()
    if when == "answering":
        assert json.loads(worker.stdout.readline())[0]["type"] == "ready"
        ask = {"op": "answer", "id": 1, "messages": QUESTION, "max_new_tokens": 20_000, "sampling": {}, "stop": []}
        worker.stdin.write(json.dumps(ask).encode() + b"\n")
        worker.stdin.flush()
        assert json.loads(worker.stdout.readline())
    worker.stdin.close()
    worker.stdout.close()
    assert worker.wait(PATIENCE) in (0, 1)  # 1: it met the closed output first


def test_an_answer_cancelled_before_the_engine_saw_it_is_not_made(parrot_dir):
    backend = open_backend({"path": parrot_dir, "device": "cpu", "threads": 1, "rows": 2, "cache_bytes": 1 << 30})
    events: queue.Queue[dict] = queue.Queue()
    with backend.work:  # both in the time of one step
        backend.submit(Request([Message("user", PLAIN[0])], id=1), events.put)
        backend.cancel(1)
    assert events.get(timeout=PATIENCE) == {"type": "end", "reason": "stopped", "tokens": 0, "seconds": 0.0}
    backend.close()
    assert events.empty()
