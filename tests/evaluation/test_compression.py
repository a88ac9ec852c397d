"""Reference lines: sizes of the real tools, a ratio of sums with its error, and the same texts as the model's."""

from __future__ import annotations

import lzma
import math
import random
import shutil
import subprocess

import numpy as np
import pytest

from athanor.base.errors import GateError, InputError
from athanor.evaluation.compression import (
    bpb_facts,
    choose,
    compression_rates,
    encode,
    gzip_bytes,
    model_rates,
    rate,
    xz_bytes,
    xz_extreme_bytes,
    xz_raw_bytes,
)
from athanor.model.validation import BitsPerByte, bits_per_byte, pooled
from athanor.text.documents import Document
from tests.evaluation.tiny import make_model


def samples():
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    sizes = (1, 10, 100, 1000, 4096, 4097, 50_000)
    texts = [" ".join(draw.choice(words) for _ in range(size))[:size].encode() for size in sizes]
    return [b"", "é▁\x00\n".encode(), draw.randbytes(3000), *texts]


@pytest.mark.parametrize(
    ("size", "command"),
    [(gzip_bytes, ["gzip", "-9n"]), (xz_bytes, ["xz", "-9", "-T1"]), (xz_extreme_bytes, ["xz", "-9e", "-T1"])],
)
def test_sizes_are_those_of_the_command_line_tools(size, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    for data in samples():
        assert size(data) == len(subprocess.run(command, input=data, capture_output=True, check=True).stdout)


def test_a_small_dictionary_changes_no_size():
    for data in samples():
        assert xz_bytes(data) == len(lzma.compress(data, preset=9))
        assert xz_raw_bytes(data) < xz_bytes(data)


def test_rate_is_a_ratio_of_sums_with_the_error_of_one():
    found = rate([10, 30], [2, 10])
    ratio = 40 / 12
    residuals = [10 - ratio * 2, 30 - ratio * 10]
    assert found.bpb == pytest.approx(ratio) and found.bytes == 12 and found.documents == 2
    assert found.stderr == pytest.approx(math.sqrt(2 * sum(r * r for r in residuals)) / 12)
    assert rate([8 * s for s in (3, 5, 9)], [3, 5, 9]).stderr == pytest.approx(0, abs=1e-12)
    assert rate([8.0], [3]).stderr is None and pooled({"a": rate([8.0], [3]), "b": found}).stderr is None
    with pytest.raises(InputError):
        rate([], [])


def test_documents_are_compressed_one_at_a_time():
    text = "the same sentence, over and over. " * 20
    table = compression_rates({"a": [text] * 5, "b": ["other words " * 30]})
    assert table["xz"]["a"].bits == 5 * 8 * xz_bytes(text.encode())
    assert table["xz_joined"]["a"].bits < table["xz"]["a"].bits / 3
    assert table["gzip"]["all"].bytes == 5 * len(text) + 360
    assert table["gzip"]["all"].bits == table["gzip"]["a"].bits + table["gzip"]["b"].bits


def documents(count=30, size=400):
    def text(i, source):
        return f"{source} {i} " + "".join(random.Random(f"{source}{i}").choices("abcdé \n", k=size))

    return [Document(text(i, s), s, "prose", "MIT", "val") for s in ("two", "one") for i in range(count)]


def test_choice_is_seeded_bounded_and_independent_of_order():
    rows = documents()
    chosen = choose(rows, 3000, 1)
    assert list(chosen) == ["one", "two"]
    assert chosen == choose(rows[::-1], 3000, 1) != choose(rows, 3000, 2)
    for source, taken in chosen.items():
        assert 2998 <= sum(len(held.text.encode()) for held in taken) <= 3000
        assert [held.complete for held in taken] == [True] * (len(taken) - 1) + [False]
        full = {row.text for row in rows if row.source == source}
        assert all(held.text in full for held in taken[:-1]) and any(t.startswith(taken[-1].text) for t in full)
    whole = choose(rows, 10**6, 1)
    assert sum(len(taken) for taken in whole.values()) == 60 and all(h.complete for t in whole.values() for h in t)


def test_adding_a_source_moves_nothing_in_another():
    rows = documents()
    assert choose([row for row in rows if row.source == "one"], 3000, 1)["one"] == choose(rows, 3000, 1)["one"]


def test_no_held_out_text_is_an_error():
    with pytest.raises(InputError, match="held-out"):
        choose([], 1000, 1)
    with pytest.raises(InputError, match="may not be called"):
        choose([Document("x", "all", "prose", "MIT", "val")], 1000, 1)


def test_model_and_compressors_are_measured_on_the_same_bytes(tokenizer):
    held = choose(documents(6), 1500, 1)
    model = make_model(tokenizer, context=64)
    encoded = {source: encode(tokenizer, docs) for source, docs in held.items()}
    rates = model_rates(model, tokenizer, encoded)
    tools = compression_rates({source: [doc.text for doc in docs] for source, docs in held.items()})
    for source in ("one", "two", "all"):
        assert rates[source].bytes == tools["xz"][source].bytes == tools["xz_joined"][source].bytes
    own = bits_per_byte(model, encoded["one"], tokenizer.token_bytes, 64)
    assert rates["one"].bpb == pytest.approx(own.bpb, rel=1e-12) and rates["one"].stderr == own.stderr
    # A whole document's end is a prediction the model pays for; a cut one has none.
    assert [ids[-1] == tokenizer.eos for ids in encoded["one"]] == [doc.complete for doc in held["one"]]


def test_ids_that_stand_for_other_bytes_are_refused(tokenizer):
    held = choose(documents(3), 1500, 1)["one"]
    right = tokenizer.token_bytes
    try:
        tokenizer.token_bytes = right + (np.arange(len(right)) > 300)
        with pytest.raises(GateError, match="bytes"):
            encode(tokenizer, held)
    finally:
        tokenizer.token_bytes = right


def test_the_margin_is_to_the_better_of_the_two_xz_settings():
    def table(bits):
        return dict.fromkeys(("a", "all"), BitsPerByte(bits, 100, 2, 0, bits / 100, 0.01))

    tools = {"gzip": table(260), "xz": table(251), "xz_extreme": table(250)}
    facts = bpb_facts({"base": table(249), "sft": table(250)}, tools)
    assert facts["beats_xz"] == {"base": True, "sft": False}
    assert facts["margin_to_xz"] == {"base": pytest.approx(0.01), "sft": pytest.approx(0)}
    assert set(facts["sources"]) == {"a"} and facts["all"]["gzip"] == 2.6
    assert facts["sources"]["a"]["base"] == {"bpb": 2.49, "stderr": 0.01, "each": ()}
