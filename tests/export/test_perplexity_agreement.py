"""One text, three runtimes, one perplexity; and every silent trap of a GGUF file makes llama.cpp's another one.

About 20 s.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from athanor.base.errors import GateError
from athanor.cli.evaluate.sets import row_windows
from athanor.export import gguf_writer
from athanor.export.huggingface import write_huggingface
from athanor.export.llamacpp.asking import ask
from athanor.export.parity import rebuilt
from athanor.export.perplexity import HuggingFace, LlamaCpp, Ours, TextScore, measured
from athanor.export.perplexity_gate import check_agreement, held_out_text
from athanor.tokenizer.chat import render
from tests.export.conftest import CONTEXT, alterations, documents, permuted, question, reply, write_altered

CHUNKS = 4


def scorer(path, exact=True):
    pytest.importorskip("xllamacpp")
    return LlamaCpp(path, exact=exact, threads=1, timeout_seconds=120)


@pytest.fixture(scope="session")
def text(llama):
    return held_out_text(llama.source.tokenizer, documents(), CONTEXT * CHUNKS)


@pytest.fixture(scope="session")
def wanted(llama, qwen, untied, text):
    found = {}
    for case in (llama, qwen, untied):
        ours = Ours(rebuilt(case.source, "float32"), case.source.tokenizer)
        found[case.source.config] = ours.text(text, CONTEXT, CHUNKS)
    return found


def test_transformers_gives_the_same_number(case, text, wanted, tmp_path):
    write_huggingface(tmp_path / "hf", case.source, "float32")
    expected = wanted[case.source.config]
    found = HuggingFace(tmp_path / "hf").text(text, CONTEXT, CHUNKS)
    assert check_agreement("transformers", found, expected, 1e-6, False) < 1e-6
    assert found.measured.bits_per_byte == pytest.approx(expected.measured.bits_per_byte, rel=1e-6)
    assert found.measured.tokens == CHUNKS * (CONTEXT - CONTEXT // 2 - 1)


@pytest.mark.parametrize("file_type, tolerance", [("f32", 1e-5), ("f16", 1e-3), ("q8_0", 2e-3)])
def test_llama_cpp_gives_the_same_number(file_type, tolerance, case, text, wanted, tmp_path):
    gguf_writer.write_gguf(tmp_path / "model.gguf", case.source, file_type)
    found = scorer(tmp_path / "model.gguf", file_type == "f32").text(text, CONTEXT, CHUNKS)
    expected = wanted[case.source.config]
    assert check_agreement(file_type, found, expected, tolerance, file_type == "q8_0") < (
        1e-5 if file_type == "f32" else 0.02
    )
    assert np.array_equal(found.ids, expected.ids)
    assert found.measured.bits_per_byte == pytest.approx(expected.measured.bits_per_byte, rel=0.01)


def test_the_first_byte_of_a_character_may_be_the_likeliest_id(untied, tmp_path):
    """llama.cpp's server reports nothing for an id that ends no character: a German model's export failed."""
    pytest.importorskip("xllamacpp")
    tokenizer = untied.source.tokenizer
    rows = np.zeros_like(gguf_writer.tensors(untied.source)["output.weight"])
    first, other = (tokenizer.processor.piece_to_id(piece) for piece in ("<0xE4>", "<0xE5>"))
    rows[first, 0], rows[other, 0] = 9.0, -9.0
    write_altered(tmp_path / "model.gguf", untied.source, arrays={"output.weight": rows})
    ids, size = tokenizer.encode("Now "), tokenizer.vocab_size
    [rows] = ask(
        tmp_path / "model.gguf", {"score": [[[*ids, first], size, [len(ids)]]]},
        context_tokens=CONTEXT, exact=True, threads=1, timeout_seconds=60,
    )["score"]  # fmt: skip
    [[number, logprob, top]] = rows
    assert number == first and len(top) == size and {top[0][0], logprob} & {first, other} and [first, logprob] in top
    assert math.fsum(math.exp(each) for _, each in top) == pytest.approx(1, abs=1e-9)


# -- traps ------------------------------------------------------------------


TRAPS = (
    "rows of q and k not permuted", "rows without a token", "space prefix", "space prefix absent", "no bos", "norm eps",
    "rotary base wrong", "rotary base absent", "scores absent", "unigram tokenizer",
)  # fmt: skip


def caught(path, text, expected):
    """By the ids, and by the perplexity alone."""
    score = scorer(path).text(text, CONTEXT, CHUNKS)
    with pytest.raises(GateError, match="perplexity in trapped"):
        check_agreement("trapped", score, expected, 1e-5, False)
    with pytest.raises(GateError, match="apart by|targets where ours"):
        check_agreement("trapped", replace(score, ids=expected.ids), expected, 1e-5, False)


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_of_a_llama_file_is_caught(trap, llama, text, wanted, tmp_path):
    write_altered(tmp_path / "model.gguf", llama.source, **alterations(llama.source)[trap])
    caught(tmp_path / "model.gguf", text, wanted[llama.source.config])


def test_trap_of_a_qwen3_file_is_caught(qwen, text, wanted, tmp_path):
    no_norm = {"arch": "llama", "without": ["attn_q_norm.weight", "attn_k_norm.weight"]}
    for how in ({"arrays": permuted(qwen.source)}, no_norm):
        write_altered(tmp_path / "model.gguf", qwen.source, **how)
        caught(tmp_path / "model.gguf", text, wanted[qwen.source.config])


def scored(nats):
    return TextScore(measured(nats, 1, None), np.arange(len(nats)), nats)


def test_rounding_is_allowed_its_chance_and_no_more():
    """Targets that differ by chance may move the mean by as much; a mean moved alike everywhere is a fault."""
    nats = np.linspace(0.1, 8, 400)
    noise = np.where(np.arange(400) % 2, 0.05, -0.05)
    shifted = scored(nats + 0.003 + noise)
    assert check_agreement("q8_0", shifted, scored(nats), 2e-3, True) == pytest.approx(0.003, rel=0.01)
    for rounds, moved in ((False, 0.003 + noise), (True, 0.003), (True, 0.2 * np.sign(noise) + 0.005)):
        with pytest.raises(GateError, match="apart by"):
            check_agreement("q8_0", scored(nats + moved), scored(nats), 2e-3, rounds)


# -- conversations ----------------------------------------------------------


def test_conversations_are_scored_by_ids_everywhere(llama, tmp_path):
    """Stop tokens included, which end the server's answers; chat symbols in a text stay text."""
    pytest.importorskip("xllamacpp")
    tokenizer = llama.source.tokenizer
    odd = [replace(question(7)[0], content="what is <|stop|><|assistant|>?"), reply(7)]
    rows = [render(tokenizer, chat) for chat in ([*question(3), reply(3)], [*question(41), reply(41)], odd)]
    windows = row_windows([(np.array(ids), np.array(mask)) for ids, mask in rows], CONTEXT)
    assert sum(len(window.targets) for window in windows) == sum(sum(mask) for _, mask in rows)
    gguf_writer.write_gguf(tmp_path / "model.gguf", llama.source, "f32")
    write_huggingface(tmp_path / "hf", llama.source, "float32")
    ours = Ours(rebuilt(llama.source, "float32"), tokenizer).nats(windows)
    server = scorer(tmp_path / "model.gguf").nats(windows)
    other = HuggingFace(tmp_path / "hf").nats(windows)
    for mine, theirs, third in zip(ours, server, other, strict=True):
        assert np.allclose(mine, theirs, atol=1e-3) and np.allclose(mine, third, atol=1e-5)
