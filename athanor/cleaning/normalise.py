"""Text normalisation that changes how a text is encoded and never what it says.

Every kind: line ends become \\n, control characters other than \\n and \\t go,
byte order marks at the start go, U+2581 becomes "_" because SentencePiece
cannot carry it, surrogates are joined or, alone, become U+FFFD. That is all
that happens to code and tokens, whose bytes have meaning. The other kinds are also
repaired where UTF-8 was once read as Windows-1252 or Latin-1, and composed to
NFC, so that one character has one spelling.

Spaces and tabs are never touched: a stripped indent is a different program.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata

BOM = "\ufeff"
AS_FOUND = ("code", "tokens")  # kinds of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# UTF-8 read as Latin-1. What holds a control character was never anything else; without one it is in MISREAD.
_LATIN1 = re.compile("(?:[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})+")
# Composing sorts the marks on a letter, in time that grows with their square; texts with such heaps are left as found
# (the stream-safe format of UAX 15 allows 30).
_HEAP = re.compile("[" + "".join(chr(c) for c in range(0x300, 0x20000) if unicodedata.combining(chr(c))) + "]{64}")
_SPACES = re.compile(r"[^\S\n]*")


def _misread() -> dict[str, str]:
    """What a character looks like after its UTF-8 bytes were read as Windows-1252.

    Typographic punctuation and the Latin-1 letters. Left out is whatever holds
    white space after the misreading, since a repair must not move an indent.
    """
    table = {"â€": "”"}  # its third byte, 0x9D, reads as a control character, which is gone when the repair looks
    for char in "–—‘’‚“„†‡•…‰‹›€™\ufeff" + "".join(map(chr, range(0xA1, 0x100))):
        with contextlib.suppress(UnicodeDecodeError):
            misread_form = char.encode().decode("cp1252")
            if not re.search(r"\s", misread_form):
                table[misread_form] = char
    return table


MISREAD = _misread()
_MISREAD = re.compile("|".join(re.escape(form) for form in sorted(MISREAD, key=lambda form: (-len(form), form))))


def normalise(text: str, kind: str) -> str:
    """The normalised text; idempotent."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        if _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        while kind not in AS_FOUND and (repaired := _LATIN1.sub(_as_utf8, text)) != text:
            text = repaired
    text = _CONTROL.sub("", text).lstrip(BOM).replace("\u2581", "_")
    if kind in AS_FOUND or text.isascii():
        return text
    while True:  # one repair may uncover another (text misread twice); each makes the text shorter, so this ends
        repaired = _MISREAD.sub(lambda match: MISREAD[match[0]], text).lstrip(BOM)
        if not _HEAP.search(repaired):
            repaired = unicodedata.normalize("NFC", repaired)
        if repaired == text:
            return text
        text = repaired


def _as_utf8(match: re.Match[str]) -> str:
    matched = match[0]
    if not any("\x80" <= char <= "\x9f" for char in matched):
        return matched
    try:
        return matched.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return matched


def misread_count(text: str) -> int:
    """Number of places where UTF-8 was evidently read as Windows-1252."""
    return 0 if text.isascii() else len(_MISREAD.findall(text))


def indents(text: str) -> list[str]:
    """The white space that each line begins with."""
    return [_SPACES.match(line)[0] for line in text.split("\n")]
