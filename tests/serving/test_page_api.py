"""The page's routes: requests that are refused, and what people say about answers. Answers are seen in test_page.py."""

from __future__ import annotations

import fcntl

import pytest
from starlette.testclient import TestClient

from athanor.catalog.discover import AvailableModel
from athanor.serving.app import build_app
from athanor.serving.feedback import Feedback
from athanor.serving.models import Models
from athanor.serving.page_api import page_routes
from athanor.serving.retraining import LOCK, Retraining
from tests.serving.judging import asked
from tests.serving.parrot import PLAIN, WHO

QUESTION = [{"role": "user", "content": WHO[0]}]


def serving(root, path=None, retraining=None):
    found = [AvailableModel("parrot", "parrot", str(path), "path", 0.0)] if path else []
    models, feedback = Models(lambda: found, root, 1 << 33), Feedback(root / "feedback.jsonl")
    app = build_app(models, lambda limit: page_routes(models, feedback, limit, retraining))
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture
def client(parrot_gguf, tmp_path):
    with serving(tmp_path, parrot_gguf, Retraining(tmp_path, tmp_path / "feedback.jsonl")) as client:
        yield client


def test_a_request_that_cannot_be_met_is_refused_with_what_is_wrong(client):
    for body, status, message in (
        ({"messages": []}, 200, "it is empty"),
        ({"models": ["parott"]}, 404, "did you mean 'parrot'"),
        ({"models": ["a", "b", "c"]}, 400, "models: should be at most 2 texts"),
        ({"sampling": [1]}, 400, "sampling: should be an object"),
        ({"sampling": {"temperature": "hot"}}, 400, "temperature: should be a number"),
        ({"sampling": {"top_logprobs": 1000}}, 400, "top_logprobs: should be 0 to 20"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 413, "larger than"),
    ):
        answer = client.post("/api/answers", json={"messages": QUESTION, **body})
        assert answer.status_code == status and message in answer.text
    answer = client.post("/api/models/parrot/trace", json={"text": WHO[1]})
    assert answer.status_code == 400 and "data/shards is not here" in answer.text


def test_feedback_is_kept_judged_and_forgotten(client):
    judged = {**asked(*PLAIN), "verdict": "down", "correction": "seven"}
    row = client.put("/api/feedback", json=judged).json()
    address = f"/api/corrections/{row['id']}"
    settled = client.patch(address, json={"status": "accepted"}).json()
    client.put("/api/feedback", json=asked("And 4 + 4?", "9", after=judged) | {"verdict": "down", "correction": "8"})
    first, deeper = client.get("/api/corrections").json()["corrections"]
    assert first == settled | {"left_out": None} and settled["status"] == "accepted"
    assert "an earlier answer of its chat has a thumb down" in deeper["left_out"]
    for faulty in (client.patch(address, json={"status": ["x"]}), client.put("/api/feedback", json=judged | {"x": 1})):
        assert faulty.status_code == 400 and faulty.json()["error"]["message"]
    assert client.patch("/api/corrections/99999999999999999999", json={"status": "accepted"}).status_code == 404
    assert client.delete("/api/feedback", params={"chat": judged["chat"]}).status_code == 204
    assert client.get("/api/corrections").json() == {"corrections": []}


def test_a_training_starts_only_for_who_sits_at_this_machine(client, tmp_path):
    folder = Retraining(tmp_path, tmp_path).folder
    folder.mkdir(parents=True)
    with (folder / LOCK).open("w") as lock:  # one is at work, so that none starts here
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert client.post("/api/retraining", json={}).status_code == 409
        for header in ({"Origin": "http://evil.example"}, {"X-Forwarded-For": "10.0.0.1"}):
            assert client.post("/api/retraining", json={}, headers=header).status_code == 403
            assert client.delete("/api/retraining", headers=header).status_code == 403


def test_without_a_model_and_a_checkout_the_page_is_told_so(tmp_path):
    with serving(tmp_path) as client:
        assert client.get("/api/state").json() == {"models": [], "default_model": None, "retraining": None}
        answer = client.post("/api/retraining", json={})
        assert answer.status_code == 403 and "starts no training" in answer.text
        assert "make repro" in client.post("/api/answers", json={"messages": QUESTION}).text
