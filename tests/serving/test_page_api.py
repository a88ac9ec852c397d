"""The page's routes: answers side by side, what people say about them, and requests that are refused."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from athanor.serving.app import build_app
from athanor.serving.feedback import Feedback
from athanor.serving.page_api import page_routes
from tests.serving.fake_models import FakeModels, parrot_job
from tests.serving.judging import asked
from tests.serving.live import streamed
from tests.serving.parrot import PLAIN, WHO

pytest.importorskip("xllamacpp")
QUESTION = [{"role": "user", "content": WHO[0]}]


class Started:
    """In place of a training."""

    def start(self) -> dict[str, str]:
        return {"state": "running", "text": ""}

    state = start


@pytest.fixture
def client(parrot_parts, tmp_path):
    job = parrot_job(tmp_path, parrot_parts)
    models, feedback = FakeModels({"parrot": job, "polly": job}), Feedback(tmp_path / "feedback.jsonl")
    app = build_app(models, lambda limit: page_routes(models, feedback, limit, Started()))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def test_two_models_answer_side_by_side_and_an_answer_is_continued(client):
    body = {"models": ["parrot", "polly"], "messages": QUESTION, "sampling": {"top_logprobs": 2, "max_new_tokens": 99}}
    events = streamed(iter(client.post("/api/answers", json=body).content.splitlines()))
    assert events.pop() == {"type": "done"}
    for slot in (0, 1):
        said = [event for event in events if event["slot"] == slot]
        assert "".join(event.get("text", "") for event in said) == WHO[1] and said[-1]["type"] == "end"
        assert [len(row["top_logprobs"]) for row in said[1]["logprobs"]] == [2] * len(said[1]["logprobs"])
    begun = [*QUESTION, {"role": "assistant", "content": WHO[1][:13]}]
    events = streamed(iter(client.post("/api/answers", json={"messages": begun}).content.splitlines()))
    assert "".join(event.get("text", "") for event in events) == WHO[1][13:]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": []}, 200, "it is empty"),
        ({"messages": QUESTION, "models": ["parott"]}, 404, "did you mean 'parrot'"),
        ({"messages": QUESTION, "models": ["a", "b", "c"]}, 400, "models: should be at most 2 texts"),
        ({"messages": QUESTION, "sampling": [1]}, 400, "sampling: should be an object"),
        ({"messages": QUESTION, "sampling": {"temperature": "hot"}}, 400, "temperature: should be a number"),
        ({"messages": QUESTION, "sampling": {"top_logprobs": 1000}}, 400, "top_logprobs: should be 0 to 20"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 413, "larger than"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_what_is_wrong(client, body, status, message):
    answer = client.post("/api/answers", json=body)
    assert answer.status_code == status and message in answer.text


def test_feedback_is_kept_judged_and_forgotten(client):
    said = {**asked(*PLAIN), "verdict": "down", "correction": "seven"}
    row = client.put("/api/feedback", json=said).json()
    assert row["status"] == "candidate" and client.get("/api/corrections").json() == {"corrections": [row]}
    address = f"/api/corrections/{row['id']}"
    assert client.patch(address, json={"status": "accepted"}).json()["status"] == "accepted"
    for faulty in (client.patch(address, json={"status": ["x"]}), client.put("/api/feedback", json=said | {"x": 1})):
        assert faulty.status_code == 400 and faulty.json()["error"]["message"]
    assert client.patch("/api/corrections/99999999999999999999", json={"status": "accepted"}).status_code == 404
    assert client.delete("/api/feedback", params={"chat": said["chat"]}).status_code == 204
    assert client.get("/api/corrections").json() == {"corrections": []}


def test_a_training_starts_only_for_who_sits_at_this_machine(client):
    assert client.post("/api/retraining", json={}).status_code == 202
    for header in ({"Origin": "http://evil.example"}, {"X-Forwarded-For": "10.0.0.1"}):
        assert client.post("/api/retraining", json={}, headers=header).status_code == 403
    state = json.loads(client.get("/api/state").content)
    assert state["retraining"]["state"] == "running" and state["default_model"] == "parrot"
