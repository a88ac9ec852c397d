"""Words as 64-bit hashes: one tokenisation for the rules, the near-duplicate search and the decontamination.

A word is a run of letters and digits, lower-cased; the underscore and all
punctuation separate. A unit is a word or an unbroken run of anything else that
is not white space. The hashes are defined here by integer arithmetic alone, so
they are the same on every machine and in every version, and everything is
computed for a batch of texts at once without a Python loop over words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPACE, WORD, MARK = 0, 1, 2
# Separators outside ASCII are U+0080-00BF, U+2000-206F and U+3000-303F; every other character counts as a letter.
WORD_PATTERN = re.compile("[0-9a-z\u00c0-\u1fff\u2070-\u2fff\u3040-\U0010ffff]+")
_FOLD = {"×": "*", "÷": "/", "−": "-"}  # signs that stand for an ASCII operator
_LONG = 4096  # powers of the byte hash repeat after this many bytes of one word


@dataclass(frozen=True)
class Words:
    """Hashes of the words of several texts; those of text d lie in [offsets[d], offsets[d + 1])."""

    hashes: np.ndarray  # uint64 [words]
    offsets: np.ndarray  # int64 [texts + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def owner(self) -> np.ndarray:
        """int64 [words]: the text each word belongs to."""
        return np.repeat(np.arange(len(self)), self.counts)

    def of(self, text: int) -> np.ndarray:
        return self.hashes[self.offsets[text] : self.offsets[text + 1]]


@dataclass(frozen=True)
class Tokens:
    """Words and units of several texts, which words are numbers, and the mean length of a word."""

    words: Words
    units: Words
    numeric: np.ndarray  # bool [words]: begins with a digit
    mean_word_bytes: np.ndarray  # float64 [texts], 0 without words


def fold(text: str) -> str:
    """The lower-cased text in which words are looked for."""
    text = text.lower()
    if not text.isascii():
        for sign, operator in _FOLD.items():
            text = text.replace(sign, operator)
    return text


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): uint64 to uint64, one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def stream(seed: int, count: int) -> np.ndarray:
    """`count` pseudo-random uint64 that depend on `seed` alone (SplitMix64)."""
    with np.errstate(over="ignore"):
        return mix(np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


_BYTE = stream(1, 256)
_POWER = np.full(_LONG, 0x9E3779B97F4A7C15, np.uint64)
_POWER[0] = 1
_POWER = np.cumprod(_POWER, dtype=np.uint64)
_STEP = np.uint64(0xD1342543DE82EF95)  # odd, so multiplying loses nothing


def _class_table() -> np.ndarray:
    table = np.full(256, MARK, np.uint8)
    table[list(b" \t\n\r\x0b\x0c")] = SPACE
    table[[*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1), *range(128, 256)]] = WORD
    return table


_CLASS = _class_table()
_DIGIT = np.isin(np.arange(256), list(b"0123456789"))


def _classes(data: np.ndarray) -> np.ndarray:
    """uint8 [bytes]: white space, word or mark, for UTF-8."""
    classes = _CLASS[data]
    lead = np.flatnonzero(data >= 0xC2)
    lead = lead[lead < len(data) - 1]
    first, second = data[lead], data[lead + 1]
    two = lead[(first == 0xC2) & (second < 0xC0)]  # U+0080-00BF
    three = lead[((first == 0xE2) & (second <= 0x81)) | ((first == 0xE3) & (second == 0x80))]
    for start, size in ((two, 2), (three, 3)):
        for step in range(size):
            classes[start + step] = MARK
    classes[two[data[two + 1] == 0xA0]] = SPACE  # NO-BREAK SPACE
    classes[two[data[two + 1] == 0xA0] + 1] = SPACE
    return classes


def tokenise(texts: Sequence[str]) -> Tokens:
    """Words and units of a batch of texts. Needs about 60 bytes of memory for each byte of text."""
    encoded = [fold(text).encode() for text in texts]
    data = np.frombuffer(b"\n".join([*encoded, b""]), np.uint8)
    text_ends = np.cumsum([len(item) + 1 for item in encoded], dtype=np.int64)
    classes = _classes(data)
    # A unit begins where the class changes to something other than white space; texts are parted by a newline.
    changed = np.concatenate([[True], classes[1:] != classes[:-1]])
    begins = np.flatnonzero(changed & (classes != SPACE))
    used = np.flatnonzero(classes != SPACE)
    first = np.flatnonzero(changed[used])
    sizes = np.diff(np.append(first, len(used)))
    place = np.arange(len(used)) - np.repeat(first, sizes)
    values = _BYTE[data[used]] * _POWER[place & (_LONG - 1)]
    hashes = mix(np.add.reduceat(values, first)) if len(first) else np.zeros(0, np.uint64)
    offsets = np.concatenate([[0], np.searchsorted(begins, text_ends)])
    is_word = classes[begins] == WORD
    word_offsets = np.concatenate([[0], np.cumsum(is_word)])[offsets]
    letters = np.concatenate([[0], np.cumsum(np.where(is_word, sizes, 0))])[offsets]
    return Tokens(
        words=Words(hashes[is_word], word_offsets),
        units=Words(hashes, offsets),
        numeric=_DIGIT[data[begins[is_word]]],
        mean_word_bytes=np.diff(letters) / np.maximum(np.diff(word_offsets), 1),
    )


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """uint64 [words]: the hash of each single word, as `tokenise` gives it."""
    found = tokenise(words).words
    if not np.array_equal(found.counts, np.ones(len(words))):
        raise ValueError("each text must be one word")
    return found.hashes


def words_of(text: str) -> list[str]:
    """The words of one text as strings; `tokenise` gives their hashes."""
    return WORD_PATTERN.findall(fold(text))


def members(hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """bool [hashes]: which of them are in a sorted array."""
    place = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return ordered[place] == hashes


def ngrams(words: Words, size: int) -> Words:
    """Hashes of all `size` consecutive words inside one text; shorter texts have none."""
    starts, offsets = _starts(words, np.maximum(words.counts - size + 1, 0))
    return Words(_combine(words.hashes, starts, size), offsets)


def window_sums(words: Words, values: np.ndarray, size: int) -> np.ndarray:
    """int64: sums of a value per word over the same windows as `ngrams`."""
    starts, _ = _starts(words, np.maximum(words.counts - size + 1, 0))
    total = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return total[starts + size] - total[starts]


def _starts(words: Words, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the first word of each window, `counts` windows for each text, and the windows' offsets."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return np.arange(offsets[-1]) + np.repeat(words.offsets[:-1] - offsets[:-1], counts), offsets


def shingles(words: Words, size: int) -> Words:
    """Like `ngrams`, but a text of fewer than `size` words has one shingle, made of all it has (none without words)."""
    starts, offsets = _starts(words, np.where(words.counts > 0, np.maximum(words.counts - size + 1, 1), 0))
    short = np.flatnonzero((words.counts > 0) & (words.counts < size))
    padded = np.concatenate([words.hashes, np.zeros(size, np.uint64)])
    hashes = _combine(padded, starts, size)
    for length in range(1, size):
        chosen = short[words.counts[short] == length]
        hashes[offsets[chosen]] = _combine(padded, words.offsets[chosen], length)
    return Words(hashes, offsets)


def _combine(hashes: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """uint64 [starts]: an order-dependent hash of `size` values from each start, modulo 2^64 throughout."""
    if not len(starts):
        return np.zeros(0, np.uint64)
    span = len(hashes) - size + 1
    total = hashes[:span].copy()
    for step in range(1, size):
        total *= _STEP
        total += hashes[step : span + step]
    return mix(total[starts] + np.uint64(size))
