"""The runtimes that are not ours, with real tiny models."""

from __future__ import annotations

import json
import queue
import shutil
import sys
import time
from pathlib import Path

import pytest

from athanor.base.errors import InputError
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids, fit
from athanor.export.gguf_reader import read_header
from athanor.serving.backends.base import Request, Stops
from athanor.serving.backends.torch_backend import open_backend as open_exact
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer
from tests.evaluation.tiny import always_says
from tests.export.conftest import question, train_model
from tests.serving.models_tiny import write_export

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
import base_gguf
import tiny as foreign

EXACT = {"device": "cpu", "threads": 1, "rows": 1, "cache_bytes": 1 << 28}
PATIENCE = 120.0  # seconds; only a test that fails waits this long
HELLO = (Message("user", "hello"),)


class Answers:
    """Asks a backend and collects events."""

    def __init__(self, backend):
        self.backend, self.count = backend, 0

    def begin(self, messages, limit=None, stop=(), **sampling):
        self.count += 1
        events = queue.Queue()
        self.backend.submit(Request(messages, limit, sampling, stop, self.count), events.put)
        return self.count, events

    def __call__(self, messages=HELLO, limit=None, stop=(), **sampling):
        return collect(self.begin(messages, limit, stop, **sampling)[1])


def collect(events):
    found = []
    while not found or found[-1]["type"] not in ("end", "error"):
        found.append(events.get(timeout=PATIENCE))
    assert events.empty()
    return found


def said(events):
    return "".join(event["text"] for event in events if event["type"] == "text")


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """A model whose best id is far from the second, and its export: (model, tokenizer, directory)."""
    from athanor.base.artifacts import new_dir
    from athanor.tokenizer_training.params import TokenizerParams
    from athanor.tokenizer_training.train import train, write_tokenizer
    from tests.export.conftest import documents, reply

    folder = tmp_path_factory.mktemp("decided")
    params = TokenizerParams(512, 1_000_000, 10_000, 0.9999, 16, False)
    texts = documents() + [m.content for n in range(100) for m in (*question(n), reply(n))]
    with new_dir(folder / "tokenizer") as made:
        write_tokenizer(made, train(texts, params), {})
    tokenizer = Tokenizer.load(folder / "tokenizer")
    model = train_model(tokenizer, qk_norm=False)
    export = write_export(folder / "export", model, tokenizer, folder / "tokenizer", types=("f32", "f16"))
    return model, tokenizer, export


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A foreign directory with a chat template, and the same as GGUF."""
    folder = foreign.make_base(tmp_path_factory.mktemp("bases") / "qwen3", "qwen3")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((folder / "tokenizer_config.json").read_text()), "chat_template": CHATML})
    )
    base_gguf.write(folder.parent / "base.gguf", folder)
    return folder, folder.parent / "base.gguf"


CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def llamas():
    """Opens GGUF files, each once; closed at the end."""
    pytest.importorskip("xllamacpp")
    from athanor.serving.backends.llamacpp_backend import open_backend

    opened = {}

    def get(path, **spec):
        if path not in opened:
            opened[path] = open_backend({"path": str(path), "threads": 1, "rows": 2, **spec})
        return opened[path]

    yield get
    for backend in opened.values():
        backend.close()


@pytest.fixture(scope="module")
def hub(bases):
    from athanor.serving.backends.transformers_backend import open_backend

    backend = open_backend({"path": str(bases[0]), "device": "cpu"})
    yield backend
    backend.close()


# -- ours through llama.cpp ------------------------------------------------------------------


@pytest.mark.parametrize("file_type", ["f32", "f16"])
def test_greedy_text_is_that_of_our_own_engine(decided, llamas, file_type):
    model, tokenizer, export = decided
    ask = Answers(llamas(export / f"model-{file_type}.gguf"))
    assert ask.backend.info["template"] == "athanor" and ask.backend.info["defaults"]["temperature"] == 0
    chats = [question(n) for n in range(0, 40, 5)]
    chats.append([Message("system", "Be <|user|> brief."), *question(3), Message("assistant", ""), *question(4)])
    prompts = [prompt_ids(tokenizer, chat) for chat in chats]
    for chat, ids in zip(chats, prompts, strict=True):
        wanted = generate(model, [ids], max_new_tokens=12, stop_ids=end_ids(tokenizer))[0]
        events = ask(chat, 12)
        assert events[0] == {"type": "start", "prompt_tokens": len(ids), "forgotten": 0}
        assert said(events) == tokenizer.decode(wanted.ids)
        assert events[-1]["reason"] == ("stop" if wanted.stopped else "length")
        assert events[-1]["tokens"] == len(wanted.ids)


@pytest.fixture(scope="module")
def talker(tokenizer, tmp_path_factory):
    """Exports of models that say one id forever: its text, or a control id that ends the answer."""

    def export(token, context=128):
        folder = tmp_path_factory.mktemp("talker")
        (folder / "t").mkdir()
        (folder / "t" / "tokenizer.model").write_bytes(tokenizer.model_bytes)
        model = always_says(tokenizer, token, context)
        return write_export(folder / "export", model, tokenizer, folder / "t", types=("f32",)) / "model-f32.gguf"

    return export


def test_an_answer_ends_at_every_control_id(tokenizer, talker, llamas):
    for name in ("<|stop|>", "<|eos|>", "<|user|>", "<|bos|>"):
        events = Answers(llamas(talker(tokenizer.control_ids[name])))(limit=8)
        assert said(events) == "" and events[-1] == {**events[-1], "reason": "stop", "tokens": 0}, name


def test_half_a_character_is_never_shown_and_counts_as_a_token(tokenizer, talker, llamas):
    byte = tokenizer.encode("\u2581")[0]  # the first of three bytes
    events = Answers(llamas(talker(byte)))(limit=5)
    assert set(said(events)) == {"\ufffd"} and events[-1]["tokens"] == 5


@pytest.fixture(scope="module")
def endless(tokenizer, talker, llamas):
    """Says " the" until its large context is full."""
    return llamas(talker(tokenizer.encode(" the")[0], 8192))


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(endless):
    events = Answers(endless)(limit=50, stop=["the the the", "nowhere"])
    assert said(events) == " " and events[-1]["reason"] == "stop"
    events = Answers(endless)(limit=3, stop=["the the the x"])
    assert said(events) == " the the the" and events[-1]["reason"] == "length"


@pytest.mark.parametrize("which", ["llama.cpp", "transformers"])
def test_a_cancelled_answer_ends_early_and_the_model_answers_again(which, request):
    ask = Answers(request.getfixturevalue("endless" if which == "llama.cpp" else "hub"))
    limit = 8000 if which == "llama.cpp" else 200
    events, found = queue.Queue(), []

    def emit(event):  # cancels from the thread that reads: whatever has arrived by then, none of it is passed on
        found.append(event)
        if len(found) == 3:
            ask.backend.cancel(99)
        events.put(event)

    ask.backend.submit(Request(HELLO, limit, {"temperature": 0}, (), 99), emit)
    collect(events)
    assert found[-1]["reason"] == "stopped" and found[2]["tokens"] <= found[-1]["tokens"] < limit
    if which == "llama.cpp":
        assert len(found) == 4
        end = time.monotonic() + 4  # all of the answer takes it longer
        with ask.backend.connected() as client:
            while any(slot["is_processing"] for slot in client.ask("/slots")):
                assert time.monotonic() < end, "llama.cpp goes on with what nobody reads"
    assert ask(limit=3)[-1]["tokens"] <= 3
    ask.backend.cancel(99)  # long over


def test_llama_cpp_tells_the_probabilities_of_the_exact_weights(decided, llamas):
    model, tokenizer, export = decided
    request = Request(question(5), 6, {"temperature": 0}, (), 1, {"top_logprobs": 2})
    told = []
    for backend in (llamas(export / "model-f32.gguf"), open_exact({"path": str(export / "hf"), **EXACT})):
        events = queue.Queue()
        backend.submit(request, events.put)
        told.append([row for event in collect(events) for row in event.get("logprobs", [])])
    theirs, ours = told
    assert len(theirs) == len(ours) > 1
    for one, other in zip(theirs, ours, strict=True):
        assert (one["token"], one["bytes"]) == (other["token"], other["bytes"])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3) and len(one["top_logprobs"]) == 2


def test_answers_are_made_side_by_side(endless):
    ask = Answers(endless)
    number, slow = ask.begin(HELLO, 8000)
    first = [slow.get(timeout=PATIENCE) for _ in range(2)]
    assert ask(limit=3)[-1]["reason"] == "length"  # while the other is still talking
    ask.backend.cancel(number)
    assert (first + collect(slow))[-1]["reason"] == "stopped"


def test_the_oldest_exchanges_are_forgotten_as_our_own_engine_does(decided, llamas):
    _, tokenizer, export = decided
    ask = Answers(llamas(export / "model-f32.gguf"))
    context = ask.backend.info["context_tokens"]
    chat = [Message("system", "Be brief.")]
    for n in range(12):
        chat += [*question(n), Message("assistant", "apple river")]
    chat += question(50)
    kept, forgotten = fit(chat, lambda some: len(prompt_ids(tokenizer, some)), context_tokens=context, reserve_tokens=8)
    assert forgotten > 0
    start = ask(chat, 8)[0]
    assert start == {"type": "start", "prompt_tokens": len(prompt_ids(tokenizer, kept)), "forgotten": forgotten}
    error = ask([Message("user", "apple " * 500)])[-1]
    assert error["kind"] == "request" and "maximum context length" in error["message"]


def test_an_answer_fills_the_context_and_no_more(decided, llamas):
    ask = Answers(llamas(decided[2] / "model-f32.gguf"))
    start, *_, end = ask(question(1), 10_000, temperature=3.0, seed=5)
    assert end["reason"] == "stop" or start["prompt_tokens"] + end["tokens"] == ask.backend.info["context_tokens"]


def test_equal_seeds_give_equal_text_and_others_do_not(decided, llamas):
    ask = Answers(llamas(decided[2] / "model-f32.gguf"))
    texts = [said(ask(limit=20, temperature=2.0, seed=seed)) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    assert said(ask(limit=9, temperature=2.0, top_k=1)) == said(ask(limit=9))  # the filter leaves the best alone


def test_settings_that_cannot_be_honoured_are_the_callers_fault(decided, llamas, hub):
    ask = Answers(llamas(decided[2] / "model-f32.gguf"))
    for error, word in (
        (ask(repetition_penalty=1.2)[-1], "repetition_penalty"),
        (ask(top_p=0)[-1], "top_p"),
        (ask([Message("assistant", "x")])[-1], "roles"),
        (Answers(hub)(temperature=-1)[-1], "temperature"),
        (Answers(hub)([Message("system", "x"), *HELLO])[-1], "no system here"),
    ):
        assert error["type"] == "error" and error["kind"] == "request" and word in error["message"]


def test_a_file_that_does_not_belong_to_this_code_is_refused(decided, bases, llamas, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(decided[2], export)
    path = export / "model-f32.gguf"
    key = read_header(path)["athanor.template_hash"]
    path.write_bytes(path.read_bytes().replace(key.encode(), b"0" * 64))
    with pytest.raises(InputError, match=f"template.*{'0' * 64}.*{key}"):
        llamas(path)
    (export / "hf" / "tokenizer.model").unlink()
    with pytest.raises(InputError, match="tokenizer is not beside it"):
        llamas(path)
    whole = bases[1].read_bytes()
    for size, reason in ((10, "GGUF"), (2000, "GGUF"), (len(whole) - 400, "cannot load it .*(bounds|incomplete)")):
        torn = tmp_path / "torn.gguf"
        torn.write_bytes(whole[:size])
        with pytest.raises(InputError, match=reason):
            llamas(torn)


def test_headers_are_read_as_the_gguf_package_reads_them(decided, bases):
    from gguf import GGUFReader

    for path in (decided[2] / "model-f16.gguf", bases[1]):
        fields = GGUFReader(path).fields.items()
        wanted = {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}
        found = read_header(path)
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            told = wanted[name]
            assert value == (len(told) if isinstance(told, list) and told and isinstance(told[0], str) else told)


def test_room_for_keys_and_values_limits_rows_first_then_the_context():
    from athanor.serving.backends.llamacpp_backend import fit_cache

    header = {
        "general.architecture": "x",
        "x.attention.head_count": 4,
        "x.attention.head_count_kv": [2, 1],
        "x.embedding_length": 64,
        "x.block_count": 2,
        "x.context_length": 4096,
    }
    each = 2 * 2 * (16 + 16) * 2
    assert fit_cache(header, 4, 4 * 4096 * each) == (4096, 4)
    assert fit_cache(header, 4, 2 * 4096 * each) == (4096, 2)
    assert fit_cache(header, 4, 2048 * each) == (2048, 1)
    assert fit_cache(header, 4, 1) == (512, 1)


# -- foreign models ------------------------------------------------------------------------------


def test_a_foreign_file_uses_its_own_template(bases, llamas):
    folder, path = bases
    ask = Answers(llamas(path))
    assert ask.backend.info["template"] == "foreign" and ask.backend.info["defaults"]["temperature"] > 0
    start, *_, end = ask(limit=6, temperature=0)
    assert start["prompt_tokens"] > 3 and end["tokens"] <= 6


def test_transformers_answers_as_its_own_generate(bases, hub):
    import torch

    ids = hub.prompt(Request(HELLO), 20).ids
    made = hub.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    wanted = [number for number in made if number not in hub.ends]
    start, *rest, end = Answers(hub)(limit=20, temperature=0)
    assert start["prompt_tokens"] == len(ids) and end["tokens"] == len(wanted)
    assert said(rest) == hub.tokenizer.decode(wanted, skip_special_tokens=True)
    assert all(event["text"] for event in rest)


def test_transformers_stops_at_a_text_and_repeats_itself_for_a_seed(hub):
    ask = Answers(hub)
    whole = said(ask(limit=30, temperature=0))
    stop = whole[5:8]
    assert said(ask(limit=30, temperature=0, stop=[stop])) == whole[: whole.index(stop)]
    texts = [said(ask(limit=20, temperature=1.5, top_p=0.95, min_p=0.01, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("which", ["hub", "llama"])
def test_a_foreign_model_goes_on_with_an_answer_and_with_a_text(which, bases, request):
    backend = request.getfixturevalue("hub") if which == "hub" else request.getfixturevalue("llamas")(bases[1])
    ask = Answers(backend)
    opened, begun = ask(limit=3, temperature=0)[0], ask([*HELLO, Message("assistant", "one two")], 3, temperature=0)[0]
    assert begun["prompt_tokens"] > opened["prompt_tokens"]
    texts = []
    for prompt in ("one two", hub_ids(bases[0], "one two")):
        events = queue.Queue()
        backend.submit(Request((), 6, {"temperature": 0}, id=1000, prompt=prompt), events.put)
        texts.append(said(collect(events)))
    assert texts[0] == texts[1]


def hub_ids(folder, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


@pytest.mark.parametrize("name", ["top_logprobs", "presence_penalty", "json_schema"])
def test_what_only_exact_weights_do_is_refused_by_name(hub, name):
    events = queue.Queue()
    hub.submit(Request(HELLO, 3, steering={name: 1}, id=1001), events.put)
    (error,) = collect(events)
    assert error["kind"] == "request" and name.replace("json_schema", "response_format") in error["message"]


def test_an_answer_that_waits_can_be_cancelled_and_others_are_made(hub):
    ask = Answers(hub)
    (first, one), (second, two) = ask.begin(HELLO, 200, temperature=0), ask.begin(HELLO, 200)
    one.get(timeout=PATIENCE)
    ask.backend.cancel(second)
    assert collect(two) == [{"type": "end", "reason": "stopped", "tokens": 0, "seconds": 0.0}]
    ask.backend.cancel(first)
    assert collect(one)[-1]["type"] == "end"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("no template", "no chat template"),
        ("torn", "cannot load it"),
        ("pickle", "cannot load it"),
        ("missing weight", "missing keys"),
        ("no config", "config.json is missing"),
    ],
)
def test_a_broken_directory_is_refused_with_the_reason(bases, tmp_path, damage, reason):
    from athanor.model.tensorfile import read_tensors, write_tensors
    from athanor.serving.backends.transformers_backend import open_backend

    folder = tmp_path / "model"
    shutil.copytree(bases[0], folder)
    weights = folder / "model.safetensors"
    if damage == "no template":
        values = json.loads((folder / "tokenizer_config.json").read_text())
        del values["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
    elif damage == "torn":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "pickle":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    elif damage == "missing weight":
        tensors = read_tensors(weights)
        del tensors["model.norm.weight"]
        write_tensors(weights, tensors, {"format": "pt"})
    else:
        (folder / "config.json").unlink()
    with pytest.raises(InputError, match=reason):
        open_backend({"path": str(folder), "device": "cpu"})


# -- stop texts ------------------------------------------------------------------------------------


def test_stop_texts_are_found_however_the_text_is_cut():
    text, stops = "one two\n\nUser: three END", ["\n\nUser:", "END", ""]
    for size in (1, 2, 3, 7, 100):
        for stop in (stops, ["nowhere", "END?"]):
            held = Stops(stop)
            shown = "".join(held.add(text[start : start + size]) for start in range(0, len(text), size))
            whole = shown + held.rest()
            assert whole == ("one two" if stop is stops else text)
            assert held.found == (stop is stops)
