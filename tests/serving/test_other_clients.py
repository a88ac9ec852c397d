"""Clients other than OpenAI's own, unchanged, where they are installed; test_client_requests.py has what they send."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

from tests.serving.live import PATIENCE, Live, lay_out
from tests.serving.parrot import PLAIN, SYSTEM, WHO

ASK = [{"role": "user", "content": PLAIN[0]}]


def client_of(module: str):
    pytest.importorskip(module)
    return importlib.import_module(module)


@pytest.fixture(scope="module")
def address(parrot_dir, tmp_path_factory):
    folder = lay_out(tmp_path_factory.mktemp("others"), ("parrot", parrot_dir))
    with Live(folder, "--model", "parrot", "--memory", "8") as live:
        yield f"{live.url}/v1"


def test_huggingface_hub_with_the_address_alone(address):
    hub = client_of("huggingface_hub").InferenceClient(base_url=address, timeout=PATIENCE)
    assert hub.chat_completion(ASK, max_tokens=40).choices[0].message.content == PLAIN[1]
    chunks = hub.chat.completions.create(messages=ASK, stream=True, temperature=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PLAIN[1]


class TestLangChain:
    @pytest.fixture
    def chat(self, address):
        return client_of("langchain_openai").ChatOpenAI(
            model="parrot", base_url=address, api_key="none", temperature=0, timeout=PATIENCE, max_retries=0
        )

    def test_invoke_stream_and_batch(self, chat):
        assert chat.invoke(PLAIN[0]).content == PLAIN[1]
        assert "".join(chunk.text for chunk in chat.stream(PLAIN[0])) == PLAIN[1]
        assert [one.content for one in chat.batch([PLAIN[0], WHO[0]])] == [PLAIN[1], WHO[1]]

    def test_histories(self, chat):
        turns = [("system", SYSTEM), ("human", PLAIN[0]), ("ai", PLAIN[1]), ("human", ""), ("human", WHO[0])]
        assert chat.invoke(turns).content == WHO[1]

    def test_several_answers_and_logprobs(self, chat):
        question = client_of("langchain_core.messages").HumanMessage(PLAIN[0])
        assert len(chat.generate([[question]], n=2, temperature=2.0, max_tokens=5).generations[0]) == 2
        rows = chat.bind(logprobs=True, top_logprobs=2).invoke(PLAIN[0]).response_metadata["logprobs"]["content"]
        assert "".join(row["token"] for row in rows) == PLAIN[1]

    def test_structured_output(self, chat):
        client_of("llguidance")
        schema = {
            "title": "bird",
            "type": "object",
            "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["legs"],
            "additionalProperties": False,
        }
        assert chat.with_structured_output(schema, method="json_schema").invoke(PLAIN[0])["legs"] in range(10)

    def test_the_responses_way(self, address):
        chat = client_of("langchain_openai").ChatOpenAI(
            model="parrot", base_url=address, api_key="none", use_responses_api=True, timeout=PATIENCE, max_retries=0
        )
        assert chat.invoke(PLAIN[0]).text == PLAIN[1]

    def test_plain_texts(self, address):
        texts = client_of("langchain_openai").OpenAI(
            model="parrot", base_url=address, api_key="none", temperature=0, max_tokens=4, timeout=PATIENCE
        )
        assert len(texts.batch(["3 + 4", "Who"])) == 2


class TestLiteLLM:
    @pytest.fixture
    def complete(self, address):
        litellm = client_of("litellm")

        def ask(**options):
            return litellm.completion(
                model="openai/parrot", api_base=address, api_key="none", messages=ASK, timeout=PATIENCE, **options
            )

        return ask

    def test_whole_and_streamed(self, complete):
        assert complete(user="me", metadata={"a": "b"}, seed=-1).choices[0].message.content == PLAIN[1]
        chunks = complete(stream=True, stream_options={"include_usage": True})  # the last has no choices
        assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices) == PLAIN[1]

    def test_extras(self, complete):
        answer = complete(drop_params=True, reasoning_effort="low", extra_body={"top_k": -1, "keep_alive": "5m"})
        assert answer.choices[0].message.content == PLAIN[1]

    def test_several_answers(self, complete):
        assert len(complete(n=3, temperature=2.0, max_tokens=4).choices) == 3


def test_lm_eval_local_chat_completions(address, tmp_path):
    client_of("lm_eval")
    client_of("tenacity")  # of lm_eval[api]
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in (PLAIN, WHO))
    )
    task = {
        "task": "parrot",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 40},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "parrot.yaml").write_text(json.dumps(task))  # JSON is YAML
    words = ["--model", "local-chat-completions", "--tasks", "parrot", "--apply_chat_template"]
    words += ["--model_args", f"model=parrot,base_url={address}/chat/completions,tokenized_requests=False"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    env = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert results["results"]["parrot"]["exact_match,none"] == 1.0
