"""Each property of the gate, with its defect planted in a real model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

import pytest
from sentencepiece import sentencepiece_model_pb2 as proto

from athanor.base.errors import GateError
from athanor.tokenizer import chat
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training import gate

Piece = proto.ModelProto.SentencePiece


def planted(tokenizer: Tokenizer, change: Callable[[proto.ModelProto], None]) -> Tokenizer:
    model = proto.ModelProto()
    model.ParseFromString(tokenizer.model_bytes)
    change(model)
    return Tokenizer(model.SerializeToString())


def rename(model: proto.ModelProto, *names: str) -> None:
    """Give the last pieces (single rare characters) other texts."""
    for piece, name in zip(reversed(model.pieces), names, strict=False):
        piece.piece = name


def piece(model: proto.ModelProto, text: str) -> Piece:
    return next(p for p in model.pieces if p.piece == text)


def test_a_sound_tokenizer_passes_and_is_measured(tokenizer, corpus):
    facts = gate.check(tokenizer, {"code": corpus}, seed=1)
    assert facts["sources"]["code"]["bytes"] == sum(len(text.encode()) for text in corpus)
    assert 1.5 < facts["sources"]["code"]["bytes_per_token"] < 6
    assert 0 <= facts["sources"]["code"]["byte_fallback_share"] < 0.05
    assert facts["learned_ids"] == tokenizer.vocab_size - 256 - 8


def test_added_prefix_space(tokenizer):
    bad = planted(tokenizer, lambda m: setattr(m.normalizer_spec, "add_dummy_prefix", True))
    with pytest.raises(GateError, match="round-trip"):
        gate.check_texts(bad, ["word"], "sample")
    with pytest.raises(GateError, match="seams"):
        gate.check_seams(bad, ["one two three"] * 5, seed=1)


def test_collapsed_whitespace(tokenizer):
    bad = planted(tokenizer, lambda m: setattr(m.normalizer_spec, "remove_extra_whitespaces", True))
    with pytest.raises(GateError, match="round-trip"):
        gate.check_texts(bad, ["def f():\n    return x"], "sample")


def test_control_symbol_that_text_can_produce(tokenizer):
    bad = planted(tokenizer, lambda m: setattr(piece(m, "<|user|>"), "type", Piece.USER_DEFINED))
    with pytest.raises(GateError, match="control-ids.*<|user|>"):
        gate.check_vocabulary(bad)
    with pytest.raises(GateError, match="no-control-ids"):
        gate.check_texts(bad, ["I said <|user|>"], "sample")


@pytest.mark.parametrize("symbol", ["\n", "\t"])
def test_newline_or_tab_without_an_id(tokenizer, symbol):
    bad = planted(tokenizer, lambda m: setattr(piece(m, symbol), "piece", symbol * 2))
    with pytest.raises(GateError, match="whitespace-ids"):
        gate.check_vocabulary(bad)


def test_newline_that_merges_with_its_neighbour(tokenizer):
    def change(model: proto.ModelProto) -> None:
        piece(model, "\n").type = Piece.NORMAL
        rename(model, ":\n")
        model.pieces[-1].score = 0.0

    bad = planted(tokenizer, change)
    with pytest.raises(GateError, match="cut-points"):
        gate.check_vocabulary(bad)
    with pytest.raises(GateError, match="seams"):
        gate.check_seams(bad, [":" * 40] * 20, seed=1)


@pytest.mark.parametrize("name", ["12", "x1", "a\u2581b", "a\n"])
def test_piece_across_a_cut_point(tokenizer, name):
    with pytest.raises(GateError, match="cut-points"):
        gate.check_vocabulary(planted(tokenizer, lambda m: rename(m, name)))


@pytest.mark.parametrize("names", [("<|user", "|>"), ("<|sto", "p|>"), ("|eos|>",)])
def test_learned_pieces_that_would_merge_into_a_control_symbol(tokenizer, names):
    with pytest.raises(GateError, match="control-merge"):
        gate.check_vocabulary(planted(tokenizer, lambda m: rename(m, *names)))


def test_repaired_surrogates(tokenizer):
    class Lenient(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.encode("utf-8", "replace").decode())

    with pytest.raises(GateError, match="surrogates"):
        gate.check_surrogates(Lenient(tokenizer.model_bytes))
    gate.check_surrogates(tokenizer)


@pytest.mark.parametrize(
    "loss",
    [
        lambda text: text.replace("\t", "    "),
        lambda text: text.replace("\r\n", "\n"),
        lambda text: text.replace("\r", ""),
        lambda text: text.replace("\u00a0", " "),
        lambda text: text.replace("\u2581", " "),
        lambda text: text.replace("\u200d", ""),
        lambda text: text.replace("\u200f", ""),
        lambda text: text.replace("\0", ""),
        lambda text: text.lstrip("\ufeff").replace("\ufeff", ""),
        lambda text: re.sub("\n +", "\n ", text),
        lambda text: unicodedata.normalize("NFC", text),
        lambda text: text[:50],
    ],
    ids="tab crlf cr nbsp U+2581 joiner right-to-left nul bom indentation combining length".split(),
)
def test_each_thing_that_text_can_lose_is_in_the_fuzz_set(tokenizer, loss):
    class Lossy(Tokenizer):
        def encode_arrays(self, texts, threads=1):
            return super().encode_arrays([loss(text) for text in texts], threads)

    with pytest.raises(GateError, match="'round-trip' failed"):
        gate.check_texts(Lossy(tokenizer.model_bytes), gate.NASTY, "fuzz set")
    gate.check_texts(tokenizer, gate.NASTY, "fuzz set")


@pytest.mark.parametrize("change", [lambda text: text.replace("<|stop|>", " <|stop|>"), lambda text: text + "\n"])
def test_template_whose_text_and_ids_differ(tokenizer, monkeypatch, change):
    real = chat.render_text
    monkeypatch.setattr(chat, "render_text", lambda messages: change(real(messages)))
    with pytest.raises(GateError, match="'seams' failed: the chat template"):
        gate.check_seams(tokenizer, ["one two three"] * 5, seed=1)


def test_what_is_measured_by_source(tokenizer):
    """Bytes that no piece spells, ids that no text uses, bytes for each token: told for each source."""
    facts = gate.statistics(tokenizer, {"plain": ["the the the"], "spelled": ["\U0001f9ff" * 3], "empty": [""]})
    plain, spelled = facts["sources"]["plain"], facts["sources"]["spelled"]
    assert plain["byte_fallback_share"] == 0 and plain["bytes_per_token"] > 2
    assert spelled == {"bytes": 12, "tokens": 12, "bytes_per_token": 1.0, "byte_fallback_share": 1.0}
    assert facts["sources"]["empty"]["tokens"] == 0
    used = set(tokenizer.encode("the the the"))
    assert facts["unused_ids_in_check"] == facts["learned_ids"] - len(used)


def test_fuzz_set_is_the_same_each_time_and_covers_the_nasty_strings():
    assert gate.fuzz_texts(3, 50) == gate.fuzz_texts(3, 50) != gate.fuzz_texts(4, 50)
    joined = "".join(gate.fuzz_texts(3, 0))
    for needle in ("\r\n", "\0", "\u2581", "\u00a0", "\u0301", "\u200d", "\t", "<|assistant|>", "</s>"):
        assert needle in joined
