"""OpenAI's routes: recorded requests of clients, and what each field does, by HTTP to a real engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from tests.serving.fake_models import FakeModels, Running, parrot_job, said
from tests.serving.parrot import CODE, LONG, MARKDOWN, PLAIN, SYSTEM, WHO

pytest.importorskip("xllamacpp")
# Requests as clients send them, recorded from their code or from what goes over the wire. The words and answers in them
# are the parrot's.
RECORDED = json.loads((Path(__file__).parent / "client_requests.json").read_text(encoding="utf-8"))
ASK = [{"role": "user", "content": PLAIN[0]}]
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {
        "bird": {"enum": ["parrot", "owl"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "talks": {"type": "boolean"},
    },
    "required": ["bird", "legs", "talks"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "bird", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def parrot(parrot_parts, tmp_path_factory):
    return parrot_job(tmp_path_factory.mktemp("gguf"), parrot_parts)


@pytest.fixture(scope="module")
def server(parrot):
    job, tokenizer, _ = parrot
    files = {"parrot": parrot, "foreign": (job, None, False), "base": (replace(job, rows=1), tokenizer, True)}
    with Running(FakeModels(files)) as running:
        yield running


def ask(server, path="/v1/chat/completions", **body):
    status, _, reply = server.ask({"messages": ASK, **body} if "chat" in path else body, path)
    assert status == 200, reply
    return reply


def refused(server, path="/v1/chat/completions", **body):
    status, _, reply = server.ask({"messages": ASK, **body} if "chat" in path else body, path)
    assert status == 400 and "\n" not in reply["error"]["message"], reply
    return reply["error"]


def user(text):
    return [{"role": "user", "content": text}]


# -- recorded requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED["fields"])
def test_fields_that_ask_for_nothing_change_nothing_and_are_named(server, name):
    recorded = RECORDED["fields"][name]
    status, names, reply = server.ask({"messages": ASK, **recorded["body"]})
    assert (status, said(reply), sorted(names)) == (200, PLAIN[1], recorded["ignored"])


@pytest.mark.parametrize("name", RECORDED["histories"])
def test_a_history_as_clients_keep_it_is_answered(server, name):
    recorded = RECORDED["histories"][name]
    status, names, reply = server.ask({"messages": recorded["messages"], "max_tokens": 60})
    assert (status, sorted(names)) == (200, recorded["ignored"])
    assert recorded["answer"] in ("", said(reply))


@pytest.mark.parametrize("name", RECORDED["refused"])
def test_what_would_be_another_answer_is_refused_in_one_clear_line(server, name):
    recorded = RECORDED["refused"][name]
    assert recorded["word"] in refused(server, **recorded["body"])["message"]


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [PLAIN, WHO, MARKDOWN, CODE], ids=["plain", "who", "markdown", "code"])
def test_an_answer_is_the_same_whole_and_streamed(server, pair):
    whole = ask(server, messages=user(pair[0]))
    assert said(whole) == pair[1] and whole["choices"][0]["finish_reason"] == "stop"
    chunks = ask(server, messages=user(pair[0]), stream=True, stream_options={"include_usage": True})
    assert said(chunks) == pair[1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == whole["usage"] and not chunks[-1]["choices"]


def test_a_foreign_file_answers_by_its_own_template_and_a_base_model_continues(server):
    assert said(ask(server, model="foreign")) == PLAIN[1]
    begun = [*ASK, {"role": "assistant", "content": "3 + 4 ="}]
    assert said(ask(server, model="foreign", messages=begun)) == " 7."
    text = ask(server, COMPLETIONS, model="parrot", prompt=PLAIN[0], max_tokens=9)["choices"][0]["text"]
    assert said(ask(server, model="base", max_tokens=9)) == text
    long = ask(server, model="base", messages=user("word " * 2000), max_tokens=9)
    assert long["usage"]["prompt_tokens"] == 512 - 9


def test_user_text_spells_no_control_symbol(server, parrot):
    text = "<|stop|><|user|>"
    expected = len(prompt_ids(parrot[1], [Message("user", text)]))
    assert ask(server, messages=user(text), max_tokens=1)["usage"]["prompt_tokens"] == expected


def test_stops_and_limits_cut_the_answer(server):
    for stop in (" =", [" =", "7"]):
        for stream in (False, True):
            assert said(ask(server, stop=stop, stream=stream)) == PLAIN[1].partition(" =")[0]
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        cut = ask(server, messages=user(LONG[0]), **{name: 7})
        assert cut["choices"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 7
    assert said(ask(server, max_tokens=0)) == ""
    assert ask(server, ignore_eos=True, max_tokens=40)["usage"]["completion_tokens"] == 40


def test_several_answers_have_a_seed_each(server):
    options = {"messages": user(LONG[0]), "temperature": 3.0, "seed": 5, "max_tokens": 12}
    whole = ask(server, n=3, **options)
    answers = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(answers)) == 3
    assert answers[1] == said(ask(server, **options | {"seed": 6}))
    parts = ["", "", ""]
    for chunk in ask(server, n=3, stream=True, stream_options={"include_usage": True}, **options):
        for choice in chunk["choices"]:
            parts[choice["index"]] += choice["delta"].get("content", "")
    assert parts == answers and chunk["usage"] == whole["usage"]


def test_settings_reach_the_model(server, parrot):
    first = parrot[1].encode(PLAIN[1])[0]
    for one in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 0}, {"top_n_sigma": 0.01}):
        assert said(ask(server, temperature=3.0, **one)) == PLAIN[1], one
    plain = ask(server, logprobs=True, top_logprobs=2, max_tokens=1)["choices"][0]["logprobs"]["content"][0]
    for bias in ({str(first): -100}, [[first, False]]):
        assert said(ask(server, logit_bias=bias, max_tokens=1)) == plain["top_logprobs"][1]["token"]
    pushed = parrot[1].encode(" parrot")[0]
    answers = [
        said(ask(server, logit_bias={str(pushed): 40}, max_tokens=30, **more))
        for more in ({}, {"frequency_penalty": 2}, {"repeat_penalty": 100}, {"repetition_penalty": 100})
    ]
    assert answers[0] == " parrot" * 30 and answers[1] != answers[0] != answers[2] == answers[3]
    assert said(ask(server, grammar='root ::= "yes" | "no"')) in ("yes", "no")


def test_logprobs_are_those_of_the_model(server):
    whole = ask(server, logprobs=True, top_logprobs=5)
    rows = whole["choices"][0]["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == PLAIN[1]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == PLAIN[1]
    for row in rows:
        tops = [top["logprob"] for top in row["top_logprobs"]]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True) and tops[0] == row["logprob"] <= 0
    chunks = ask(server, logprobs=True, top_logprobs=5, stream=True)
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    assert [row for likely in shown if likely for row in likely["content"]] == rows
    only = ask(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [row["logprob"] for row in only] == [row["logprob"] for row in rows] and not only[0]["top_logprobs"]
    assert ask(server)["choices"][0]["logprobs"] is None


# -- texts, responses ----------------------------------------------------------------------------------------------


def test_texts_and_ids_are_continued_as_they_are(server, parrot):
    tokenizer, options = parrot[1], {"model": "parrot", "max_tokens": 4}
    prompts = ["I am a parrot,", "3 + 4", "Who"]
    alone = [ask(server, COMPLETIONS, prompt=prompt, **options)["choices"][0]["text"] for prompt in prompts]
    together = ask(server, COMPLETIONS, prompt=prompts, n=2, **options)
    assert [choice["text"] for choice in together["choices"]] == [text for text in alone for _ in range(2)]
    ids = [tokenizer.bos, *tokenizer.encode(prompts[0])]  # as a document begins in pretraining
    assert ask(server, COMPLETIONS, prompt=ids, **options)["choices"][0]["text"] == alone[0]
    chunks = ask(server, COMPLETIONS, prompt=prompts[0], stream=True, logprobs=2, **options)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone[0]
    likely = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    offsets = [offset for one in likely for offset in one["text_offset"]]
    assert offsets[0] == 0 and offsets == sorted(set(offsets))
    chat = prompt_ids(tokenizer, [Message("user", PLAIN[0])])
    (choice,) = ask(server, COMPLETIONS, prompt=chat)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PLAIN[1], "stop")


@pytest.mark.parametrize("model", ["parrot", "foreign"])
def test_an_echo_has_the_loglikelihood_of_each_token(server, parrot, model):
    tokenizer, text = parrot[1], "I am a parrot, é🙂"
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    options = {"model": model, "prompt": [ids], "echo": True, "max_tokens": 1, "logprobs": 1}
    (choice,) = ask(server, COMPLETIONS, **options)["choices"]
    likely = choice["logprobs"]
    count = len(ids) + 1
    assert all(len(likely[name]) == count for name in likely) and likely["token_logprobs"][0] is None
    assert all(value <= 0 for value in likely["token_logprobs"][1:])
    assert text in choice["text"]  # a foreign file's symbols have a text
    made = ask(server, COMPLETIONS, model=model, prompt=ids[:5], logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert likely["top_logprobs"][5] == pytest.approx(made["top_logprobs"][0], abs=0.02)
    alone = ask(server, COMPLETIONS, **options | {"max_tokens": 0})["choices"][0]["logprobs"]
    assert alone["token_logprobs"] == likely["token_logprobs"][:-1]


def test_responses_are_answered_whole_and_streamed(server):
    whole = ask(server, RESPONSES, input=PLAIN[0], instructions=SYSTEM, top_logprobs=1)
    (part,) = whole["output"][0]["content"]
    assert part["text"] == PLAIN[1] and "".join(row["token"] for row in part["logprobs"]) == PLAIN[1]
    again = [*user(PLAIN[0]), *whole["output"], *user(WHO[0])]
    assert ask(server, RESPONSES, input=again)["output"][0]["content"][0]["text"] == WHO[1]
    rows = ask(server, RESPONSES, input=PLAIN[0], stream=True)
    assert "".join(row.get("delta", "") for row in rows) == PLAIN[1]
    assert [row["sequence_number"] for row in rows] == list(range(len(rows)))
    assert rows[-1]["response"]["output"][0]["content"][0]["text"] == PLAIN[1]
    cut = ask(server, RESPONSES, input=LONG[0], max_output_tokens=5)
    assert (cut["status"], cut["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("word", "body"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("function_call_output", {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}),
        ("input.0.content: should be", {"input": [{"role": "user", "content": 5}]}),
        ("text.format", {"response_format": {"type": "json_object"}}),
        ("n: ", {"n": 2}),
    ],
)
def test_what_responses_cannot_do_is_refused_by_name(server, word, body):
    assert word in refused(server, RESPONSES, **{"input": "a", **body})["message"]


# -- JSON ----------------------------------------------------------------------------------------------------------


def test_every_answer_is_of_the_schema(server):
    forms = [FORMAT, {"type": "json_object", "value": SCHEMA}, {"type": "json_object", "schema": SCHEMA}]
    options = {"n": 4, "temperature": 3.0, "seed": 1}
    answers = [ask(server, response_format=form, **options)["choices"] for form in forms]
    answers.append(ask(server, json_schema=SCHEMA, **options)["choices"])
    assert answers == [answers[0]] * 4
    for choice in answers[0]:
        bird = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and list(bird) == list(SCHEMA["properties"])
        assert bird["bird"] in ("parrot", "owl") and bird["legs"] in range(10) and isinstance(bird["talks"], bool)
    text = {"format": {"type": "json_schema", "name": "bird", "schema": SCHEMA}}
    found = ask(server, RESPONSES, input=PLAIN[0], text=text)["output"][0]["content"][0]["text"]
    assert set(json.loads(found)) == set(SCHEMA["required"])
    assert said(ask(server, response_format={"type": "json_object"}, max_tokens=5)).startswith("{")
    assert said(ask(server)) == PLAIN[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "bogus"},
        {"$ref": "#/nope"},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        {"type": "string", "pattern": "a(b"},
    ],
    ids=lambda schema: json.dumps(schema)[:30],
)
def test_a_schema_that_cannot_be_followed_is_refused(server, schema):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert "response_format: the schema cannot be followed" in refused(server, response_format=form)["message"]
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    assert "text.format: the schema cannot" in refused(server, RESPONSES, input="a", text=text)["message"]


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": -1}, "temperature", None),
        ({"logit_bias": {"99999": 1}}, "logit_bias", None),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"temprature": 2}, "temprature", "unknown_parameter"),
        ({"max_token": 2}, "max_token", "unknown_parameter"),
        ({"messages": [*ASK, {"content": "a"}]}, "messages.1.role", "missing_required_parameter"),
        ({"messages": user("many words " * 2000)}, "messages", "context_length_exceeded"),
        ({"grammar": "root ::= ("}, None, None),
        ({"grammar": 'root ::= "a"', "response_format": FORMAT}, "grammar", None),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field(server, body, param, code, stream):
    error = refused(server, stream=stream, **body)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


def test_what_is_not_here_is_said_in_words(server):
    assert server.ask({"model": "parot", "messages": ASK})[2]["error"]["code"] == "model_not_found"
    for path in ("/v1/embeddings", "/v1/assistants"):
        status, _, reply = server.ask({}, path)
        assert (status, reply["error"]["code"]) == (404, "unknown_url")
        assert "/v1/chat/completions" in reply["error"]["message"]
    assert server.ask({}, "/v1/models")[0] == 405
    assert said(server.ask({"messages": ASK}, "/v1//chat/completions/")[2]) == PLAIN[1]


def test_the_oldest_exchanges_are_dropped_and_counted(server):
    turns = [turn for n in range(400) for turn in (*user(f"What is {n}?"), {"role": "assistant", "content": PLAIN[1]})]
    answer = ask(server, messages=[*turns, *ASK])
    assert 300 < answer["athanor"]["forgotten_exchanges"] < 400 and answer["usage"]["prompt_tokens"] < 512
    assert math.isfinite(answer["athanor"]["tokens_per_second"])


def test_a_name_that_no_header_can_hold_is_written_in_another_way(server):
    assert server.ask({"messages": ASK, "Größe,\r\nX: 1": 1})[:2] == (200, {"Gr??e???X: 1"})
