from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from athanor.base.errors import InputError
from athanor.tokenizer.tokenizer import CHUNK_CHARS, CONTROL_PIECES, MODEL_FILE, Tokenizer, cut
from athanor.tokenizer_training.gate import NASTY
from athanor.tokenizer_training.train import write_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS | st.sampled_from([*NASTY, *CONTROL_PIECES, "\u2581", "    ", "\r\n"]), max_size=5))
def test_every_text_comes_back_byte_for_byte_and_holds_no_control_id(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.control_ids.values())
    assert int(tokenizer.token_bytes[np.array(ids, dtype=int)].sum()) == len(text.encode())


def test_space_mark_is_three_byte_tokens_and_not_a_space(tokenizer):
    assert tokenizer.encode("a\u2581b") != tokenizer.encode("a b")
    middle = tokenizer.encode("\u2581")
    assert [tokenizer.processor.id_to_piece(i) for i in middle] == ["<0xE2>", "<0x96>", "<0x81>"]


@pytest.mark.parametrize("text", ["\ud800", "ok \udc12 ok"])
def test_lone_surrogates_are_an_input_error(tokenizer, text):
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.encode(text)


def test_batches_and_threads_change_nothing(tokenizer, corpus):
    texts = [line for text in corpus for line in text.split("\n\n")] + ["", "a\u2581", "\u2581"]
    one_by_one = [tokenizer.encode(text) for text in texts]
    assert len(texts) > 64
    assert tokenizer.encode_batch(texts) == one_by_one
    assert tokenizer.encode_batch(texts, threads=2) == one_by_one


def test_long_texts_are_cut_without_a_trace(tokenizer, corpus):
    text = "\n".join(corpus)
    assert len(cut(text)) > 2
    assert tokenizer.encode(text) == tokenizer.processor.encode(text)
    spaces_only = " ".join(["word"] * CHUNK_CHARS)
    assert len(cut(spaces_only)) > 2
    assert tokenizer.encode(spaces_only) == tokenizer.processor.encode(spaces_only)


def test_cut_loses_nothing_when_there_is_no_place_to_cut():
    text = "x" * (3 * CHUNK_CHARS)
    assert cut(text) == [text]
    assert cut(text + "\n" + text) == [text, "\n" + text]


def test_decode_drops_control_ids_and_marks_broken_utf8(tokenizer):
    ids = [tokenizer.bos, *tokenizer.encode("hi"), tokenizer.stop]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(tokenizer.encode("\u2581")[:2]) == "\ufffd"


def test_token_bytes_are_zero_for_control_ids_only(tokenizer):
    controls = sorted(tokenizer.control_ids.values())
    assert np.flatnonzero(tokenizer.token_bytes == 0).tolist() == controls
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.vocab_size == len(tokenizer.token_bytes)


def test_a_changed_model_file_is_refused(tokenizer, tmp_path):
    write_tokenizer(tmp_path, tokenizer.model_bytes, {})
    loaded = Tokenizer.load(tmp_path)
    assert loaded.digest == tokenizer.digest
    assert np.load(tmp_path / "token_bytes.npy").tolist() == tokenizer.token_bytes.tolist()
    (tmp_path / MODEL_FILE).write_bytes(tokenizer.model_bytes + b"\0")
    with pytest.raises(InputError, match="changed"):
        Tokenizer.load(tmp_path)


def test_a_missing_or_foreign_model_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="file not found"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="not a SentencePiece model"):
        Tokenizer(b"nonsense")
