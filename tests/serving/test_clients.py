"""Clients as they are installed, unchanged, over a socket."""

from __future__ import annotations

import huggingface_hub
import openai
import pytest

from tests.serving.live import PATIENCE, Live
from tests.serving.parrot import LONG, PLAIN, SYSTEM, WHO

ASK = [{"role": "user", "content": PLAIN[0]}]
EVENTS = (
    "created in_progress output_item.added content_part.added "
    "output_text.done content_part.done output_item.done completed"
).split()
OPTIONS = {"api_key": "none needed", "max_retries": 0, "timeout": PATIENCE}


@pytest.fixture(scope="module")
def address(parrot_dir, tmp_path_factory):
    with Live(tmp_path_factory.mktemp("clients"), f"--model={parrot_dir}") as server:
        yield f"{server.url}/v1"


def text_of(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_openai_models_and_chat(address):
    client = openai.OpenAI(base_url=address, **OPTIONS)
    assert [model.id for model in client.models.list().data] == ["parrot"]
    assert client.models.retrieve("parrot").owned_by == "athanor"
    first = client.chat.completions.create(model="parrot", messages=ASK).choices[0].message
    assert first.content == PLAIN[1]
    history = [*ASK, first, {"role": "user", "content": WHO[0]}]  # what came back can be sent again
    assert text_of(client.chat.completions.create(model="parrot", messages=history, stream=True)) == WHO[1]


def test_openai_responses(address):
    client = openai.OpenAI(base_url=address, **OPTIONS)
    options = {"model": "parrot", "instructions": SYSTEM, "top_logprobs": 1}
    first = client.responses.create(input=PLAIN[0], **options)
    (part,) = first.output[0].content
    assert part.text == PLAIN[1] == "".join(row.token for row in part.logprobs)
    again = [*ASK, *first.output, {"role": "user", "content": WHO[0]}]
    with client.responses.stream(input=again, **options) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == WHO[1]
    *begin, text, part, item, whole = [one for one in events if "delta" not in one.type]
    assert [one.type.removeprefix("response.") for one in (*begin, text, part, item, whole)] == EVENTS
    assert item.item.content == [part.part]
    assert "".join(one.delta for one in events if "delta" in one.type) == WHO[1] == text.text == part.part.text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    cut = client.responses.create(input=LONG[0], max_output_tokens=5, **options)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_huggingface_hub_with_the_address_alone(address):
    hub = huggingface_hub.InferenceClient(base_url=address, timeout=PATIENCE)
    assert text_of(hub.chat.completions.create(messages=ASK, stream=True, temperature=0)) == PLAIN[1]


def test_langchain(address):
    import langchain_openai  # make quick, which runs none of these, installs no clients

    chat = langchain_openai.ChatOpenAI(model="parrot", base_url=address, temperature=0, **OPTIONS)
    assert "".join(chunk.text for chunk in chat.stream(PLAIN[0])) == PLAIN[1]
    turns = [("system", SYSTEM), ("human", PLAIN[0]), ("ai", PLAIN[1]), ("human", ""), ("human", WHO[0])]
    assert chat.invoke(turns).content == WHO[1]
    legs = {"legs": {"type": "integer", "minimum": 0, "maximum": 9}}
    schema = {"title": "bird", "type": "object", "properties": legs, "required": ["legs"]}
    assert chat.with_structured_output(schema, method="json_schema").invoke(PLAIN[0])["legs"] in range(10)


@pytest.mark.parametrize(
    ("model", "path", "task", "metric"),
    [
        (
            "local-chat-completions",
            "chat/completions",
            {"output_type": "generate_until", "doc_to_target": "{{answer}}"},
            "exact_match",
        ),
        (
            "local-completions",
            "completions",
            {"output_type": "multiple_choice", "doc_to_choice": "{{[answer, wrong]}}", "doc_to_target": 0},
            "acc",
        ),
    ],
)
def test_lm_eval(address, parrot_dir, model, path, task, metric):
    import datasets
    import lm_eval

    rows = [{"question": ask, "answer": answer, "wrong": "3 + 4 = 8."} for ask, answer in (PLAIN, WHO)]
    task |= {
        "task": "parrot",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    options = {"model": "parrot", "base_url": f"{address}/{path}", "tokenizer": str(parrot_dir)}
    found = lm_eval.simple_evaluate(model, options, [task], apply_chat_template=True)
    assert found["results"]["parrot"][f"{metric},none"] == 1.0
