"""Answers that have to be JSON: they are, whatever the model would have said."""

from __future__ import annotations

import json
import sys

import openai
import pytest

from athanor.base.errors import InputError
from athanor.serving.backends.grammar import Grammars
from athanor.tokenizer.tokenizer import Tokenizer
from tests.serving.live import PATIENCE, Live, lay_out
from tests.serving.parrot import PLAIN

SCHEMA = {
    "type": "object",
    "properties": {
        "bird": {"enum": ["parrot", "owl"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "talks": {"type": "boolean"},
    },
    "required": ["bird", "legs", "talks"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "bird", "schema": SCHEMA, "strict": True}}
OPEN = {name: part for name, part in SCHEMA.items() if name != "additionalProperties"}  # as pydantic writes it
HUGGING_FACES, LLAMA_CPPS = ({"type": "json_object", name: OPEN} for name in ("value", "schema"))


@pytest.fixture(scope="module")
def client(parrot_dir, tmp_path_factory):
    pytest.importorskip("llguidance")
    folder = lay_out(tmp_path_factory.mktemp("json"), ("parrot", parrot_dir))
    with Live(folder, "--model", "parrot", "--memory", "8") as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
            yield made


def complete(client, **options):
    return client.chat.completions.create(model="parrot", messages=[{"role": "user", "content": PLAIN[0]}], **options)


def test_every_answer_is_of_the_schema(client):
    choices = complete(client, response_format=FORMAT, n=8, temperature=3.0, seed=1).choices
    birds = [json.loads(choice.message.content) for choice in choices]
    assert {choice.finish_reason for choice in choices} == {"stop"}
    for bird in birds:
        assert list(bird) == ["bird", "legs", "talks"] and bird["bird"] in ("parrot", "owl")
        assert bird["legs"] in range(10) and isinstance(bird["talks"], bool)
    assert len({json.dumps(bird) for bird in birds}) > 1  # the rest is the model's choice


def test_a_stream_says_the_same(client):
    whole = complete(client, response_format=FORMAT).choices[0].message.content
    chunks = complete(client, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert json.loads(whole)["bird"] in ("parrot", "owl")


@pytest.mark.parametrize("form", [HUGGING_FACES, LLAMA_CPPS], ids=["huggingface_hub", "llama.cpp"])
def test_a_schema_beside_json_object_is_followed(client, form):
    assert complete(client, response_format=form).choices == complete(client, response_format=FORMAT).choices


def test_any_object_will_do_without_a_schema(client):
    text = complete(client, response_format={"type": "json_object"}, logit_bias={}).choices[0].message.content
    assert text.startswith("{")


def test_responses_have_it_too(client):
    text = {"format": {"type": "json_schema", "name": "bird", "schema": SCHEMA}}
    assert set(json.loads(client.responses.create(model="parrot", input=PLAIN[0], text=text).output_text)) == set(
        SCHEMA["required"]
    )
    text["format"]["schema"] = {"type": "bogus"}
    with pytest.raises(openai.BadRequestError, match="text.format: the schema cannot be followed"):
        client.responses.create(model="parrot", input=PLAIN[0], text=text)


def test_others_go_on_as_before_beside_it(client):
    complete(client, response_format=FORMAT)
    assert complete(client).choices[0].message.content == PLAIN[1]


@pytest.mark.parametrize("schema", [{"type": "bogus"}, {"$ref": "http://example.com/s.json"}])
def test_a_schema_that_cannot_be_followed_is_refused(client, schema):
    with pytest.raises(openai.BadRequestError, match="response_format: the schema cannot be followed"):
        complete(client, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def test_without_the_engine_the_refusal_says_what_to_install(parrot_parts, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match="pip install 'llguidance"):
        Grammars(Tokenizer.load(parrot_parts / "tokenizer")).of_schema(SCHEMA)
