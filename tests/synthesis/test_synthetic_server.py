"""The collector of synthetic conversations against a real server: both APIs, trouble, ledger and budget. About 10 s."""

from __future__ import annotations

import json
import os
import threading

import pytest

from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.synthesis import endpoint
from athanor.synthesis.endpoint import Endpoint, address, key_from, local
from athanor.synthesis.ledger import Ledger
from athanor.synthesis.replies import parse
from tests.synthesis.model_server import Fault, model_server, talks, written
from tests.synthesis.synthetic_world import KEY, params, requests, run


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there: only who uses no proxy gets through
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with model_server() as found:
        yield found


# -- the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "api, base, path, limit",
    [
        ("anthropic", "", "/v1/messages", "max_tokens"),
        ("anthropic", "/proxy/v1/", "/proxy/v1/messages", "max_tokens"),
        ("openai", "/v1", "/v1/chat/completions", "max_tokens"),
        ("openai", "", "/v1/chat/completions", "max_completion_tokens"),
    ],
)
def test_both_apis(server, tmp_path, api, base, path, limit):
    values = params(api=api, base_url=server.url + base, output_limit=limit, temperature=0.5)
    (request,) = requests(1)
    answer = Endpoint(values, KEY).ask(request)
    assert parse(answer, 2, 1) and answer.input_tokens > 0 and answer.output_tokens > 0 and answer.model == "m-1"
    (body,), (headers,) = server.bodies, server.headers
    assert server.paths == [path] and body["model"] == "m" and body["temperature"] == 0.5 and body[limit] == 400
    assert body["messages"][-1] == {"role": "user", "content": "question 0"}
    if api == "anthropic":
        assert headers["x-api-key"] == KEY.reveal() and headers["anthropic-version"] == "2023-06-01"
        assert body["system"] == "system" and "Authorization" not in headers
    else:
        assert headers["Authorization"] == f"Bearer {KEY.reveal()}" and "x-api-key" not in headers
        assert body["messages"][0] == {"role": "system", "content": "system"}


@pytest.mark.parametrize(
    "url, message",
    [
        ("api.host.com", "no usable address"),
        ("ftp://host", "no usable address"),
        ("https://", "no usable address"),
        ("https://host:port", "no usable address"),
        ("https://a b.com", "no usable address"),
        ("http://api.host.com", "in the clear"),
        ("http://8.8.8.8", "in the clear"),
        ("https://me:hidden@host.com", "holds a user"),
        ("https://host.com?key=hidden", "holds a user, a query"),
        ("https://host.com/v1/messages", "ends in /v1/messages, which is added"),
    ],
)
def test_addresses_that_cannot_be_meant(url, message):
    with pytest.raises(ParamsError, match=message) as caught:
        address("anthropic", url)
    assert caught.value.where == "synthetic.base_url" and "hidden" not in str(caught.value)


def test_who_is_local():
    assert all(map(local, ("localhost", "127.0.0.1", "::1", "192.168.1.7", "10.0.0.1", "box", "box.local")))
    assert not any(map(local, ("api.anthropic.com", "8.8.8.8", "2001:4860:4860::8888")))


def test_nobody_there_is_told_after_some_tries(server, tmp_path):
    url, server.url = server.url, "http://127.0.0.1:9"
    with pytest.raises(InputError, match="5 requests in a row got no answer, the last: ConnectionError.*base_url"):
        run(server, tmp_path, requests(8), concurrency=1, max_tries=2)
    server.url = url
    ended, ledger = run(server, tmp_path, requests(8))
    assert not ended.failed and ledger.spent.requests == 8  # what never left was not counted


@pytest.mark.parametrize("value", ["", "   ", "short", "two words here", "line\nbreak-0123456789", "naïve-key-0123"])
def test_what_is_no_key_is_refused_unseen(value):
    with pytest.raises(InputError, match="environment variable MY_KEY") as caught:
        key_from({"MY_KEY": value}, "MY_KEY")
    assert not value.strip() or value not in str(caught.value)
    assert key_from({}, None) is None and key_from({"K": f" {KEY.reveal()}\n"}, "K").reveal() == KEY.reveal()


def test_a_key_that_a_server_repeats_is_taken_out(server, tmp_path):
    said = written(talks("x"))[:-1] + ', "echo": "' + KEY.reveal() + '"}'
    error = {"error": {"type": "authentication_error", "message": f"invalid key {KEY.reveal()}"}}
    server.script = [Fault(text=said), Fault(400, {"error": {"message": f"bad {KEY.reveal()}"}}), Fault(401, error)]
    with pytest.raises(InputError) as caught:
        run(server, tmp_path, requests(3), concurrency=1)
    assert KEY.reveal() not in str(caught.value) and "invalid key ***" in str(caught.value)
    log = (tmp_path / "requests.jsonl").read_text()
    assert KEY.reveal() not in log and log.count("***") == 3 and KEY.reveal() not in repr(KEY)


def test_the_key_follows_no_redirect_and_yields_to_no_netrc(server, tmp_path, monkeypatch):
    with model_server() as thief:
        server.script = [Fault(307, "", {"Location": thief.url + "/v1/messages"})]
        with pytest.raises(InputError, match="HTTP 307 .sent elsewhere"):
            run(server, tmp_path, requests(1))
        assert thief.seen == []
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    distant = Endpoint(params(api="openai", base_url=server.url), KEY)
    monkeypatch.setattr(endpoint, "local", lambda host: False)  # for a host of this machine the file is not even opened
    distant.ask(requests(1)[0])
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY.reveal()}"


# -- trouble --------------------------------------------------------------------------------------------------------

RATE = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down, see your billing page"}}


@pytest.mark.parametrize("api", ["anthropic", "openai"])
def test_a_server_in_trouble_is_asked_again_and_every_answer_comes_once(server, tmp_path, api):
    server.script = [
        Fault(429, RATE, {"Retry-After": "0"}),
        Fault(500, "<html>oops"),
        Fault(how="reset"),
        None,
        Fault(529, {"error": {"type": "overloaded_error", "message": "busy"}}),
        Fault(how="short"),
        Fault(503, ""),
    ]
    ended, ledger = run(server, tmp_path, requests(12), api)
    assert ended.failed == {} and ended.limit is None and len(ledger.answers) == 12
    # Two broke off when the server had done the work: those were charged twice, and counted.
    assert sum(server.answered.values()) == 14 and ledger.spent.requests == 14
    assert server.most_flying <= params().concurrency
    again, ledger = run(server, tmp_path, requests(12), api)
    assert len(server.seen) == 18 and ledger.spent.requests == 14


def test_a_server_that_hangs_is_left(server, tmp_path):
    server.script = [Fault(how="hang")]
    ended, ledger = run(server, tmp_path, requests(1), timeout_seconds=1.5)
    assert not ended.failed and len(server.seen) == 2 and ledger.spent.requests == 2
    worst = requests(1)[0].worst_input_tokens + 400
    assert ledger.spent.tokens > worst  # the one that hung counts in full


def test_retry_after_is_waited_for_by_all(server, tmp_path):
    server.script = [Fault(429, RATE, {"Retry-After": "1"})]
    run(server, tmp_path, requests(4), concurrency=1)
    assert server.times[1] - server.times[0] >= 0.99
    server.script = [Fault(429, RATE, {"Retry-After": "7200"})]
    with pytest.raises(InputError, match="asks to wait for 7,200 s"):
        run(server, tmp_path / "other", requests(4), concurrency=1)


@pytest.mark.parametrize(
    "api, status, error, message",
    [
        ("anthropic", 401, {"type": "authentication_error", "message": "invalid x-api-key"}, "check the key in A"),
        ("openai", 403, {"code": "unsupported_country", "message": "no"}, "does not let us in"),
        ("anthropic", 400, {"type": "invalid_request_error", "message": "credit balance is too low"}, "out of credit"),
        ("anthropic", 402, {"type": "billing_error", "message": "pay"}, "out of credit"),
        ("openai", 429, {"code": "insufficient_quota", "message": "You exceeded your current quota"}, "out of credit"),
        ("openai", 404, {"message": "The model `m` does not exist"}, "correct synthetic.model"),
    ],
)
def test_what_no_retry_mends_ends_it_at_once(server, tmp_path, api, status, error, message):
    server.script = [None, *[Fault(status, {"error": error})] * 20]
    with pytest.raises(InputError, match=message):
        run(server, tmp_path, requests(12), api)
    assert len(server.seen) <= 1 + params().concurrency
    server.script.clear()
    ended, ledger = run(server, tmp_path, requests(12), api)
    assert len(ledger.answers) == 12 and max(server.answered.values()) == 1


def test_one_refused_request_is_counted_and_many_end_it(server, tmp_path):
    refused = Fault(400, {"error": {"message": "prompt is too long"}})
    server.script = [None, refused]
    ended, ledger = run(server, tmp_path, requests(6), concurrency=1)
    assert list(ended.failed.values()) == ["HTTP 400: prompt is too long"] and ledger.spent.requests == 5
    server.script = [refused] * 9
    with pytest.raises(InputError, match="5 requests in a row got no answer, the last: HTTP 400: prompt is too long"):
        run(server, tmp_path / "other", requests(30), concurrency=1)
    assert len(server.seen) == 6 + 5


def test_asked_to_stop_it_waits_for_what_is_paid_for(server, tmp_path):
    with pytest.raises(Interrupted, match="every answer is kept"):
        run(server, tmp_path, requests(30), stop=lambda: len(server.seen) >= 4)
    first = sum(server.answered.values())
    assert 4 <= first <= 4 + params().concurrency
    ended, ledger = run(server, tmp_path, requests(30))
    assert set(server.answered.values()) == {1} and len(server.answered) == len(ledger.answers) == 30


# -- answers of another shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["anthropic", "openai"])
@pytest.mark.parametrize(
    "body", ["<html>", [], {"content": []}, {"choices": []}, {"content": [{"type": "text"}]}, {"choices": [{}]}]
)
def test_a_body_of_another_shape_is_kept_as_an_answer_without_text(server, tmp_path, api, body):
    server.script = [Fault(body=body)]
    ended, ledger = run(server, tmp_path, requests(1), api)
    (kept,) = ledger.answers.values()
    shape = api == "anthropic" and body == {"content": []}
    assert kept.answer.text == ("" if shape else None) and ledger.spent.requests == 1 and len(server.seen) == 1


@pytest.mark.parametrize("api", ["anthropic", "openai"])
@pytest.mark.parametrize("error", [{"code": 502, "message": "Upstream died"}, "Upstream died"])
def test_an_error_with_status_200_is_asked_again(server, tmp_path, api, error):
    """Routers tell so of a server that failed too late for a status; it was kept as the answer, and never asked again."""
    server.script = [Fault(body={"error": error})]
    ended, ledger = run(server, tmp_path, requests(1), api)
    assert not ended.failed and len(server.seen) == 2 and sum(server.answered.values()) == 1
    assert [kept.answer.text is not None for kept in ledger.answers.values()] == [True]
    assert ledger.spent.requests == 2  # it may have been charged
    server.script = [Fault(body={"error": {"code": "insufficient_quota", "message": "pay"}})]
    with pytest.raises(InputError, match="out of credit"):
        run(server, tmp_path / "other", requests(1), api)


def test_a_models_own_name_without_the_folder_of_its_file(server, tmp_path):
    for name, told in (("/home/me/m.gguf", "m.gguf"), ("meta/m-8b", "meta/m-8b"), (7, "")):
        server.script = [Fault(body={"model": name, "choices": [{"message": {"content": "x"}}]})]
        _, ledger = run(server, tmp_path / str(told), requests(1), "openai")
        assert [kept.answer.model for kept in ledger.answers.values()] == [told]


def test_cut_answers_are_known_by_either_word(server, tmp_path):
    for api, word in (("anthropic", "max_tokens"), ("openai", "length")):
        server.script = [Fault(end=word)]
        _, ledger = run(server, tmp_path / api, requests(1), api)
        assert [kept.answer.cut for kept in ledger.answers.values()] == [True]


# -- ledger and budget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("limit", ["requests", "tokens", "money"])
def test_no_limit_is_ever_passed(server, tmp_path, limit, usage):
    server.usage = usage
    server.script = [None, Fault(500, ""), None, Fault(how="reset"), None, None]
    prices = {"input_price": 3.0, "output_price": 15.0}
    budgets = {"requests": {"requests": 9}, "tokens": {"tokens": 4000}, "money": {"money": 0.05}}
    budget = {"requests": 1000, "tokens": 10**6, "money": 100.0} | prices | budgets[limit]
    ended, ledger = run(server, tmp_path, requests(60), budget=budget)
    assert ended.limit == limit and 3 <= len(ledger.answers) < 60
    assert sum(server.answered.values()) <= budget["requests"] and server.tokens <= budget["tokens"]
    assert ledger.spent.exceeded(params(budget=budget).budget) is None
    seen = len(server.seen)
    again, _ = run(server, tmp_path, requests(60), budget=budget)
    assert again.limit == limit and len(server.seen) == seen  # nothing is left over, nothing is sent
    more, ledger = run(server, tmp_path, requests(60), budget=budget | {limit: budget[limit] * 50})
    assert more.limit is None and len(ledger.answers) == 60
    assert sum(count - 1 for count in server.answered.values()) == 1  # the one that broke off


def test_a_limit_counts_what_is_in_flight_at_its_most(server, tmp_path):
    worst = requests(1)[0].worst_input_tokens + 400
    budget = {"tokens": 2 * worst + 50, "requests": 100}
    second = threading.Event()

    def hold(number: int) -> None:
        if number == 2:
            second.set()
        if number <= 2:  # time for a third one, which must not come
            second.wait(30)
            server.over.wait(0.3)

    server.on_request = hold
    run(server, tmp_path, requests(30), budget=budget, concurrency=8)
    assert server.most_flying == 2  # eight were allowed to fly


def test_a_budget_belongs_to_a_name_and_an_answer_to_everybody(server, tmp_path):
    run(server, tmp_path, requests(5), name="one", budget={"requests": 5})
    ended, ledger = run(server, tmp_path, requests(8), name="two", budget={"requests": 3})
    assert ended.limit is None and len(ledger.answers) == 8 and ledger.spent.requests == 3
    assert set(server.answered.values()) == {1}


def test_lines_of_a_killed_process(server, tmp_path):
    run(server, tmp_path, requests(3))
    path = tmp_path / "requests.jsonl"
    whole = path.read_bytes()
    sent = json.loads(whole.splitlines()[0]) | {"request": "f" * 32}
    path.write_bytes(whole + json.dumps(sent).encode() + b'\n{"type": "answer", "requ')
    values = params()
    with Ledger(tmp_path, values.name, values.budget, 400) as ledger:
        assert len(ledger.answers) == 3 and ledger.spent.requests == 4  # the one in flight counts
        with pytest.raises(InputError, match="another process is sending requests"):
            Ledger(tmp_path, values.name, values.budget, 400).__enter__()
    assert path.read_bytes().endswith(b"}\n") and path.read_bytes().startswith(whole)
    path.write_bytes(whole[:50] + b"\n" + whole[50:])
    with pytest.raises(InputError, match=r"requests.jsonl:1: not a line of this file"):
        Ledger(tmp_path, values.name, values.budget, 400).__enter__()


def test_a_full_disk_ends_it_before_anything_is_sent(server, tmp_path, monkeypatch):
    real, left = os.write, [7]

    def write(handle, data):
        if b'"type"' in bytes(data):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space") as caught:
        run(server, tmp_path, requests(9), concurrency=1)
    assert caught.value.filename.endswith("requests.jsonl") and len(server.seen) <= 4
