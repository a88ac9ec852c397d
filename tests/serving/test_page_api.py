"""The page's routes: answers side by side, what people say about them, and requests that are refused."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from athanor.catalog.discover import AvailableModel
from athanor.serving.app import build_app
from athanor.serving.feedback import Feedback
from athanor.serving.models import Models
from athanor.serving.page_api import page_routes
from tests.serving.judging import asked
from tests.serving.live import streamed
from tests.serving.parrot import PLAIN, WHO

QUESTION = [{"role": "user", "content": WHO[0]}]


class Started:
    """In place of a training."""

    def start(self) -> dict[str, str]:
        return {"state": "running", "text": ""}

    state = start

    def stop(self) -> dict[str, str]:
        return {"state": "stopped", "text": ""}


@contextmanager
def serving(root, retraining=None, names=("parrot", "polly")):
    found = [AvailableModel(name, name, str(root / f"{name}.gguf"), "path", 0.0) for name in names]
    models, feedback = Models(lambda: found, root, 1 << 33), Feedback(root / "feedback.jsonl")
    app = build_app(models, lambda limit: page_routes(models, feedback, limit, retraining))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="module")
def client(parrot_gguf, tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    shutil.copytree(parrot_gguf.parent, root, dirs_exist_ok=True)
    shutil.copy(parrot_gguf, root / "polly.gguf")
    with serving(root, Started()) as client:
        yield client


def said(client, **body):
    return streamed(iter(client.post("/api/answers", json=body).content.splitlines()))


def test_two_models_answer_side_by_side_and_an_answer_is_continued(client):
    sampling = {"top_logprobs": 2, "max_new_tokens": 99}
    events = said(client, models=["parrot", "polly"], messages=QUESTION, sampling=sampling)
    assert events.pop() == {"type": "done"}
    for slot in (0, 1):
        answer = [event for event in events if event["slot"] == slot and event["type"] != "loading"]
        assert "".join(event.get("text", "") for event in answer) == WHO[1] and answer[-1]["type"] == "end"
        assert [len(row["top_logprobs"]) for row in answer[1]["logprobs"]] == [2] * len(answer[1]["logprobs"])
    events = said(client, messages=[*QUESTION, {"role": "assistant", "content": WHO[1][:13]}])
    assert "".join(event.get("text", "") for event in events) == WHO[1][13:]


def test_a_request_that_cannot_be_met_is_refused_with_what_is_wrong(client):
    long = [{"role": "user", "content": "x" * 2_000_000}]
    for body, status, message in (
        ({"messages": []}, 200, "it is empty"),
        ({"models": ["parott"]}, 404, "did you mean 'parrot'"),
        ({"models": ["a", "b", "c"]}, 400, "models: should be at most 2 texts"),
        ({"sampling": [1]}, 400, "sampling: should be an object"),
        ({"sampling": {"temperature": "hot"}}, 400, "temperature: should be a number"),
        ({"sampling": {"top_logprobs": 1000}}, 400, "top_logprobs: should be 0 to 20"),
        ({"messages": long}, 413, "larger than"),
    ):
        answer = client.post("/api/answers", json={"messages": QUESTION, **body})
        assert answer.status_code == status and message in answer.text
    answer = client.post("/api/models/parrot/trace", json={"text": WHO[1]})
    assert answer.status_code == 400 and "data/shards is not here" in answer.text


def test_feedback_is_kept_judged_and_forgotten(client):
    judged = {**asked(*PLAIN), "verdict": "down", "correction": "seven"}
    row = client.put("/api/feedback", json=judged).json()
    assert row["status"] == "candidate" and client.get("/api/corrections").json() == {
        "corrections": [row | {"left_out": None}]
    }
    deeper = {**asked("And 4 + 4?", "9", after=judged), "verdict": "down", "correction": "8"}
    client.put("/api/feedback", json=deeper)
    assert (
        "an earlier answer of its chat has a thumb down"
        in client.get("/api/corrections").json()["corrections"][1]["left_out"]
    )
    address = f"/api/corrections/{row['id']}"
    assert client.patch(address, json={"status": "accepted"}).json()["status"] == "accepted"
    for faulty in (client.patch(address, json={"status": ["x"]}), client.put("/api/feedback", json=judged | {"x": 1})):
        assert faulty.status_code == 400 and faulty.json()["error"]["message"]
    assert client.patch("/api/corrections/99999999999999999999", json={"status": "accepted"}).status_code == 404
    assert client.delete("/api/feedback", params={"chat": judged["chat"]}).status_code == 204
    assert client.get("/api/corrections").json() == {"corrections": []}


def test_the_state_and_a_training_that_starts_only_for_who_sits_at_this_machine(client, tmp_path):
    state = client.get("/api/state").json()
    assert state["default_model"] == "parrot" and [row["id"] for row in state["models"]] == ["parrot", "polly"]
    assert client.get("/api/models/parrot/about").json()["card"] == ""
    assert state["retraining"]["state"] == "running" and client.post("/api/retraining", json={}).status_code == 202
    for header in ({"Origin": "http://evil.example"}, {"X-Forwarded-For": "10.0.0.1"}):
        assert client.post("/api/retraining", json={}, headers=header).status_code == 403
        assert client.delete("/api/retraining", headers=header).status_code == 403
    assert client.delete("/api/retraining").json()["state"] == "stopped"
    with serving(tmp_path, names=()) as other:
        assert other.get("/api/state").json() == {"models": [], "default_model": None, "retraining": None}
        answer = other.post("/api/retraining", json={})
        assert answer.status_code == 403 and "starts no training" in answer.text
        assert "make repro" in other.post("/api/answers", json={"messages": QUESTION}).text
