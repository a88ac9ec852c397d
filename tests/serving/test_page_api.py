"""The page's routes: requests that are refused, and what people say about answers. Answers are seen in test_page.py."""

from __future__ import annotations

import os

import pytest
from starlette.testclient import TestClient

from athanor.catalog.discover import AvailableModel
from athanor.runtime.locks import lock
from athanor.serving.app import build_app
from athanor.serving.feedback import Feedback
from athanor.serving.models import Models
from athanor.serving.page_api import page_routes
from athanor.serving.retraining import FOLDER, LOCK, Retraining
from tests.serving.judging import asked


def serving(root, path=None, retraining=None):
    found = [AvailableModel("parrot", "parrot", str(path), "path", 0.0)] if path else []
    models, feedback = Models(lambda: found, root, 1 << 33), Feedback(root / "feedback.jsonl")
    app = build_app(models, lambda limit: page_routes(models, feedback, limit, retraining))
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture
def client(parrot_gguf, tmp_path):
    with serving(tmp_path, parrot_gguf, Retraining(tmp_path, tmp_path)) as client:
        yield client


def test_a_request_that_cannot_be_met_is_refused_with_what_is_wrong(client):
    for body, status, message in (
        ({"messages": []}, 200, "it is empty"),
        ({"models": ["parott"]}, 404, "did you mean 'parrot'"),
        ({"models": ["a", "b", "c"]}, 400, "models: should be at most 2 texts"),
        ({"sampling": [1]}, 400, "sampling: should be an object"),
        ({"sampling": {"top_logprobs": 1000}}, 400, "top_logprobs: should be 0 to 20"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 413, "larger than"),
    ):
        answer = client.post("/api/answers", json={"messages": [{"role": "user", "content": "Hello"}], **body})
        assert answer.status_code == status and message in answer.text


def test_what_was_said_in_a_deleted_chat_is_forgotten(client):
    judged = {**asked("What is 3 + 4?", "8"), "verdict": "down", "correction": "seven"}
    assert client.put("/api/feedback", json=judged).json()["status"] == "candidate"
    assert client.delete("/api/feedback", params={"chat": judged["chat"]}).status_code == 204
    assert client.get("/api/corrections").json() == {"corrections": []}
    assert client.patch("/api/corrections/1", json={"status": "accepted"}).status_code == 404


def test_a_training_starts_only_for_who_sits_at_this_machine(client, tmp_path):
    with os.fdopen(lock(tmp_path / FOLDER / LOCK, print)):  # one is at work, so that none starts here
        assert client.post("/api/retraining", json={}).status_code == 409
        for header in ({"Origin": "http://evil.example"}, {"X-Forwarded-For": "10.0.0.1"}):
            assert client.post("/api/retraining", json={}, headers=header).status_code == 403
            assert client.delete("/api/retraining", headers=header).status_code == 403
    with serving(tmp_path) as client:  # in no checkout
        assert client.post("/api/retraining", json={}).status_code == 403
