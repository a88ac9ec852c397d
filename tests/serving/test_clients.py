"""Clients as they are installed, unchanged, over a socket."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import huggingface_hub
import openai
import pytest

from tests.serving.fake_models import FakeModels, Running, parrot  # noqa: F401
from tests.serving.live import PATIENCE
from tests.serving.parrot import CONVERSATIONS, LONG, PLAIN, SYSTEM, WHO

ASK, ASK_LONG = ([{"role": "user", "content": pair[0]}] for pair in (PLAIN, LONG))
OPTIONS = {"api_key": "none needed", "max_retries": 0, "timeout": PATIENCE}
CLIENTS = 24


@pytest.fixture(scope="module")
def address(parrot):
    with Running(FakeModels({"parrot": parrot})) as running:
        yield f"{running.url}/v1"


class TestOpenAI:
    @pytest.fixture
    def client(self, address):
        with openai.OpenAI(base_url=address, **OPTIONS) as made:
            yield made

    def test_models_chat_and_texts(self, client):
        assert [model.id for model in client.models.list().data] == ["parrot"]
        assert client.models.retrieve("parrot").owned_by == "athanor"
        first = client.chat.completions.create(model="parrot", messages=ASK).choices[0].message
        assert first.content == PLAIN[1]
        history = [*ASK, first, {"role": "user", "content": WHO[0]}]  # what came back can be sent again
        chunks = list(client.chat.completions.create(model="parrot", messages=history, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WHO[1]
        text = client.completions.create(model="parrot", prompt="I am", max_tokens=2, echo=True, logprobs=1).choices[0]
        assert text.text.startswith("I am") and len(text.logprobs.tokens) == len(text.logprobs.token_logprobs)

    def test_responses(self, client):
        options = {"model": "parrot", "instructions": SYSTEM, "top_logprobs": 1}
        first = client.responses.create(input=PLAIN[0], **options)
        (part,) = first.output[0].content
        assert part.text == PLAIN[1] == "".join(row.token for row in part.logprobs)
        assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
        again = [*ASK, *first.output, {"role": "user", "content": WHO[0]}]
        with client.responses.stream(input=again, **options) as stream:
            events = list(stream)
            assert stream.get_final_response().output_text == WHO[1]
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == WHO[1]
        assert [one.sequence_number for one in events] == list(range(len(events)))
        cut = client.responses.create(input=LONG[0], max_output_tokens=5, **options)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    def test_errors_are_its_own_kinds(self, client):
        with pytest.raises(openai.NotFoundError, match="did you mean 'parrot'"):
            client.chat.completions.create(model="parot", messages=ASK)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="parrot", messages=ASK, temperature=-1)

    def test_a_stream_left_half_read_is_stopped(self, client):
        with client.chat.completions.create(model="parrot", messages=ASK_LONG, stream=True) as stream:
            assert next(iter(stream)).choices
        assert client.chat.completions.create(model="parrot", messages=ASK).choices[0].message.content == PLAIN[1]

    def test_many_at_once_get_what_each_would_get_alone(self, address):
        pairs = ([pair for pair in CONVERSATIONS if pair != LONG] * CLIENTS)[:CLIENTS]

        async def one(client, question):
            messages = [{"role": "user", "content": question}]
            stream = await client.chat.completions.create(model="parrot", messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def everyone():
            async with openai.AsyncOpenAI(base_url=address, **OPTIONS) as client:
                return await asyncio.gather(*(one(client, question) for question, _ in pairs))

        assert asyncio.run(everyone()) == [answer for _, answer in pairs]


def test_huggingface_hub_with_the_address_alone(address):
    hub = huggingface_hub.InferenceClient(base_url=address, timeout=PATIENCE)
    assert hub.chat_completion(ASK, max_tokens=40).choices[0].message.content == PLAIN[1]
    chunks = hub.chat.completions.create(messages=ASK, stream=True, temperature=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PLAIN[1]


class TestLangChain:
    @pytest.fixture
    def chat(self, address):
        import langchain_openai  # make quick, which runs none of these, installs no clients

        return langchain_openai.ChatOpenAI(model="parrot", base_url=address, temperature=0, **OPTIONS)

    def test_invoke_stream_and_batch(self, chat):
        assert "".join(chunk.text for chunk in chat.stream(PLAIN[0])) == PLAIN[1]
        assert [one.content for one in chat.batch([PLAIN[0], WHO[0]])] == [PLAIN[1], WHO[1]]
        turns = [("system", SYSTEM), ("human", PLAIN[0]), ("ai", PLAIN[1]), ("human", ""), ("human", WHO[0])]
        assert chat.invoke(turns).content == WHO[1]

    def test_objects(self, chat):
        legs = {"type": "integer", "minimum": 0, "maximum": 9}
        schema = {"title": "bird", "type": "object", "properties": {"legs": legs}, "required": ["legs"]}
        made = chat.with_structured_output(schema, method="json_schema")
        assert made.invoke(PLAIN[0])["legs"] in range(10)


TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 40},
}
CHOOSE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{[answer, wrong]}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.mark.parametrize("kind", ["chat", "loglikelihood"])
def test_lm_eval(address, parrot_dir, tmp_path, kind):
    rows = [{"question": ask, "answer": answer, "wrong": "3 + 4 = 8."} for ask, answer in (PLAIN, WHO)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(tmp_path / "questions.jsonl")}}
    task = TASK | (GENERATE if kind == "chat" else CHOOSE) | {"task": "parrot", "dataset_kwargs": files}
    (tmp_path / "parrot.yaml").write_text(json.dumps(task))  # JSON is YAML
    model, where = "local-chat-completions", f"base_url={address}/chat/completions,tokenized_requests=False"
    if kind == "loglikelihood":
        model = "local-completions"
        where = f"base_url={address}/completions,tokenizer_backend=huggingface,tokenizer={parrot_dir}"
    words = ["--model", model, "--model_args", f"model=parrot,{where}", "--tasks", "parrot", "--apply_chat_template"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    env = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"].values()
    assert found["exact_match,none" if kind == "chat" else "acc,none"] == 1.0
