"""Tokenizers that another runtime would silently read differently are refused."""

from __future__ import annotations

import pytest
from sentencepiece import sentencepiece_model_pb2

from athanor.base.errors import GateError, InputError
from athanor.export.probes import NASTY, fuzz_texts, has_control
from athanor.export.vocabulary import BYTE, CONTROL, NORMAL, USER_DEFINED, Vocabulary


def altered(tokenizer_dir, path, change):
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((tokenizer_dir / "tokenizer.model").read_bytes())
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def last(model, text, kind=NORMAL):
    model.pieces[-1].piece, model.pieces[-1].type = text, kind


DEFECTS = {
    "dummy prefix": lambda m: setattr(m.normalizer_spec, "add_dummy_prefix", True),
    "extra whitespace": lambda m: setattr(m.normalizer_spec, "remove_extra_whitespaces", True),
    "normalises characters": lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"x"),
    "not a BPE model": lambda m: setattr(m.trainer_spec, "model_type", m.trainer_spec.UNIGRAM),
    "no byte fallback": lambda m: setattr(m.trainer_spec, "byte_fallback", False),
    "same text": lambda m: last(m, m.pieces[-2].piece),
    "byte pieces": lambda m: setattr(next(p for p in m.pieces if p.type == BYTE), "piece", "<0xZZ>"),
    "unused pieces": lambda m: setattr(m.pieces[-1], "type", 5),
    "a meaning of its own": lambda m: last(m, "<|end|>", CONTROL),
    "plain text can assemble '<|stop|>'": lambda m: last(m, "<|stop|"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_refused(defect, tokenizer_dir, tmp_path):
    path = altered(tokenizer_dir, tmp_path / "tokenizer.model", DEFECTS[defect])
    with pytest.raises(GateError, match=defect.replace("|", r"\|")):
        Vocabulary.load(path)


def test_unreadable_model_is_one_clear_error(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff not a proto")
    with pytest.raises(InputError, match="not a SentencePiece model"):
        Vocabulary.load(tmp_path / "tokenizer.model")
    with pytest.raises(InputError, match="cannot be read"):
        Vocabulary.load(tmp_path / "absent.model")


def test_merges_come_best_first_and_make_every_longer_piece(tokenizer_dir):
    vocabulary = Vocabulary.load(tokenizer_dir / "tokenizer.model")
    score = {piece.text: piece.score for piece in vocabulary.pieces}
    merges = vocabulary.merges()
    scores = [score[left + right] for left, right in merges]
    assert scores == sorted(scores, reverse=True)
    longer = {piece.text for piece in vocabulary.pieces if piece.type == NORMAL and len(piece.text) > 1}
    assert {left + right for left, right in merges} == longer
    assert {vocabulary.pieces[i].text for i in vocabulary.ids(USER_DEFINED)} == {"\n", "\t"}


def test_fuzz_texts_repeat_and_hold_what_breaks_tokenizers():
    texts = fuzz_texts(300)
    assert texts == fuzz_texts(300) and len(texts) > 350 and set(NASTY) < set(texts)
    assert any(has_control(text) for text in texts) and any("\u2581" in text for text in texts)
    assert sum("\u2581" in text for text in texts) < len(texts) / 10
