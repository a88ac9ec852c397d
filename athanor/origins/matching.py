"""A text as bytes and tokens, and which of its parts are worth telling when they stand elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from athanor.tokenizer.tokenizer import Tokenizer

WIDE_BYTES = 12  # outside ASCII that stand for a word where a text has no spaces: four Chinese characters
Range = tuple[int, int]  # bytes [start, end) of the text


@dataclass(frozen=True)
class Query:
    """A text that is looked up: its UTF-8 bytes, its ids, and the bytes [starts, ends) that each id stands for."""

    data: bytes
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Query:
        ids = np.array(tokenizer.encode(text), np.int64)
        ends = np.cumsum(tokenizer.token_bytes[ids])
        return cls(text.encode(), ids, ends - tokenizer.token_bytes[ids], ends)

    def inside(self, start: int, end: int) -> np.ndarray:
        """Which tokens lie whole in a range, but for the space that many begin with, bool [tokens]."""
        spaced = np.frombuffer(self.data, np.uint8)[self.starts] == ord(" ")
        return (self.starts + spaced >= start) & (self.ends <= end)

    def words(self, start: int, end: int) -> int:
        """Words of a range, by its spaces; of a script without spaces by its length."""
        part = self.data[start:end]
        return max(len(part.split()), sum(byte >= 0x80 for byte in part) // WIDE_BYTES)

    def whole(self) -> Range:
        """The range without white space at its ends."""
        return self.trimmed(0, len(self.data))

    def trimmed(self, start: int, end: int) -> Range:
        """The range without parts of words, and without white space, at its ends."""
        while 0 < start < end and self._cuts_word(start):
            start += 1
        while start < end < len(self.data) and self._cuts_word(end):
            end -= 1
        part = self.data[start:end]
        return end - len(part.lstrip()), start + len(part.rstrip())

    def _cuts_word(self, at: int) -> bool:
        continues_character = 0x80 <= self.data[at] < 0xC0
        return continues_character or all(chr(byte).isascii() and _of_word(byte) for byte in self.data[at - 1 : at + 1])

    def uncovered(self, wanted: Range, taken: Iterable[Range]) -> Range:
        """The longest part of a range that none of `taken` covers."""
        parts = [wanted]
        for start, end in taken:
            parts = [piece for a, b in parts for piece in ((a, min(b, start)), (max(a, end), b)) if piece[0] < piece[1]]
        return max(parts, key=lambda part: part[1] - part[0], default=(wanted[0], wanted[0]))


def _of_word(byte: int) -> bool:
    return chr(byte).isalnum() or byte == ord("_")


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements both begin with."""
    shorter = min(len(a), len(b))
    return next((at for at in range(shorter) if a[at] != b[at]), shorter)
