"""The safetensors writer and reader, against the real package and against damage."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from athanor.base.errors import InputError
from athanor.model.config import ModelConfig
from athanor.model.tensorfile import read_header, read_tensors, write_tensors
from athanor.model.transformer import Transformer
from athanor.model.weights import load_model, save_model

TENSORS = {
    "b.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "a": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(2, 2).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "flags": torch.tensor([True, False]),
    "long": torch.tensor([2**40]),
}
CONFIG = ModelConfig(64, 2, 16, 4, 2, 4, 32, 16, 1e4, 1e-6, True)


def same(found):
    assert found.keys() == TENSORS.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in TENSORS.items())


def test_round_trip_and_checksum(tmp_path):
    checksum = write_tensors(tmp_path / "x", TENSORS, {"format": "pt"})
    same(read_tensors(tmp_path / "x"))
    assert checksum == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert write_tensors(tmp_path / "y", dict(reversed(TENSORS.items())), {"format": "pt"}) == checksum


def test_the_package_reads_ours_and_we_read_its(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    write_tensors(tmp_path / "ours", TENSORS, {"format": "pt"})
    same(package.load_file(tmp_path / "ours"))
    package.save_file({n: t.contiguous() for n, t in TENSORS.items()}, tmp_path / "theirs", {"k": "v"})
    same(read_tensors(tmp_path / "theirs"))
    assert read_header(tmp_path / "theirs")[1] == {"k": "v"}


def broken(header, data=b"\0" * 16):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10\0\0",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        broken({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}),
        broken({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}),
        broken({"a": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}),
        broken({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 15),
        broken({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 17),
    ],
)
def test_damage_is_an_input_error(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_tensors(tmp_path / "x")


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_subnormal=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ODD_ENTRY = st.fixed_dictionaries(
    {}, optional={
        "dtype": st.sampled_from(["F32", "U8"]) | ODD,
        "shape": st.lists(st.sampled_from([-4, -1, 0, 1, 2, 4, 2**31, 2**62, 2.0, True]), max_size=4) | ODD,
        "data_offsets": st.sampled_from([[0, 16], [16, 0], [0], [0, 16.0], [0, 0]]) | ODD,
    },
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ODD_ENTRY | ODD, max_size=3) | ODD)
@example({"a": {**ENTRY, "shape": [-2, -2]}})
@example({"a": {**ENTRY, "shape": "ab"}})
@example({"a": {**ENTRY, "dtype": []}})
@example({"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}})
@example({"a": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}})
@example({"a": ENTRY, "__metadata__": 3})
@example([])
def test_any_header_gives_tensors_or_an_input_error(header):
    with tempfile.TemporaryDirectory() as folder:
        for content in (broken(header), broken(header, b"")):
            Path(folder, "x").write_bytes(content)
            try:
                read_tensors(Path(folder, "x"))
            except InputError as error:
                assert "not a whole safetensors file" in str(error)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000, b'{"a":' + b"9" * 5000 + b"}", b"\xff{}"],
                         ids=["deep list", "deep mapping", "long number", "no text"])  # fmt: skip
def test_a_header_that_no_parser_takes_is_an_input_error(tmp_path, text):
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(InputError, match="not JSON"):
        read_tensors(tmp_path / "x")


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="not found"):
        read_tensors(tmp_path / "x")


@torch.no_grad()
def test_model_artifact(tmp_path):
    model = Transformer.fresh(CONFIG, 3)
    ids = torch.arange(12)[None]
    save_model(tmp_path / "m", model, CONFIG, {"tokenizer_digest": "t"}, parents={"shards": "s"})
    loaded, facts = load_model(tmp_path / "m")
    assert facts == {"tokenizer_digest": "t"} and loaded.config == CONFIG and not loaded.training
    assert torch.equal(model(ids), loaded(ids))
    save_model(tmp_path / "again", loaded, CONFIG, {"tokenizer_digest": "t"}, parents={"shards": "s"})
    for path in (tmp_path / "m").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_weights_of_another_shape_are_refused(tmp_path):
    save_model(tmp_path / "m", Transformer.fresh(CONFIG, 3), CONFIG, {})
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text().replace('"layers": 2', '"layers": 3'))
    with pytest.raises(InputError, match="model.layers.2"):
        load_model(tmp_path / "m")
