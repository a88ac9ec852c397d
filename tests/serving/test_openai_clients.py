"""OpenAI's own client, curl, and fifty clients at once, each unchanged, against a real server with a real model."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time

import openai
import pytest

from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer
from tests.serving.live import PATIENCE, Live, lay_out, streamed, until
from tests.serving.parrot import CODE, CONVERSATIONS, LONG, MARKDOWN, PLAIN, SYSTEM, WHO

CLIENTS = 50
FIRST_SECONDS = 20.0  # a bound that a busy machine keeps; docs/serving.md tells what a quiet one does


@pytest.fixture(scope="module")
def server(parrot_dir, tmp_path_factory):
    folder = lay_out(tmp_path_factory.mktemp("clients"), ("parrot", parrot_dir))
    with Live(folder, "--model", "parrot", "--memory", "8") as live:
        yield live


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed", max_retries=0, timeout=PATIENCE) as made:
        yield made


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def complete(client, question: str | list = PLAIN[0], **options):
    messages = asked(question) if isinstance(question, str) else question
    return client.chat.completions.create(**{"model": "parrot", "messages": messages, **options})


def said(answer) -> str:
    return answer.choices[0].message.content


def test_models_are_listed_and_told_one_by_one(client):
    (only,) = client.models.list().data
    assert (only.athanor["context_tokens"], only.athanor["state"]) == (512, "idle") and only.athanor["parameters"] > 1e5
    assert (only.id, only.object, only.owned_by) == ("parrot", "model", "athanor")
    assert only.created > 1_700_000_000
    assert client.models.retrieve("parrot").id == "parrot"
    with pytest.raises(openai.NotFoundError, match="there is no model 'carrot'"):
        client.models.retrieve("carrot")


@pytest.mark.parametrize("pair", [PLAIN, WHO, MARKDOWN, CODE], ids=["plain", "who", "markdown", "code"])
def test_an_answer_is_the_same_whole_and_streamed(client, pair):
    whole = complete(client, pair[0])
    assert said(whole) == pair[1] and whole.choices[0].finish_reason == "stop"
    chunks = list(complete(client, pair[0], stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == pair[1]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_usage_is_streamed_only_when_asked_for(client):
    assert all(chunk.usage is None for chunk in complete(client, stream=True))


def test_a_history_with_a_system_message_is_answered(client):
    messages = [
        {"role": "system", "content": SYSTEM},
        *asked(PLAIN[0]),
        {"role": "assistant", "content": PLAIN[1]},
        *asked(WHO[0]),
    ]
    answers = []
    for role in ("system", "developer"):  # OpenAI's newer name of the same
        messages[0]["role"] = role
        answers.append(complete(client, messages))
    assert [said(answer) for answer in answers] == [WHO[1]] * 2
    assert answers[0].usage == answers[1].usage


def test_the_message_that_came_back_can_be_sent_again(client):
    first = complete(client).choices[0].message
    messages = [*asked(PLAIN[0]), first, *asked(WHO[0])]
    assert said(complete(client, messages)) == WHO[1]


def test_an_empty_system_message_is_none(client):
    messages = [{"role": "system", "content": " \n"}, *asked(PLAIN[0])]
    answer = complete(client, messages)
    assert answer.usage.prompt_tokens == complete(client).usage.prompt_tokens


def test_content_parts_are_one_text(client):
    parts = [{"type": "text", "text": PLAIN[0][:5]}, {"type": "text", "text": PLAIN[0][5:]}]
    answer = complete(client, [{"role": "user", "content": parts}])
    assert said(answer) == PLAIN[1]


def test_a_picture_is_refused(client):
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="messages"):
        complete(client, [{"role": "user", "content": parts}])


def test_stop_texts_end_the_answer_and_are_not_in_it(client):
    for stop in (" =", [" =", "7"]):
        for stream in (False, True):
            made = complete(client, stop=stop, stream=stream)
            choices = [c.choices[0] for c in made] if stream else [made.choices[0]]
            text = "".join((c.delta if stream else c.message).content or "" for c in choices)
            assert text == PLAIN[1].partition(" =")[0] and choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_cuts_the_answer_and_says_so(client, name):
    answer = complete(client, LONG[0], **{name: 7})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 7
    assert LONG[1].startswith(said(answer))


def test_filters_beyond_the_protocol_are_honoured(client):
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        answer = complete(client, temperature=3.0, extra_body=extra)
        assert said(answer) == PLAIN[1]
    assert said(complete(client, temperature=3.0, top_p=1e-9)) == PLAIN[1]


def test_several_answers_have_a_seed_each_and_are_the_same_when_asked_again(client):
    options = {"n": 3, "temperature": 3.0, "seed": 5, "max_tokens": 12}
    whole = complete(client, LONG[0], **options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[1] == said(complete(client, LONG[0], **options | {"n": 1, "seed": 6}))
    streamed_texts = ["", "", ""]
    for chunk in complete(client, LONG[0], stream=True, stream_options={"include_usage": True}, **options):
        for choice in chunk.choices:
            streamed_texts[choice.index] += choice.delta.content or ""
    assert streamed_texts == texts
    assert chunk.usage == whole.usage and whole.usage.completion_tokens > 12


def test_several_answers_need_no_seed_to_differ(client):
    choices = complete(client, LONG[0], n=4, temperature=5.0, max_tokens=12).choices
    assert len({choice.message.content for choice in choices}) == 4


def test_logprobs_are_those_of_the_model_and_of_each_token(client):
    whole = complete(client, logprobs=True, top_logprobs=5)
    rows = whole.choices[0].logprobs.content
    assert "".join(row.token for row in rows) == PLAIN[1] and len(rows) == whole.usage.completion_tokens
    assert b"".join(bytes(row.bytes) for row in rows).decode() == PLAIN[1]
    for row in rows:
        tops = [top.logprob for top in row.top_logprobs]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True) and tops[0] == row.logprob <= 0
        assert row.top_logprobs[0].token == row.token and sum(map(math.exp, tops)) <= 1 + 1e-5
    chunks = list(complete(client, logprobs=True, top_logprobs=5, stream=True))
    found = [row for c in chunks if c.choices[0].logprobs for row in c.choices[0].logprobs.content]
    assert [row.model_dump() for row in found] == [row.model_dump() for row in rows]
    only = complete(client, logprobs=True).choices[0].logprobs.content
    assert [row.logprob for row in only] == [row.logprob for row in rows] and not only[0].top_logprobs
    assert complete(client).choices[0].logprobs is None


def test_a_biased_token_gives_way_to_the_next(client, parrot_parts):
    first = Tokenizer.load(parrot_parts / "tokenizer").encode(PLAIN[1])[0]
    row = complete(client, logprobs=True, max_tokens=1, top_logprobs=2).choices[0].logprobs.content[0]
    changed = complete(client, max_tokens=1, logit_bias={str(first): -100}, logprobs=True, top_logprobs=2)
    assert said(changed) == row.top_logprobs[1].token
    assert changed.choices[0].logprobs.content[0].top_logprobs == row.top_logprobs  # told is what the model thinks


def test_a_penalty_ends_a_word_that_comes_again_and_again(client, parrot_parts):
    pushed = Tokenizer.load(parrot_parts / "tokenizer").encode(" parrot")[0]
    rows = {}
    for penalty in (0, 2):
        answer = complete(client, max_tokens=40, logit_bias={str(pushed): 40}, frequency_penalty=penalty, logprobs=True)
        rows[penalty] = [row.token for row in answer.choices[0].logprobs.content]
    assert set(rows[0]) == {rows[0][0]} and len(rows[0]) == 40
    assert 1 < rows[2].count(rows[0][0]) < 40


def test_a_plain_text_is_gone_on_with(client, parrot_parts):
    options = {"model": "parrot", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt="I am a parrot,", logprobs=3, **options)
    (choice,) = whole.choices
    assert whole.object == "text_completion" and whole.usage.completion_tokens == 8 and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.top_logprobs[0]) == 3
    tokenizer = Tokenizer.load(parrot_parts / "tokenizer")
    ids = [tokenizer.bos, *tokenizer.encode("I am a parrot,")]  # as a document begins in pretraining
    assert whole.usage.prompt_tokens == len(ids)
    assert client.completions.create(prompt=ids, **options).choices[0].text == choice.text
    chunks = client.completions.create(prompt="I am a parrot,", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_the_chats_own_ids_as_a_plain_text_are_the_chat(client, parrot_parts):
    ids = prompt_ids(Tokenizer.load(parrot_parts / "tokenizer"), [Message("user", PLAIN[0])])
    answer = client.completions.create(model="parrot", prompt=ids).choices[0]
    assert (answer.text, answer.finish_reason) == (PLAIN[1], "stop")


def test_several_texts_are_answered_in_their_order(client):
    options = {"model": "parrot", "max_tokens": 4, "temperature": 0}
    prompts = ["I am a parrot,", "3 + 4", "Who"]
    alone = [client.completions.create(prompt=prompt, **options) for prompt in prompts]
    together = client.completions.create(prompt=prompts, **options, n=2)
    assert [choice.text for choice in together.choices] == [each.choices[0].text for each in alone for _ in range(2)]
    assert together.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(prompt=["a"] * 129, **options)
    with pytest.raises(openai.BadRequestError, match="there is no token 99999"):
        client.completions.create(prompt=[99999], **options)
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(prompt="a", echo=True, **options)


def test_responses_are_answered_whole_and_streamed(client):
    history = [*asked(PLAIN[0]), {"role": "assistant", "content": PLAIN[1]}, *asked(WHO[0])]
    whole = client.responses.create(model="parrot", input=PLAIN[0], instructions=SYSTEM)
    assert whole.output_text == PLAIN[1] and whole.status == "completed"
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert client.responses.create(model="parrot", input=history).output_text == WHO[1]
    again = client.responses.create(model="parrot", input=[*asked(PLAIN[0]), *whole.output, *asked(WHO[0])])
    assert again.output_text == WHO[1]
    with client.responses.stream(model="parrot", input=PLAIN[0]) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == PLAIN[1]
        assert stream.get_final_response().output_text == PLAIN[1]
    cut = client.responses.create(model="parrot", input=LONG[0], max_output_tokens=5)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_what_responses_cannot_do_is_refused_by_name(client):
    for name, options in {
        "previous_response_id": {"previous_response_id": "resp_1"},
        "tools": {"tools": [{"type": "web_search"}]},
        "function_call_output": {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        "input.0.content: should be": {"input": [{"role": "user", "content": 5}]},
        "response_format: .*text.format": {"extra_body": {"response_format": {"type": "json_object"}}},
    }.items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.responses.create(**{"model": "parrot", "input": "a", **options})


def test_what_is_not_here_is_told_in_words(client, server):
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        client.embeddings.create(model="parrot", input="a")
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.get("/assistants", cast_to=object)
    with pytest.raises(openai.APIStatusError, match="use POST") as told:
        client.get("/chat/completions", cast_to=object)
    assert told.value.status_code == 405
    for path in ("/v1/models/", "//v1/models", "/v1//models"):  # as clients join a base address and a route
        assert json.loads(server.get(path))["data"][0]["id"] == "parrot"
    assert server.post("/v1//chat/completions/", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})[
        "id"
    ]


def test_what_only_describes_a_request_is_passed_over(client):
    answer = complete(client, user="me", metadata={"a": "b"}, n=1, presence_penalty=0, store=False)
    assert said(answer) == PLAIN[1]


NOT_HONOURED = {
    "n": 9,
    "top_logprobs": 3,
    "presence_penalty": 2.5,
    "logit_bias": {"99999": 100},
    "response_format": {"type": "json_schema"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "modalities": ["text", "audio"],
    "ignore_eos": True,
    "guided_json": {"type": "object"},
    "mirostat": 2,
}


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_an_option_that_is_not_honoured_is_refused_by_name(client, name):
    with pytest.raises(openai.BadRequestError, match=name):
        complete(client, extra_body={name: NOT_HONOURED[name]})


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("presence_penality", "presence_penalty")],
)
def test_a_typo_is_answered_with_what_was_meant(client, typo, meant):
    with pytest.raises(openai.BadRequestError, match=f"did you mean '{meant}'"):
        complete(client, extra_body={typo: 1})


def test_a_call_of_a_tool_in_the_history_is_refused(client):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*asked("a"), {"role": "assistant", "content": None, "tool_calls": [call]}, *asked("b")]
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        complete(client, messages)


def test_errors_are_the_clients_own_kinds_and_readable(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'parot'.*did you mean 'parrot'"):
        complete(client, "a", model="parot")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        complete(client, temperature=-1)
    for options, status, param, code in (
        ({"model": "parot"}, 404, "model", "model_not_found"),
        ({"temperature": -1}, 400, "temperature", None),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias", None),  # its process says so
        ({"extra_body": {"mirostat": 2}}, 400, "mirostat", "unsupported_parameter"),
        ({"extra_body": {"temprature": 2}}, 400, "temprature", "unknown_parameter"),
        ({"question": [{"role": "user"}, {"content": "a"}]}, 400, "messages.1.role", "missing_required_parameter"),
        ({"question": "many words " * 2000}, 400, "messages", "context_length_exceeded"),
    ):
        with pytest.raises(openai.APIStatusError) as told:
            complete(client, **options)
        found = told.value.status_code, told.value.param, told.value.code, told.value.type
        assert found == (status, param, code, "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="nobody asks anything"):
        complete(client, [{"role": "assistant", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        complete(client, "many words " * 2000, stream=True)


def test_the_oldest_exchanges_are_dropped_and_told(client):
    turns = [turn for n in range(60) for turn in (*asked(f"What is {n}?"), {"role": "assistant", "content": PLAIN[1]})]
    answer = complete(client, [*turns, *asked(PLAIN[0])])
    assert 0 < answer.athanor["forgotten_exchanges"] < 60 and answer.usage.prompt_tokens < 512


def test_a_history_of_ten_thousand_messages_holds_nobody_up(client):
    turn = [*asked("hello world, once more"), {"role": "assistant", "content": "and hello to you"}]
    messages = [*turn * 4999, *asked(PLAIN[0])]
    began = time.monotonic()
    answer = complete(client, messages)
    # One by one, dropping them takes a quarter of an hour.
    assert answer.athanor["forgotten_exchanges"] > 4900 and time.monotonic() - began < 30


def test_a_client_may_leave_a_stream_half_read(client, server):
    with complete(client, LONG[0], stream=True) as stream:
        assert next(iter(stream)).choices
    assert said(complete(client)) == PLAIN[1]


def test_fifty_clients_at_once_get_what_each_would_get_alone(server):
    pairs = [pair for pair in CONVERSATIONS if pair != LONG]

    async def one(client, pair) -> tuple[float, str]:
        began, first, text = time.monotonic(), None, ""
        stream = await complete(client, pair[0], stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                first = time.monotonic() - began if first is None else first
                text += chunk.choices[0].delta.content
        return first, text

    async def all_of_them():
        options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        async with openai.AsyncOpenAI(**options) as client:
            return await asyncio.gather(*(one(client, pairs[i % len(pairs)]) for i in range(CLIENTS)))

    made = asyncio.run(all_of_them())
    assert [text for _, text in made] == [pairs[i % len(pairs)][1] for i in range(CLIENTS)]
    waits = sorted(first for first, _ in made)
    print(f"time to first text, {CLIENTS} clients: p95 {waits[int(0.95 * CLIENTS)]:.2f} s")
    assert waits[int(0.95 * CLIENTS)] < FIRST_SECONDS


def curl(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["curl", "-sS", *words], capture_output=True, timeout=PATIENCE)


def test_curl_gets_models_a_whole_answer_and_a_stream(server):
    assert json.loads(curl(f"{server.url}/v1/models").stdout)["data"][0]["id"] == "parrot"
    send = (f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d")
    whole = json.loads(curl(*send, json.dumps({"messages": asked(PLAIN[0])})).stdout)  # the default model
    assert whole["choices"][0]["message"]["content"] == PLAIN[1]
    done = curl("-N", *send, json.dumps({"messages": asked(PLAIN[0]), "stream": True}))
    lines = done.stdout.splitlines()
    assert lines[-2] == b"data: [DONE]" and lines[-1] == b""
    assert "".join(row["choices"][0]["delta"].get("content", "") for row in streamed(iter(lines))) == PLAIN[1]
    form = curl(f"{server.url}/v1/chat/completions", "-d", json.dumps({"messages": asked("a")}))  # as a form is sent
    assert "Content-Type: application/json" in json.loads(form.stdout)["error"]["message"]


def test_the_metrics_count_what_was_asked(server, client):
    until(lambda: server.under_way() == 0, "those who left")
    before = server.metrics()
    answer = complete(client)
    complete(client, LONG[0], max_tokens=5)
    with pytest.raises(openai.BadRequestError):
        complete(client, "many words " * 2000)
    after = server.metrics()

    def grown(name: str, end: str = "") -> float:
        return after.get((name, end), 0.0) - before.get((name, end), 0.0)

    assert grown("athanor_answers_total", "stop") == 1
    assert grown("athanor_answers_total", "length") == 1
    assert grown("athanor_answers_total", "request error") == 1
    assert grown("athanor_generated_tokens_total") == answer.usage.completion_tokens + 5
    assert grown("athanor_first_text_seconds_count") == 2
    assert after[("athanor_answers_under_way", "")] == 0
    assert after[("athanor_worker_bytes", "")] > 50 << 20
    assert json.loads(server.get("/health")) == {"status": "ok"}
