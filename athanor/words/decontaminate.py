"""Finding evaluation items in training text.

What counts as the item
    The words of its prompt (system message left out), followed by the words of
    an accepted answer; one sequence for each accepted answer. Case and
    punctuation do not count, digits do.

Two ways to be found
    n-gram. The text shares `ngram_words` (13) consecutive words with an item,
    and the n-gram is *item specific*: it is not one of more than
    `max_ngram_items` items and not in more than `max_ngram_documents` of the
    texts searched. Otherwise it is a template, a licence header or
    boilerplate. Exercises from one template share long stretches of words by
    design and differ in their numbers, so these counts are taken over the
    n-gram's family: n-grams with at most one number that agree in all else are
    one family, since a single number is shared by chance all the time; an
    n-gram with two numbers or more is a family of its own. In an item of a
    fact category (recall of what the corpus teaches) only n-grams inside the
    prompt count: the answer is the fact and not the item, and so is the name
    it follows.
    whole. The text contains an item's sequence from end to end. Frequency does
    not matter: an item copied a thousand times is still leaked. For documents
    this means prompt with answer, or the prompt alone if it has at least
    `ngram_words` words (a short prompt alone, "What is a list?", proves
    nothing). For conversations (`prompts_alone`) it means the prompt alone,
    inside the text from `MIN_PROMPT_WORDS` words on, and any prompt that makes
    up a whole text or, in `conversation_matches`, a whole user message.
    Here arithmetic operators before a number are words too ("7 - 5" is not
    "7 + 5"), because the n-gram hashes, which lack them, are only used to find
    the place and the texts are then compared.

Dropping texts lowers document frequencies, which may make another n-gram item
specific; the search is repeated until nothing more is found, so that a second
search of what is left finds nothing.

Limits: a paraphrase is not found, nor an item shorter than 13 words with the
answer changed, in documents; text without spaces between words (Chinese,
Japanese) counts as one word per run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from athanor.text.conversations import Item, Message, searched_items
from athanor.text.documents import in_batches
from athanor.words.words import (
    WORD_PATTERN,
    Tokens,
    Words,
    finalised,
    fold,
    rolling_sums,
    rolling_sums_at,
    splitmix64,
    tokenise,
    unfinalised,
)

Key = TypeVar("Key")
NGRAM_WORDS = 13
MAX_NGRAM_DOCUMENTS = 10
MAX_NGRAM_ITEMS = 1
MIN_PROMPT_WORDS = 4
LEAD_WORDS = 3  # whole sequences are looked for where their first words stand
BATCH_CHARS = 1_000_000

_NUMBER = splitmix64(31, 1)[0]  # stands for any number
_COMPARED = re.compile(WORD_PATTERN.pattern + r"|[-+*/=<>%^](?=[ \t(]*[0-9])")


@dataclass(frozen=True)
class Hits:
    """What a search found in one text, before frequencies are known."""

    ngrams: np.ndarray  # int64, distinct numbers of n-grams of the index
    families: np.ndarray  # int64, distinct numbers of families of the index
    full_match: int  # number of the item that the text contains from end to end, or -1

    def __bool__(self) -> bool:
        return self.full_match >= 0 or len(self.ngrams) > 0 or len(self.families) > 0


@dataclass(frozen=True)
class _Sequence:
    """A word sequence to be found from end to end."""

    item: int
    text: str  # compared words, each with a space on both sides
    words: int
    prompt_alone: bool


class _HashFilter:
    """A fast membership test for a set of 64-bit values, with false positives and no false negatives.

    It is a table over the leading bits with at least 64 entries for each value.
    """

    def __init__(self, values: np.ndarray) -> None:
        bits = min(max(6 + len(values).bit_length(), 14), 24)
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, bool)
        self._table[values >> self._shift] = True

    def candidates(self, values: np.ndarray) -> np.ndarray:
        """int64, ascending: the positions in `values` whose value may be in the set."""
        return np.flatnonzero(self._table[(values >> self._shift).view(np.int64)])


class ItemIndex:
    """The battery's items, ready to be searched for."""

    def __init__(
        self,
        items: Iterable[Item],
        *,
        ngram_words: int = NGRAM_WORDS,
        max_ngram_items: int = MAX_NGRAM_ITEMS,
        fact_categories: Collection[str] = (),
    ) -> None:
        items = list(items)
        ngram_families: dict[int, tuple[int, int]] = {}  # n-gram -> its family and an item
        owners: dict[int, set[int]] = {}  # family -> items
        anchors: dict[int, dict[int, list[_Sequence]]] = {}
        leads: dict[int, set[int]] = {}  # number of words -> hashes of the first words of anchors
        rows = []  # item, whether the prompt alone, text
        for number, item in enumerate(items):
            prompt = prompt_text(item.prompt)
            rows += [(number, True, prompt), *((number, False, f"{prompt}\n{answer}") for answer in item.accepted)]
        tokens = tokenise([text for _, _, text in rows])
        words, starts = tokens.words.hashes, tokens.words.offsets
        grams, masked = (finalised(sums, ngram_words) for sums in _windows(tokens, ngram_words))
        prompt_ngrams = 0
        for row, (number, prompt_alone, text) in enumerate(rows):
            first, count = int(starts[row]), int(starts[row + 1] - starts[row])
            ngram_count = max(count - ngram_words + 1, 0)
            prompt_ngrams = ngram_count if prompt_alone else prompt_ngrams
            last = first + (prompt_ngrams if items[number].category in fact_categories else ngram_count)
            for gram, family in zip(grams[first:last].tolist(), masked[first:last].tolist(), strict=True):
                ngram_families.setdefault(gram, (family, number))
                owners.setdefault(family, set()).add(number)
            size = min(count, ngram_words)
            if size:
                anchor, lead = (
                    int(finalised(rolling_sums_at(words, np.array([first]), length), length)[0])
                    for length in (size, min(size, LEAD_WORDS))
                )
                sequence = _Sequence(number, comparison_text(text), count, prompt_alone)
                anchors.setdefault(size, {}).setdefault(anchor, []).append(sequence)
                leads.setdefault(min(size, LEAD_WORDS), set()).add(lead)
        families = sorted(family for family, item_numbers in owners.items() if len(item_numbers) <= max_ngram_items)
        family_index = {family: index for index, family in enumerate(families)}
        specific = sorted(
            (gram, family_index[family], item)
            for gram, (family, item) in ngram_families.items()
            if family in family_index
        )
        grams, family_indices, item_numbers = zip(*specific, strict=True) if specific else ((), (), ())
        self.items, self.ngram_words = items, ngram_words
        self.shared_ngrams = len(owners) - len(families)  # families left out because several items have them
        # The item-specific n-grams: their hashes (uint64, sorted), an item that has each, and the index of its family.
        self._grams, self._families = np.array(grams, np.uint64), np.array(families, np.uint64)
        self._owners, self._family_of = np.array(item_numbers, np.int64), np.array(family_indices, np.int64)
        self._anchors = anchors  # number of words -> hash of a sequence's first words -> sequences
        self._anchor_hashes = {size: np.array(sorted(table), np.uint64) for size, table in anchors.items()}
        # The tables hold rolling sums, so that a scan mixes the few sums that pass them and no others.
        self._gram_filter, self._family_filter = (
            _HashFilter(unfinalised(hashes, ngram_words)) for hashes in (self._grams, self._families)
        )
        self._lead_filters = {
            size: _HashFilter(unfinalised(np.array(sorted(hashes), np.uint64), size)) for size, hashes in leads.items()
        }

    @classmethod
    def read(cls, path: Path, rules: Any) -> ItemIndex:
        """All items to search for, under rules of any stage that has `ngram_words`, `max_ngram_items`, `fact_categories`."""
        names = ("ngram_words", "max_ngram_items", "fact_categories")
        return cls(searched_items(path), **{name: getattr(rules, name) for name in names})

    def matches(
        self, texts: Sequence[str], *, max_ngram_documents: int = MAX_NGRAM_DOCUMENTS, prompts_alone: bool = True
    ) -> list[str | None]:
        """For each text the id of an item it contains, or None.

        Pass the whole training set at once: document frequencies are counted
        over `texts`. `prompts_alone` is meant for conversations (see above).
        """
        hits = (
            hit
            for batch in in_batches(texts, len, BATCH_CHARS)
            for hit in self.scan(batch, prompts_alone=prompts_alone)
        )
        item_numbers = self.resolve(enumerate(hits), max_ngram_documents=max_ngram_documents)
        return [self.items[item_numbers[n]].id if n in item_numbers else None for n in range(len(texts))]

    def conversation_matches(
        self, conversations: Sequence[Sequence[Message]], *, max_ngram_documents: int = MAX_NGRAM_DOCUMENTS
    ) -> list[str | None]:
        """Like `matches`, for conversations given as messages; also finds a short prompt as a whole user message."""
        item_ids = self.matches(
            ["\n".join(m.content for m in messages) for messages in conversations],
            max_ngram_documents=max_ngram_documents,
        )
        prompts: dict[str, str] = {}
        for item in self.items:
            prompts.setdefault(comparison_text(prompt_text(item.prompt)), item.id)
        for number, messages in enumerate(conversations):
            if item_ids[number] is None:
                prompt_ids = (prompts.get(comparison_text(m.content)) for m in messages if m.role == "user")
                item_ids[number] = next((item for item in prompt_ids if item is not None), None)
        return item_ids

    def scan(self, texts: Sequence[str], tokens: Tokens | None = None, *, prompts_alone: bool) -> list[Hits]:
        """Search each text of a batch; `tokens` are `tokenise(texts)` if at hand."""
        tokens = tokenise(texts) if tokens is None else tokens
        size = self.ngram_words
        matches = []
        windows = _windows(tokens, size)
        for sums, hash_filter, indexed in zip(
            windows, (self._gram_filter, self._family_filter), (self._grams, self._families), strict=True
        ):
            positions, texts_of_positions = _within_text(hash_filter.candidates(sums), size, tokens.words)
            matches.append(_by_text(texts_of_positions, _find(finalised(sums[positions], size), indexed), len(texts)))
        full_match = self._full_matches(texts, tokens.words, prompts_alone)
        return [Hits(*hits) for hits in zip(*matches, full_match, strict=True)]

    def _full_matches(self, texts: Sequence[str], words: Words, prompts_alone: bool) -> list[int]:
        item_numbers = [-1] * len(texts)
        folded: dict[int, str] = {}
        leads = {
            size: hash_filter.candidates(rolling_sums(words.hashes, size))
            for size, hash_filter in self._lead_filters.items()
        }
        for size, hashes in self._anchor_hashes.items():
            starts, owners = _within_text(leads[min(size, LEAD_WORDS)], size, words)
            anchor_index = _find(finalised(rolling_sums_at(words.hashes, starts, size), size), hashes)
            hit = np.flatnonzero(anchor_index >= 0)
            for text, anchor in sorted(set(zip(owners[hit].tolist(), anchor_index[hit].tolist(), strict=True))):
                for sequence in self._anchors[size][int(hashes[anchor])] if item_numbers[text] < 0 else ():
                    folded_text = folded.setdefault(text, comparison_text(texts[text]))
                    min_words = MIN_PROMPT_WORDS if prompts_alone else self.ngram_words
                    if sequence.prompt_alone and sequence.words < min_words:
                        is_match = prompts_alone and sequence.text == folded_text
                    else:
                        is_match = sequence.text in folded_text
                    if is_match:
                        item_numbers[text] = sequence.item
                        break
        return item_numbers

    def resolve(self, hits: Iterable[tuple[Key, Hits]], *, max_ngram_documents: int) -> dict[Key, int]:
        """The number of an item for each text that contains one, with frequencies counted over all of `hits`.

        `hits` are (name of a text, what was found in it), read once; only texts
        with an n-gram of an item are remembered.
        """
        item_numbers: dict[Key, int] = {}
        frequency = np.zeros(len(self._families), np.int64)
        suspects: dict[Key, Hits] = {}
        for key, hit in hits:
            if hit.full_match >= 0:
                item_numbers[key] = hit.full_match
                continue
            frequency[hit.families] += 1
            if len(hit.ngrams):
                suspects[key] = hit
        while True:
            newly_matched = {}
            for key, hit in suspects.items():
                rare = hit.ngrams[frequency[self._family_of[hit.ngrams]] <= max_ngram_documents]
                if len(rare):
                    newly_matched[key] = int(self._owners[rare].min())
            if not newly_matched:
                return item_numbers
            item_numbers |= newly_matched
            for key in newly_matched:
                frequency[suspects.pop(key).families] -= 1


def prompt_text(prompt: Sequence[Message]) -> str:
    """What an item asks, without its system message."""
    return "\n".join(message.content for message in prompt if message.role != "system")


def comparison_text(text: str) -> str:
    """The words and operators of a text, lower-cased, with one space on each side."""
    return " " + " ".join(_COMPARED.findall(fold(text))) + " "


def _windows(tokens: Tokens, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rolling sums of the n-grams from each word on and of their families, text ends ignored.

    A family is the n-gram itself, or the n-gram with its only number made anonymous.
    """
    sums = rolling_sums(tokens.words.hashes, size)
    numbers = np.zeros(len(sums), np.uint8)
    for step in range(size if len(sums) else 0):
        numbers += tokens.numeric[step : step + len(sums)]
    masked = rolling_sums(np.where(tokens.numeric, _NUMBER, tokens.words.hashes), size)
    return sums, np.where(numbers > 1, sums, masked)


def _within_text(positions: np.ndarray, size: int, words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The positions (of ascending ones) from which `size` words lie inside one text, and the text of each."""
    owners = np.searchsorted(words.offsets, positions, "right") - 1
    inside = positions + size <= words.offsets[owners + 1]
    return positions[inside], owners[inside]


def _by_text(owner: np.ndarray, index: np.ndarray, texts: int) -> list[np.ndarray]:
    """The distinct indices of each text; an index of -1 stands for none."""
    hit = np.flatnonzero(index >= 0)
    pairs = np.unique(np.stack([owner[hit], index[hit]], axis=1), axis=0)
    boundaries = np.searchsorted(pairs[:, 0], np.arange(texts + 1)).tolist()
    return [pairs[boundaries[text] : boundaries[text + 1], 1] for text in range(texts)]


def _find(hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """int64 [hashes]: the index of each in a sorted array, -1 where it is not in it."""
    if not len(ordered) or not len(hashes):
        return np.full(len(hashes), -1, np.int64)
    index = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return np.where(ordered[index] == hashes, index, -1)
