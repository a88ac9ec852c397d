"""The quick search of a batch finds what a plain search of each text with strings and sets finds (about 3 s)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from athanor.text.conversations import Item, Message
from athanor.words import decontaminate
from athanor.words.decontaminate import ItemIndex, compared, prompt_text
from athanor.words.words import Words, ngrams, tokenise, word_hashes, words_of

SIZE = 5  # words of an n-gram
VOCABULARY = ["red", "blue", "jar", "tom", "12", "7", "has", "the", "of"]


def sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(rng.randrange(low, high)))


@pytest.fixture(scope="module")
def case() -> tuple[ItemIndex, list[str]]:
    rng = random.Random(8)
    items = []
    for number in range(60):
        prompt, answer = sentence(rng, 1, 12), sentence(rng, 1, 5)
        items.append(Item(f"c{number}", (Message("user", prompt),), "exact", answer, (answer,), ("no", "never")))
    texts = [sentence(rng, 0, 60) for _ in range(120)] + ["", "red", "..."]
    for item in items[::2]:
        words = f"{prompt_text(item.prompt)} {item.accepted[0]}"
        texts += [f"{sentence(rng, 0, 9)} {words} {sentence(rng, 0, 9)}", words]
    rng.shuffle(texts)
    return ItemIndex(items, ngram_words=SIZE), texts


def plain(index: ItemIndex, text: str) -> tuple[set[int], set[int]]:
    """Places of the n-grams and of the families of one text in the index, window by window."""
    grams, families = set(), set()
    words = words_of(text)
    for start in range(len(words) - SIZE + 1):
        window = words[start : start + SIZE]
        hashes = word_hashes(window)
        offsets = np.array([0, SIZE])
        gram = ngrams(Words(hashes, offsets), SIZE).hashes[0]
        numbers = [word[0].isdigit() for word in window]
        masked = np.where(numbers, decontaminate._NUMBER, hashes)
        family = gram if sum(numbers) > 1 else ngrams(Words(masked, offsets), SIZE).hashes[0]
        grams |= set(np.flatnonzero(index._grams == gram).tolist())
        families |= set(np.flatnonzero(index._families == family).tolist())
    return grams, families


@pytest.mark.parametrize("prompts_alone", [True, False])
def test_the_scan_finds_what_a_plain_search_finds(case, prompts_alone):
    index, texts = case
    found = index.scan(texts, tokenise(texts), prompts_alone=prompts_alone)
    assert sum(len(hits.ngrams) for hits in found) > 50
    for text, hits in zip(texts, found, strict=True):
        grams, families = plain(index, text)
        assert (set(hits.ngrams.tolist()), set(hits.families.tolist())) == (grams, families)
        whole = set()
        for number, item in enumerate(index.items):
            prompt, inside = prompt_text(item.prompt), compared(text)
            enough = decontaminate.MIN_PROMPT_WORDS if prompts_alone else SIZE
            if len(words_of(prompt)) >= enough:
                whole |= {number} if compared(prompt) in inside else set()
            elif prompts_alone and compared(prompt) == inside:
                whole.add(number)
            whole |= {number} if compared(f"{prompt}\n{item.accepted[0]}") in inside else set()
        assert (hits.whole in whole) if whole else hits.whole == -1
    assert sum(hits.whole >= 0 for hits in found) > 50


def test_the_scan_does_not_depend_on_the_batch(case):
    index, texts = case
    together = index.scan(texts, prompts_alone=True)
    for text, hits in list(zip(texts, together, strict=True))[::7]:
        alone = index.scan([text], prompts_alone=True)[0]
        assert alone.whole == hits.whole
        assert np.array_equal(alone.ngrams, hits.ngrams) and np.array_equal(alone.families, hits.families)


def test_no_texts_and_no_items(case):
    assert case[0].scan([], prompts_alone=True) == []
    empty = ItemIndex([])
    assert [hits.whole for hits in empty.scan(["a b", ""], prompts_alone=True)] == [-1, -1]
