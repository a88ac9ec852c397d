"""OpenAI's routes: recorded requests of clients, and what each field does, by HTTP to a real engine."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer
from tests.serving.live import CHAT, Live, said
from tests.serving.parrot import CODE, LONG, MARKDOWN, PLAIN, WHO

# Requests as clients send them, recorded from their code or from what goes over the wire. The words and answers in them
# are the parrot's.
RECORDED = json.loads((Path(__file__).parent / "client_requests.json").read_text(encoding="utf-8"))
ASK = [{"role": "user", "content": PLAIN[0]}]
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(parrot_parts):
    return Tokenizer.load(parrot_parts / "tokenizer")


@pytest.fixture(scope="module")
def server(parrot_parts, parrot_dir, parrot_gguf, tmp_path_factory):
    """The parrot, the same as a file of others, and as a base model."""
    root = tmp_path_factory.mktemp("openai")
    base, foreign = root / "models/base", root / "foreign.gguf"
    shutil.copytree(parrot_parts / "model", base)
    shutil.copytree(parrot_parts / "tokenizer", root / "models/tokenizer")
    foreign.write_bytes(parrot_gguf.read_bytes().replace(b"athanor.", b"foreign."))  # names of its header
    with Live(root, f"--model={parrot_dir}", f"--model={foreign}", f"--model={base}") as server:
        yield server


def ask(server, path=CHAT, expected=200, **body):
    status, _, reply = server.ask({"messages": ASK, **body} if path == CHAT else body, path)
    assert status == expected, reply
    return reply


def continued(server, prompt, **options):
    return ask(server, COMPLETIONS, prompt=prompt, **options)["choices"][0]


def likely(reply):
    return reply["choices"][0]["logprobs"]["content"]


def user(text):
    return [{"role": "user", "content": text}]


# -- recorded requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", RECORDED["answered"])
def test_a_request_is_answered_and_what_is_ignored_is_named(server, name, stream):
    recorded = {"path": CHAT, "answer": PLAIN[1]} | RECORDED["answered"][name]
    status, names, reply = server.ask({"messages": ASK, **recorded["body"], "stream": stream}, recorded["path"])
    assert (status, sorted(names)) == (200, recorded["ignored"])
    assert recorded["answer"] in (None, said(reply))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", RECORDED["refused"])
def test_what_would_be_another_answer_is_refused_in_one_clear_line(server, name, stream):
    expected = {"type": "invalid_request_error", "path": CHAT, "status": 400} | RECORDED["refused"][name]
    error = ask(server, expected["path"], expected["status"], stream=stream, **expected["body"])["error"]
    assert expected["word"] in error["message"] and "\n" not in error["message"]
    assert all(error[name] == expected[name] for name in error.keys() & expected.keys())


# -- answers -------------------------------------------------------------------------------------------------------


def test_answers_are_the_same_whole_streamed_and_side_by_side(server):
    def both(pair):
        whole = ask(server, messages=user(pair[0]))
        chunks = ask(server, messages=user(pair[0]), stream=True, stream_options={"include_usage": True})
        assert whole["choices"][0]["finish_reason"] == chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["usage"] == whole["usage"] and not chunks[-1]["choices"]
        return said(whole), said(chunks)

    pairs = [PLAIN, WHO, MARKDOWN, CODE] * 6
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(both, pairs)) == [(answer, answer) for _, answer in pairs]


def test_a_foreign_file_answers_by_its_own_template_and_a_base_model_continues(server):
    begun = [*ASK, {"role": "assistant", "content": "3 + 4 ="}]
    assert said(ask(server, model="foreign", messages=begun, temperature=0)) == " 7."
    options = {"model": "base", "temperature": 0, "max_tokens": 9}
    assert said(ask(server, **options)) == continued(server, PLAIN[0], max_tokens=9)["text"]
    assert ask(server, messages=user("word " * 2000), **options)["usage"]["prompt_tokens"] == 512 - 9
    card = server.ask(None, "/v1/models/base")[2]["athanor"]
    assert card["defaults"]["temperature"] > 0  # its likeliest text goes in circles


def test_user_text_spells_no_control_symbol(server, tokenizer):
    text = "<|stop|><|user|>"
    ids = prompt_ids(tokenizer, [Message("user", text)])
    assert ask(server, messages=user(text), max_tokens=1)["usage"]["prompt_tokens"] == len(ids)


def test_a_limit_ends_an_answer_and_the_metrics_of_a_model_count_it(server):
    def made():
        return float(re.search(r'tokens_predicted_total{model="parrot"} (\S+)', server.ask(None, "/metrics")[2])[1])

    before = made()
    cut = ask(server, model="parrot", ignore_eos=True, max_tokens=40)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == made() - before == 40


def test_several_answers_have_a_seed_each(server):
    options = {"messages": user(LONG[0]), "temperature": 3.0, "max_tokens": 12}
    whole = ask(server, n=3, seed=5, **options)
    chunks = ask(server, n=3, seed=5, stream=True, stream_options={"include_usage": True}, **options)
    answers = [said(ask(server, seed=5 + index, **options)) for index in range(3)]
    assert answers == [said(whole, index) for index in range(3)] == [said(chunks, index) for index in range(3)]
    assert len(set(answers)) == 3 and chunks[-1]["usage"] == whole["usage"]


def test_settings_reach_the_model(server, tokenizer):
    (pushed,) = tokenizer.encode(" parrot")
    alone, *others = (
        said(ask(server, logit_bias={str(pushed): 40}, max_tokens=30, **more))
        for more in ({}, {"frequency_penalty": 2}, {"repetition_penalty": 100})
    )
    assert alone == " parrot" * 30 and alone not in others


def test_logprobs_are_those_of_the_model(server):
    rows = likely(ask(server, logprobs=True, top_logprobs=5))
    assert "".join(row["token"] for row in rows) == PLAIN[1]
    for row in rows:
        assert len(row["top_logprobs"]) == 5 and row["top_logprobs"][0]["logprob"] == row["logprob"] <= 0
    chunks = ask(server, logprobs=True, top_logprobs=5, stream=True)
    assert [row for chunk in chunks if chunk["choices"][0]["logprobs"] for row in likely(chunk)] == rows
    assert likely(ask(server, logprobs=True)) == [{**row, "top_logprobs": []} for row in rows]


# -- texts, responses ----------------------------------------------------------------------------------------------


def test_texts_and_ids_are_continued_as_they_are(server, tokenizer):
    prompts = ["I am a parrot,", "3 + 4", "Who"]
    alone = [continued(server, prompt, max_tokens=4)["text"] for prompt in prompts]
    together = ask(server, COMPLETIONS, prompt=prompts, n=2, max_tokens=4)["choices"]
    assert [choice["text"] for choice in together] == [text for text in alone for _ in range(2)]
    ids = [tokenizer.bos, *tokenizer.encode(prompts[0])]  # as a document begins in pretraining
    reply = ask(server, COMPLETIONS, prompt=ids, stream=True, logprobs=2, max_tokens=4)
    chunks = [chunk["choices"][0] for chunk in reply]
    assert "".join(chunk["text"] for chunk in chunks) == alone[0]
    offsets = [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]
    assert offsets[0] == 0 and offsets == sorted(set(offsets))


@pytest.mark.parametrize("model", ["parrot", "foreign"])
def test_an_echo_has_the_loglikelihood_of_each_token(server, tokenizer, model):
    text = "I am a parrot, é🙂"
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    options = {"model": model, "echo": True, "logprobs": 1}
    choice = continued(server, [ids], max_tokens=1, **options)
    found = choice["logprobs"]
    assert {len(each) for each in found.values()} == {len(ids) + 1} and found["token_logprobs"][0] is None
    assert text in choice["text"]  # a foreign file's symbols have a text
    made = continued(server, ids[:5], model=model, logprobs=1, max_tokens=1)["logprobs"]
    assert found["top_logprobs"][5] == pytest.approx(made["top_logprobs"][0], abs=0.02)
    alone = continued(server, [ids], max_tokens=0, **options)["logprobs"]
    assert alone["token_logprobs"] == found["token_logprobs"][:-1]


def test_a_response_is_of_the_schema(server):
    text = {"format": {"type": "json_schema", "name": "bird", "schema": {"const": "owl"}}}
    assert ask(server, "/v1/responses", input=PLAIN[0], text=text)["output"][0]["content"][0]["text"] == '"owl"'


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_question_longer_than_the_context_is_refused(server):
    error = ask(server, expected=400, messages=user("many words " * 2000))["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_the_oldest_exchanges_are_dropped_and_counted(server):
    turns = [*user(WHO[0]), {"role": "assistant", "content": WHO[1]}] * 400
    answer = ask(server, messages=[*turns, *ASK])
    assert 300 < answer["athanor"]["forgotten_exchanges"] < 400 and answer["usage"]["prompt_tokens"] < 512
