from __future__ import annotations

import dataclasses

import pytest

from athanor.base.errors import InputError, ParamsError
from athanor.base.strict import build
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training.params import TokenizerParams
from athanor.tokenizer_training.train import MAX_SENTENCE_BYTES, train, training_lines


def test_same_text_and_settings_give_the_same_bytes(corpus, tokenizer_params, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again = train(corpus, tokenizer_params)
    assert again == tokenizer.model_bytes
    assert str(tmp_path).encode() not in again


def test_no_byte_of_a_long_line_is_lost():
    text = "x" * 50_000 + "\u20ac" * 9_000 + "\ttab\n\nline \u2585 <|user|> \0"
    lines = list(training_lines([text]))
    assert max(len(line.encode()) for line in lines) <= MAX_SENTENCE_BYTES
    removed = sum(text.count(c) for c in "\t\n\u2585\0")
    assert sum(map(len, lines)) == len(text) - removed


def test_a_word_in_one_very_long_line_is_learned(tokenizer_params, corpus):
    params = dataclasses.replace(tokenizer_params, vocab_size=448)
    line = "zqzqzq " * 20_000
    model = Tokenizer(train([line, *corpus[:2]], params))
    assert len(model.encode("zqzqzq")) <= 2


@pytest.mark.parametrize("script", [True, False])
def test_a_vocabulary_beyond_the_text_names_the_size_that_fits(tokenizer_params, corpus, script):
    params = dataclasses.replace(tokenizer_params, vocab_size=32768, split_by_unicode_script=script)
    with pytest.raises(ParamsError, match=r"more than the text supports.*use (\d+) or less") as caught:
        train(corpus[2:], params)
    size = int(caught.value.fix.split()[1])
    assert size % 64 == 0
    assert Tokenizer(train(corpus[2:], dataclasses.replace(params, vocab_size=size))).vocab_size == size


def test_a_vocabulary_too_small_for_the_characters_says_how_many(tokenizer_params):
    params = dataclasses.replace(tokenizer_params, vocab_size=320, character_coverage=1.0)
    with pytest.raises(ParamsError, match="every character needs.*use 704 or more"):
        train(["".join(map(chr, range(0x4E00, 0x4E00 + 400)))] * 3, params)


def test_no_text_is_an_input_error(tokenizer_params):
    with pytest.raises(InputError, match="no text"):
        train(["\n\n", ""], tokenizer_params)


def test_vocabulary_must_be_a_multiple_of_64(tokenizer_params):
    values = dataclasses.asdict(tokenizer_params) | {"vocab_size": 1000}
    with pytest.raises(ParamsError, match=r"tokenizer.vocab_size: 1000 is not a multiple of 64. Fix: use 960 or 1024"):
        build(TokenizerParams, values, "tokenizer")


def test_control_symbols_in_the_text_are_never_learned(tokenizer_params, corpus):
    poisoned = ["<|user|> <|stop|> |> <|\n" * 2000, *corpus]
    model = Tokenizer(train(poisoned, tokenizer_params))
    learned = {model.processor.id_to_piece(i) for i in range(model.vocab_size)} - set(model.control_ids)
    assert not [piece for piece in learned if "<|" in piece or "|>" in piece]
