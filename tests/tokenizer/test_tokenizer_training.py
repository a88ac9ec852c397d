from __future__ import annotations

import dataclasses
import random

import pytest

from athanor.base.errors import InputError, ParamsError
from athanor.base.strict import build
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training import gate
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


def _drawn(atoms: str | list[str], count: int, glue: str = "") -> str:
    return glue.join(random.Random(3).choices(atoms, k=count))


ALPHABETS = {
    "Chinese without a space": (_drawn("春天来了他走进花园没有人说话雨下了一夜。", 40_000), 512),
    "one space in 40,000 characters": (_drawn("春天来了他走进花园没有人说话雨下了一夜。", 40_000) + " a", 512),
    "Thai": (_drawn("กขคงจฉชซทนบปผพมยรลวสหอะาิีุู่้", 40_000), 512),
    "DNA": (_drawn("ACGT", 40_000), 512),
    "MIDI, whose digits never merge": (_drawn([f"{a}{n}" for a in "nvd" for n in range(128)], 20_000, " "), 320),
    "Braille": (_drawn("\u2801\u2803\u2809", 20_000), 320),
    "one letter": ("a" * 20_000, 320),
    "every rare character once": ("ab" * 500_000 + "".join(map(chr, range(0x21, 0x7F))), 320),
}


@pytest.mark.parametrize("name", ALPHABETS)
def test_any_alphabet_gives_a_tokenizer_that_passes_every_gate(name, tokenizer_params):
    """What the pipeline needs, such as the space of its own prompts, is not asked of the text."""
    text, size = ALPHABETS[name]
    tokenizer = Tokenizer(train([text], dataclasses.replace(tokenizer_params, vocab_size=size)))
    assert tokenizer.vocab_size == size
    gate.check(tokenizer, {"own": [text[:20_000]]}, seed=1)


def test_the_size_advised_to_a_small_alphabet_is_one_that_is_allowed(tokenizer_params):
    """The advice was 256, which the params refused for being below 320."""
    text, _ = ALPHABETS["MIDI, whose digits never merge"]
    with pytest.raises(ParamsError, match="is more than the text supports.*use 320, or add text") as caught:
        train([text], tokenizer_params)
    train([text], dataclasses.replace(tokenizer_params, vocab_size=caught.value.fits))
