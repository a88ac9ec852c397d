"""What llama-perplexity does when something is wrong, played by scripts that print what it printed; about 4 s.

The real program is asked in tests/export/test_perplexity_agreement.py. Its faults come with load and cannot be
ordered, so here are stand-ins for them alone.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import time

import numpy as np
import pytest

from athanor.errors import GateError, InputError
from athanor.evaluation.perplexity import binary
from athanor.evaluation.perplexity.agreement import agree
from athanor.evaluation.perplexity.backends import TextScore
from athanor.evaluation.perplexity.binary import Binary, find, logits_bytes, read_logits
from athanor.evaluation.perplexity.gguf_file import read_facts
from athanor.evaluation.perplexity.windows import from_loss
from athanor.export.gguf import write_gguf
from athanor.export.source import make_source
from athanor.export.vocabulary import Vocabulary
from tests.evaluation.tiny import make_model, write_tiny_tokenizer

HEAD = "perplexity: calculating perplexity over 3 chunks, n_ctx=64, batch_size=2048, n_seq=32"
RUNNING = "[1]30.1000,[2]31.2000,[3]32.5000,"
FINAL = "Final estimate: PPL = 32.5000 +/- 1.50000"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    vocabulary = Vocabulary.load(folder / "tokenizer" / "tokenizer.model")
    write_gguf(folder / "m.gguf", make_source("tiny", make_model(tokenizer), tokenizer, vocabulary, {}), "f32")
    return folder / "m.gguf"


def program(tmp_path, *runs):
    """A program whose n-th run does the n-th of `runs` (shell), the last one for all after it."""
    path, count = tmp_path / "llama-perplexity", tmp_path / "count"
    cases = "".join(f"  {number})\n{run}\n;;\n" for number, run in enumerate(runs[:-1], 1))
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "version: 9 (stand-in)" && exit 0\n'
        f'echo x >> {count}\ncase $(wc -l < {count} | tr -d " ") in\n{cases}  *)\n{runs[-1]}\n;;\nesac\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def says(*lines, status=0):
    return "\n".join([*(f"echo '{line}'" for line in lines), f"exit {status}"])


def ask(path, model, timeout=60.0, **more):
    return Binary(path, model, exact=True, threads=1, timeout_seconds=timeout, **more).text("word " * 400, 64)


def runs(tmp_path):
    return len((tmp_path / "count").read_text().splitlines())


def test_a_whole_answer_is_taken(tmp_path, model):
    found = ask(program(tmp_path, says(HEAD, RUNNING, FINAL)), model)
    assert found.measured.perplexity == pytest.approx(32.5) and found.measured.stderr == pytest.approx(1.5)
    assert found.measured.tokens == 3 * 31 and found.measured.windows == 3
    assert found.facts == {"attempts": 1, "source": "final", "build": "9 (stand-in)"}


def test_the_printed_digits_are_no_disagreement(tmp_path, model):
    """2.0000 stands for anything from 1.99995 to 2.00005, 2.5e-5 of it either way: more than the tolerance at f32."""
    said = says(HEAD, "[1]2.1000,[2]2.0500,[3]2.0000,", "Final estimate: PPL = 2.0000 +/- 0.10000")
    found = ask(program(tmp_path, said), model)
    assert found.resolution == pytest.approx(2.5e-5)

    def ours(perplexity):
        return TextScore(from_loss(math.log(perplexity), None, 3 * 31, 3, None), None, None)

    for perplexity in (2.00004, 1.99996):
        assert agree("llama_cpp_f32", found, ours(perplexity), 1e-5, False) > 1e-5
    for perplexity in (2.0001, 1.9999):  # no more than that: the tolerance is what it was
        with pytest.raises(GateError, match="allowed 3.5e-05"):
            agree("llama_cpp_f32", found, ours(perplexity), 1e-5, False)
    with pytest.raises(GateError, match="allowed 1e-05"):  # a runtime that tells all digits
        agree("transformers", ours(2.00004), ours(2.0), 1e-5, False)


@pytest.mark.parametrize(
    "first",
    [
        says("nothing of use"),
        says(HEAD, "[1]30.1000,[2]31.2000,"),  # a running value is no result
        says(RUNNING),  # of how many chunks?
        says(HEAD, "[1]30.1000,", "Final estimate: PPL = 32.50"),
        says(HEAD, RUNNING, "Final estimate: PPL = 40.0000 +/- 1.50000"),
        says(),
    ],
)
def test_lost_lines_are_noticed_and_asked_for_again(first, tmp_path, model):
    found = ask(program(tmp_path, first, says(HEAD, RUNNING, FINAL)), model)
    assert found.measured.perplexity == pytest.approx(32.5) and found.facts["attempts"] == 2 == runs(tmp_path)


def test_the_last_chunk_stands_for_a_lost_final_line(tmp_path, model):
    found = ask(program(tmp_path, says(HEAD, RUNNING)), model)
    assert found.facts["source"] == "last-chunk" and found.measured.stderr is None
    assert found.measured.perplexity == pytest.approx(32.5)


def test_it_gives_up_loudly_and_after_a_bounded_number_of_runs(tmp_path, model):
    with pytest.raises(GateError, match="incomplete in 6 runs: 2 of 3 chunks"):
        ask(program(tmp_path, says(HEAD, "[1]30.1000,[2]31.2000,")), model)
    assert runs(tmp_path) == 6


@pytest.mark.parametrize(
    "said, complaint, kind",
    [
        (says("the data file you provided tokenizes to only 100 tokens"), "100 tokens, and two contexts of 64", InputError),
        (says("failed to load model", status=1), "ended with status 1: failed to load model", GateError),
        (says(HEAD, "perplexity : failed to decode"), "ended with status 0", GateError),
        (says(HEAD, "[1]nan,[2]nan,[3]nan,", "Unexpected negative standard deviation of log(prob)"), "finite", GateError),
        (says(HEAD, "[1]30.1000,[2]-nan,[3]-nan,"), "not a finite number", GateError),
        (says(HEAD, RUNNING, "Final estimate: PPL = inf +/- nan"), "not a finite number", GateError),
    ],
)
def test_failures_at_status_0_are_failures(said, complaint, kind, tmp_path, model):
    with pytest.raises(kind, match=complaint):
        ask(program(tmp_path, said), model)
    assert runs(tmp_path) == 1


def test_one_that_hangs_is_ended(tmp_path, model):
    began = time.monotonic()
    with pytest.raises(GateError, match="no answer in 1 s"):
        ask(program(tmp_path, "exec sleep 600"), model, timeout=1.0)
    assert time.monotonic() - began < 300


def test_it_runs_quietly_apart_and_without_a_terminal(tmp_path, model):
    told = tmp_path / "told"
    run = (
        f'echo "$PWD" > {told}; echo "$LC_ALL $GOMP_SPINCOUNT $OMP_WAIT_POLICY" >> {told}; echo "$@" >> {told}; '
        f"cat >> {told}; wc -c < text.txt >> {told}\n"
    )
    ask(program(tmp_path, run + says(HEAD, RUNNING, FINAL)), model)
    folder, environment, flags, size = told.read_text().splitlines()
    assert "athanor-perplexity" in folder and not os.path.exists(folder)
    assert environment == "C 0 passive" and int(size) == 5 * 400 + 1
    for wanted in ("-fa off -ctk f32 -ctv f32", "-c 64", "-t 1", "--no-warmup", "--save-all-logits logits.bin"):
        assert wanted in flags


def test_a_program_that_is_not_there_is_told(tmp_path, model, monkeypatch):
    with pytest.raises(InputError, match="cannot be run"):
        ask(tmp_path / "none", model)
    monkeypatch.setenv("LLAMA_PERPLEXITY", str(tmp_path / "none"))
    with pytest.raises(InputError, match="LLAMA_PERPLEXITY: .*is no program"):
        find()


def test_more_context_than_the_model_has_and_conversations_are_refused(tmp_path, model):
    path = program(tmp_path, says(HEAD, RUNNING, FINAL))
    with pytest.raises(InputError, match="made for contexts of 128 tokens"):
        Binary(path, model, exact=True, threads=1, timeout_seconds=9).text("word " * 400, 256)
    with pytest.raises(InputError, match="parses no control symbol"):
        Binary(path, model, exact=True, threads=1, timeout_seconds=9).nats([])


def test_a_damaged_file_is_one_clear_error(tmp_path, model):
    (tmp_path / "m.gguf").write_bytes(model.read_bytes()[:200])
    for path in (tmp_path / "m.gguf", tmp_path / "none.gguf"):
        with pytest.raises(InputError, match="gguf: (not a whole GGUF file|file not found)"):
            read_facts(path)


def write_logits(path, nats, context=8, vocab=5, floor=()):
    """A file as the program writes it: per target a scale, the lowest value and 16-bit steps above it."""
    scored = context - context // 2 - 1
    count = len(nats) // scored
    tokens = np.arange(count * context, dtype="<i4") % vocab
    rows = np.zeros((len(nats), 2 * ((vocab + 1) // 2) + 4), dtype="<u2")
    head = np.tile(np.array([20 / 65535, -20.0], dtype="<f4"), (len(nats), 1))
    rows[:, :4] = head.view("<u2")
    targets = tokens.reshape(count, context)[:, context // 2 + 1 :].reshape(-1)
    rows[np.arange(len(nats)), targets + 4] = np.round((20 - np.array(nats)) / 20 * 65535)
    for number in floor:
        rows[number, targets[number] + 4] = 0
    path.write_bytes(struct.pack("<8siii", b"_logits_", context, vocab, count) + tokens.tobytes() + rows.tobytes())
    assert path.stat().st_size == 20 + logits_bytes(count, context, vocab)


def test_the_logits_file_is_read_and_a_torn_one_is_not(tmp_path):
    nats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    write_logits(tmp_path / "l.bin", nats)
    found = read_logits(tmp_path / "l.bin", 8)
    assert found.exact and found.count == 2 and np.allclose(found.nats, nats, atol=2e-4)
    assert found.tokens.tolist() == (np.arange(16) % 5).reshape(2, 8).tolist()
    whole = (tmp_path / "l.bin").read_bytes()
    for data in (whole[:-1], whole[:19], b"", b"x" + whole[1:]):
        (tmp_path / "torn").write_bytes(data)
        assert read_logits(tmp_path / "torn", 8) is None
    assert read_logits(tmp_path / "none", 8) is None and read_logits(tmp_path / "l.bin", 16) is None
    write_logits(tmp_path / "cut", nats, floor=[2])
    found = read_logits(tmp_path / "cut", 8)
    assert not found.exact and np.isnan(found.nats).tolist() == [False, False, True, False, False, False]


def test_the_logits_file_decides_where_every_line_is_lost(tmp_path):
    nats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    write_logits(tmp_path / "l.bin", nats)
    logits = read_logits(tmp_path / "l.bin", 8)
    found = binary.judge(0, "", 8, logits, "m.gguf")
    assert found.source == "logits-file" and found.perplexity == pytest.approx(math.exp(3.5), rel=1e-3)
    with pytest.raises(binary.Lost, match="log probabilities say"):  # the lines are of something else
        binary.judge(0, "over 2 chunks [1]9.0,[2]9.0,", 8, logits, "m.gguf")
    write_logits(tmp_path / "cut", nats, floor=[2])
    with pytest.raises(binary.Lost, match="0 of 2 chunks"):
        binary.judge(0, "", 8, read_logits(tmp_path / "cut", 8), "m.gguf")
