"""Text normalisation that changes how a text is encoded and never what it says.

Every kind: line ends become \\n, control characters other than \\n and \\t go,
byte order marks at the start go, and U+2581 becomes "_" because SentencePiece
cannot carry it. That is all that happens to code, whose bytes have meaning.
The other kinds are also repaired where UTF-8 was once read as Windows-1252,
and composed to NFC, so that one character has one spelling.

Spaces and tabs are never touched: a stripped indent is a different program.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata

BOM = "\ufeff"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SPACES = re.compile(r"[^\S\n]*")


def _misread() -> dict[str, str]:
    """What a character looks like after its UTF-8 bytes were read as Windows-1252.

    Typographic punctuation and the Latin-1 letters. Left out is whatever holds
    white space after the misreading, since a repair must not move an indent.
    """
    table = {"â€": "”"}  # its third byte, 0x9D, reads as a control character, which is gone when the repair looks
    for char in "–—‘’‚“„†‡•…‰‹›€™" + "".join(map(chr, range(0xA1, 0x100))):
        with contextlib.suppress(UnicodeDecodeError):
            seen = char.encode().decode("cp1252")
            if not re.search(r"\s", seen):
                table[seen] = char
    return table


MISREAD = _misread()
_MISREAD = re.compile("|".join(re.escape(seen) for seen in sorted(MISREAD, key=lambda seen: (-len(seen), seen))))


def normalise(text: str, kind: str) -> str:
    """The normalised text; idempotent."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", text).lstrip(BOM).replace("\u2581", "_")
    if kind == "code" or text.isascii():
        return text
    while True:  # one repair may uncover another (text misread twice); each makes the text shorter, so this ends
        repaired = unicodedata.normalize("NFC", _MISREAD.sub(lambda match: MISREAD[match[0]], text)).lstrip(BOM)
        if repaired == text:
            return text
        text = repaired


def misread_count(text: str) -> int:
    """Number of places where UTF-8 was evidently read as Windows-1252."""
    return 0 if text.isascii() else len(_MISREAD.findall(text))


def indents(text: str) -> list[str]:
    """The white space that each line begins with."""
    return [_SPACES.match(line)[0] for line in text.split("\n")]
