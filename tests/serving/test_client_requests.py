"""Clients x requests: what they really send is answered, and told apart from what it is not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.serving.client_requests import ASK, EXTRAS, HISTORIES, REFUSED
from tests.serving.live import PATIENCE, Live, lay_out, streamed
from tests.serving.parrot import PLAIN


@pytest.fixture(scope="module")
def server(parrot_dir, tmp_path_factory):
    folder = lay_out(tmp_path_factory.mktemp("requests"), ("parrot", parrot_dir))
    with Live(folder, "--model", "parrot", "--memory", "8") as live:
        yield live


def ask(server, body, path="/v1/chat/completions"):
    """(status, the header's names, the reply, or the list of a stream's)."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            names = {name for name in answer.headers.get("X-Athanor-Ignored", "").split(", ") if name}
            return answer.status, names, streamed(iter(answer)) if body.get("stream") else json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, set(), json.loads(error.read())


def said(reply) -> str:
    if isinstance(reply, dict):
        return reply["choices"][0]["message"]["content"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply if chunk["choices"])


def test_there_are_sixty_of_them():
    assert len(EXTRAS) + len(HISTORIES) + len(REFUSED) >= 60


@pytest.mark.parametrize("name", EXTRAS)
def test_extras_that_ask_for_nothing_change_nothing_and_are_named(server, name):
    body, ignored = EXTRAS[name]
    status, names, reply = ask(server, {"messages": ASK, **body})
    assert (status, said(reply)) == (200, PLAIN[1])
    off = {"frequency_penalty", "presence_penalty", "logprobs", "top_logprobs", "response_format"}
    assert names - off == ignored


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_as_clients_keep_it_is_answered(server, name):
    messages, answer, ignored = HISTORIES[name]
    status, names, reply = ask(server, {"messages": messages, "max_tokens": 60})
    assert (status, names) == (200, ignored)
    assert answer in ("", said(reply))


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_answer_is_refused_in_one_clear_line(server, name):
    body, word = REFUSED[name]
    status, _, reply = ask(server, {"messages": ASK, **body})
    message = reply["error"]["message"]
    assert status == 400 and word in message and "\n" not in message


def test_what_stands_beside_each_other_is_one_message(server):
    """The prompt is that of the conversation with the same messages joined by a blank line."""
    apart = [
        {"role": "user", "content": "It rains."},
        {"role": "system", "content": "Be"},
        *ASK,
        {"role": "system", "content": "kind"},
    ]
    joined = [{"role": "system", "content": "Be\n\nkind"}, {"role": "user", "content": f"It rains.\n\n{PLAIN[0]}"}]
    replies = [ask(server, {"messages": messages, "max_tokens": 20})[2] for messages in (apart, joined)]
    assert said(replies[0]) == said(replies[1]) and replies[0]["usage"] == replies[1]["usage"]


def test_a_penalty_under_another_servers_name_is_the_same(server):
    names = ("repetition_penalty", "repeat_penalty")
    replies = [said(ask(server, {"messages": ASK, name: 100.0, "max_tokens": 30})[2]) for name in names]
    assert replies[0] == replies[1]


def test_a_name_that_no_header_can_hold_is_told_in_another_way(server):
    status, names, _ = ask(server, {"messages": ASK, "Größe,\r\nX: 1": 1})
    assert status == 200 and names == {"Gr??e???X: 1"}
