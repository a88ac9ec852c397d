"""Words as 64-bit hashes: one tokenisation for the rules, the near-duplicate search and the decontamination.

A word is a run of letters and digits, lower-cased; the underscore and all
punctuation separate. A unit is a word or an unbroken run of anything else that
is not white space. The hashes are defined here by integer arithmetic alone, so
they are the same on every machine and in every version, and everything is
computed for a batch of texts at once without a Python loop over words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray]  # one element for each text, by name of what is measured
SPACE, WORD, MARK = 0, 1, 2
BLOCK_BYTES = 1 << 17  # of text tokenised at a time: the arrays of one block stay in the cache
# Separators outside ASCII are U+0080-00BF, U+2000-206F and U+3000-303F; every other character counts as a letter.
WORD_PATTERN = re.compile("[0-9a-z\u00c0-\u1fff\u2070-\u2fff\u3040-\U0010ffff]+")
_FOLD = {"×": "*", "÷": "/", "−": "-"}  # signs that stand for an ASCII operator


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


def prefix_sums(counts: np.ndarray) -> np.ndarray:
    """int64 [counts + 1]: 0, then the sum of the counts up to and with each of them."""
    return np.concatenate([[0], np.cumsum(counts)])


def concatenated(arrays: Iterable[np.ndarray], dtype: Any, *width: int) -> np.ndarray:
    """The arrays joined along the first axis; an empty array [0, *width] if there are none."""
    return np.concatenate([np.zeros((0, *width), dtype), *arrays])


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): uint64 to uint64, one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def splitmix64(seed: int, count: int) -> np.ndarray:
    """`count` pseudo-random uint64 that depend on `seed` alone (SplitMix64)."""
    with np.errstate(over="ignore"):
        return mix(np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def unmix(values: np.ndarray) -> np.ndarray:
    """The inverse of `mix`."""
    values = values ^ (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    values = values * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    values = (values ^ (values >> np.uint64(27)) ^ (values >> np.uint64(54))) * np.uint64(
        pow(0xBF58476D1CE4E5B9, -1, 2**64)
    )
    return values ^ (values >> np.uint64(30)) ^ (values >> np.uint64(60))


_STEP = np.uint64(0xD1342543DE82EF95)  # odd, so multiplying loses nothing
_BASE = 0x9E3779B97F4A7C15


def _powers(base: int, count: int) -> np.ndarray:
    """uint64 [count]: base^0, base^1, ... modulo 2^64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


_POWER, _INVERSE = (_powers(base, 2 * BLOCK_BYTES) for base in (_BASE, pow(_BASE, -1, 2**64)))


def _class_table() -> np.ndarray:
    table = np.full(256, MARK, np.uint8)
    table[list(b" \t\n\r\x0b\x0c")] = SPACE
    table[[*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1), *range(128, 256)]] = WORD
    return table


_CLASS = _class_table().tobytes()
_BYTE = np.where(_class_table() == SPACE, np.uint64(0), splitmix64(1, 256))


def _classes(text: bytes, data: np.ndarray) -> np.ndarray:
    """uint8 [bytes]: white space, word or mark. `text` is UTF-8 without NO-BREAK SPACE, `data` its bytes."""
    classes = np.frombuffer(bytearray(text.translate(_CLASS)), np.uint8)
    if text.isascii():
        return classes
    lead = np.flatnonzero(data >= 0xC2)
    first, second = data[lead], data[lead + 1]
    two_byte = lead[(first == 0xC2) & (second < 0xC0)]  # U+0080-00BF
    three_byte = lead[((first == 0xE2) & (second <= 0x81)) | ((first == 0xE3) & (second == 0x80))]
    for start, size in ((two_byte, 2), (three_byte, 3)):
        for step in range(size):
            classes[start + step] = MARK
    return classes


def tokenise(texts: Sequence[str]) -> Tokens:
    """Words and units of a batch of texts. Needs about 60 bytes of memory for each byte of the longest text."""
    return _joined([_tokenise_block(block) for block in _blocks(texts)])


def _blocks(texts: Sequence[str]) -> Iterator[list[bytes]]:
    """Runs of whole texts of about BLOCK_BYTES, at least one run."""
    block: list[bytes] = []
    size = 0
    for text in texts:
        encoded = fold(text).encode()
        if block and size + len(encoded) > BLOCK_BYTES:
            yield block
            block, size = [], 0
        block.append(encoded)
        size += len(encoded)
    yield block


def _tokenise_block(encoded: list[bytes]) -> Tokens:
    # A newline separates the texts, so that each takes at least one byte.
    text = b"\n".join([*encoded, b""])
    if not text.isascii():
        text = text.replace(b"\xc2\xa0", b"  ")
    data = np.frombuffer(text, np.uint8)
    ends = np.cumsum([len(item) + 1 for item in encoded], dtype=np.int64)
    classes = _classes(text, data)
    # A unit begins where the class changes to something other than white space.
    starts_unit = np.empty(len(data), bool)
    starts_unit[:1] = True
    np.not_equal(classes[1:], classes[:-1], out=starts_unit[1:])
    starts_unit &= classes != SPACE
    unit_starts = np.flatnonzero(starts_unit)
    # A unit's hash is the mixed sum of _BYTE[byte] * base^position, with positions counted from the unit's start. The
    # sum is taken with positions from the block's start, then divided by base^start; white space counts 0.
    power, inverse = _POWER, _INVERSE
    if len(data) > len(power):
        power, inverse = (_powers(base, len(data)) for base in (_BASE, pow(_BASE, -1, 2**64)))
    values = np.take(_BYTE, data, mode="clip")  # which is faster than to check the range
    values *= power[: len(data)]
    sums = np.add.reduceat(values, unit_starts) if len(unit_starts) else np.zeros(0, np.uint64)
    hashes = mix(sums * inverse[unit_starts])
    offsets = np.concatenate([[0], np.searchsorted(unit_starts, ends)])
    is_word = classes[unit_starts] == WORD
    word_offsets = prefix_sums(is_word)[offsets]
    letters = np.zeros(0)
    if len(ends):
        letters = np.add.reduceat(classes == WORD, np.concatenate([[0], ends[:-1]]), dtype=np.int64)
    return Tokens(
        words=Words(hashes[is_word], word_offsets),
        units=Words(hashes, offsets),
        numeric=data[unit_starts[is_word]] <= ord("9"),  # of a word's bytes digits come first
        mean_word_bytes=letters / np.maximum(np.diff(word_offsets), 1),
    )


def _joined(blocks: list[Tokens]) -> Tokens:
    if len(blocks) == 1:
        return blocks[0]

    def join(words: list[Words]) -> Words:
        ends = np.cumsum([0, *(len(item.hashes) for item in words)])
        offsets = [item.offsets[1:] + end for item, end in zip(words, ends, strict=False)]
        return Words(np.concatenate([item.hashes for item in words]), np.concatenate([[0], *offsets]))

    return Tokens(
        words=join([block.words for block in blocks]),
        units=join([block.units for block in blocks]),
        numeric=np.concatenate([block.numeric for block in blocks]),
        mean_word_bytes=np.concatenate([block.mean_word_bytes for block in blocks]),
    )


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """uint64 [words]: the hash of each single word, as `tokenise` gives it."""
    tokenised = tokenise(words).words
    if not np.array_equal(tokenised.counts, np.ones(len(words))):
        raise ValueError("each text must be one word")
    return tokenised.hashes


def words_of(text: str) -> list[str]:
    """The words of one text as strings; `tokenise` gives their hashes."""
    return WORD_PATTERN.findall(fold(text))


def ngrams(words: Words, size: int) -> Words:
    """Hashes of all `size` consecutive words inside one text; shorter texts have none."""
    starts, offsets = _starts(words, np.maximum(words.counts - size + 1, 0))
    return Words(_combine(words.hashes, starts, size), offsets)


def _starts(words: Words, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of each window's first word, with `counts` windows for each text, and the offsets of the windows."""
    offsets = prefix_sums(counts)
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


def rolling_sums(hashes: np.ndarray, size: int) -> np.ndarray:
    """uint64 [positions]: an order-dependent sum of the `size` hashes from each position on, modulo 2^64.

    The ends of texts are ignored.

    `finalised(rolling_sums(...), size)` are the hashes of the n-grams; `rolling_sums_at` gives the sums at chosen positions.
    """
    total = hashes[: max(len(hashes) - size + 1, 0)].copy()
    for step in range(1, size):
        total *= _STEP
        total += hashes[step : step + len(total)]
    return total


def rolling_sums_at(hashes: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """uint64 [positions]: `rolling_sums(hashes, size)[positions]`, for few positions."""
    total = hashes[positions]
    for step in range(1, size):
        total = total * _STEP + hashes[positions + step]
    return total


def finalised(total: np.ndarray, size: int) -> np.ndarray:
    """The hash of an n-gram of `size` words from its rolling sum."""
    return mix(total + np.uint64(size))


def unfinalised(hashes: np.ndarray, size: int) -> np.ndarray:
    """The inverse of `finalised`: the rolling sums of given n-gram hashes, so that a search need not mix every sum."""
    return unmix(hashes) - np.uint64(size)


def _combine(hashes: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """uint64 [starts]: the hash of the `size` words from each start."""
    return finalised(rolling_sums(hashes, size)[starts], size) if len(starts) else np.zeros(0, np.uint64)
