"""Encodings of text files: detection, and text that was decoded in a wrong one (mojibake).

Text of Latin script is judged by its letters: in the right encoding all belong to the alphabet of one language.
charset-normalizer judges the other scripts.
"""

from __future__ import annotations

import codecs
import itertools
import re
import unicodedata
from collections import Counter
from functools import lru_cache
from typing import AnyStr, NamedTuple

from athanor.base.errors import ParamsError

UTF_8, DETECT = "utf-8", "detect"
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # after UTF-32, whose mark begins like it
LATIN = ("cp1252", "cp1250", "cp1254", "cp1257", "iso8859_2", "mac_roman", "cp850", "cp852", "mac_latin2", "cp1258")
OTHERS = (
    "cp1251 koi8_r koi8_u cp866 iso8859_5 mac_cyrillic cp1253 iso8859_7 cp1255 iso8859_8 cp1256 iso8859_6 cp874"
    " gb18030 big5 cp932 euc_jp cp949"
).split()
# What UTF-8 is misread as.
MISREAD = "cp1252 cp1250 cp1251 mac_roman cp437 cp850 koi8_r cp866 cp1253 cp1254 gb18030 cp932 cp949".split()
ASIAN = ("gb18030", "cp932", "cp949")
ALPHABETS = [
    frozenset(letters)
    for letters in (
        "äöüß äöåé æøåéòóô àâæçèéêëîïôœùûüÿñ áéíóúüñçàèïò ãâáàçéêíóôõúüè àèéìíîòóùúï ąćęłńóśźż áčďéěíňóřšťúůýž"
        " áäčďéíĺľňóôŕšťúýž áéíóöőúüű ăâîşţșț çğıöşüâîû\u0307 ąčęėįšųūž āčēģīķļņšūž äõöüšž áðéíóúýþæöø čćđšž çë"
        " àçèéíïòóúü· äëéïöüèêáóúí áéíóúẃýâêîôûŵŷäëïöüẅÿàèìòù áéíóúñũĩãẽõỹ"
        " àáâèéêíìóôùúýăđơư\u0300\u0301\u0303\u0309\u0323"
    ).split(" ")
]
PUNCTUATION = frozenset("‘’‚“”„«»‹›–—…•·°§©®™€£¥¢¡¿\u00a0\u00adªº²³¹½¼¾×÷±µ†‡")
WINDOWS = frozenset(bytes(range(0x80, 0x100)).decode("cp1252", "ignore")) | {chr(n) for n in range(0x80, 0x100)}
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_AFTER_LETTER = re.compile(r"(?<=[a-z])([^\x00-\x7f])(?=([a-z]?))")
_WORD = re.compile(r"[^\W\d_]+")
_ISO_2022 = re.compile(r"\x1b\$[@AB(]")
SAMPLE = 60_000  # characters of lines with some outside of ASCII
PROBE = 400  # characters outside of ASCII by which most encodings are out of the question
FEW = 8  # characters outside of ASCII that may be anything
ENOUGH = 40  # letters outside of ASCII in another script than the Latin one, to be sure of its encoding
_JAMO = re.compile("[\u3131-\u318e]")  # parts of Korean letters: no text has them, but EUC-JP read as Korean
LOOKS_RIGHT, LOOKS_WRONG = 0.97, 0.9  # shares of the characters outside of ASCII that are of one language
MAX_CHAOS, MAX_CHAOS_CJK, MAX_MIXED = 10.0, 20.0, 0.2  # the first two of charset-normalizer, in percent


class Guess(NamedTuple):
    encoding: str
    sure: bool
    text: str  # what was looked at, decoded
    other: str = ""  # the next best, where it is not sure; of mojibake, what the text was read as

    @property
    def line(self) -> str:
        """The beginning of a line that shows whether the text is right."""
        lines = (line.strip()[:60] for line in self.text.splitlines())
        return max(lines, key=lambda line: sum(map(len, _NOT_ASCII.findall(line))), default="")


def choose(data: bytes, setting: str, *, cut: bool = False) -> str | Guess | None:
    """The encoding to decode with; a guess, or None, where `setting` does not say enough. `cut` data may end within a character.

    A byte order mark comes first, then UTF-8, then the setting: an encoding, or `detect`.
    """
    if mark := marked(data):
        return mark
    guess = wide(data)
    if guess is None and is_utf8(data, cut):
        return UTF_8
    if is_damaged(data):
        return None
    if setting not in (UTF_8, DETECT):
        return setting
    guess = guess or detect(data)
    return guess.encoding if setting == DETECT and guess is not None and guess.sure else guess


def check_encoding(setting: str) -> None:
    """ParamsError for a setting that is no encoding of text."""
    try:
        if setting == DETECT or codecs.lookup(setting)._is_text_encoding:  # type: ignore[attr-defined]
            return
    except LookupError:
        pass
    raise ParamsError(f"unknown encoding '{setting}'", where="encoding", fix="for example cp1251, gb18030 or detect")


def marked(data: bytes) -> str | None:
    """The encoding that a byte order mark names."""
    return next((name for mark, name in MARKS.items() if data.startswith(mark)), None)


def is_damaged(data: bytes) -> bool:
    """Whether the lines that are not valid UTF-8 are so but for a few bytes, or the last one was cut."""
    lines = data.split(b"\n")
    bad = [line for line in lines if not is_utf8(line, cut=False)]
    if (
        bad == lines[-1:]
        and len(lines) > 1
        and not data.decode(UTF_8, "ignore").isascii()
        and is_utf8(lines[-1], cut=True)
    ):
        return True
    found = "".join(_NOT_ASCII.findall(b"\n".join(bad).decode(UTF_8, "replace")))
    return len(found) > 5 * found.count("\ufffd")


def decode(data: bytes, encoding: str) -> str:
    """Text of an encoding, in which lines may be UTF-8: of a file that was put together from several."""
    if encoding == UTF_8 or marked(data) or wide(data):
        return data.decode(encoding)
    lines = [line for line in data.split(b"\n") if not line.isascii()]
    utf8 = sum(is_utf8(line, cut=False) and len("".join(_NOT_ASCII.findall(line.decode()))) >= FEW for line in lines)
    if 20 * utf8 < len(lines):  # short lines of Chinese are valid UTF-8 now and then
        return data.decode(encoding)
    return "\n".join(line.decode(UTF_8 if is_utf8(line, cut=False) else encoding) for line in data.split(b"\n"))


def wide(data: bytes) -> Guess | None:
    """UTF-16 without a mark and ISO 2022, which are valid UTF-8."""
    names: tuple[str, ...] = ()
    if data.count(0) > len(data) // 5:
        names = ("utf-16-le" if data[1::2].count(0) > data[::2].count(0) else "utf-16-be",)
    elif b"\x1b$" in data[:SAMPLE]:
        names = ("iso2022_jp", "iso2022_kr")
    for encoding in names:
        text = data[: SAMPLE & ~1].decode(encoding, "ignore")
        if text and sum(each.isprintable() or each.isspace() for each in text) > LOOKS_RIGHT * len(text):
            return Guess(encoding, True, text)
    return None


def is_utf8(data: bytes, cut: bool) -> bool:
    try:
        codecs.getincrementaldecoder(UTF_8)().decode(data, final=not cut)
    except UnicodeDecodeError:
        return False
    return True


def detect(data: bytes) -> Guess | None:
    """The encoding of text that is not UTF-8; None where none fits."""
    if (found := wide(data)) is not None:
        return found
    sample = b"\n".join(_sample(data, b"\n"))
    guess = _detect(sample) if sample else None
    # The end may be cut within a character.
    return _detect(sample[:-1]) if len(sample) >= SAMPLE and not (guess and guess.sure) else guess


def _sample(text: AnyStr, newline: AnyStr) -> list[AnyStr]:
    """As many lines as are looked at, of those with something outside of ASCII; of bytes, those that are not UTF-8."""
    lines, size = [], 0
    for line in text.split(newline):
        if line.isascii() or (isinstance(line, bytes) and is_utf8(line, cut=False)):
            continue
        lines.append(line[: SAMPLE - size])
        if (size := size + len(lines[-1])) >= SAMPLE:
            break
    return lines


@lru_cache(maxsize=64)
def _detect(sample: bytes) -> Guess | None:
    readings: dict[str, str] = {}  # encodings by text: those that agree are one
    for encoding in LATIN:
        try:
            readings.setdefault(sample.decode(encoding), encoding)
        except UnicodeDecodeError:
            continue
    if readings:
        ranked = sorted(((_fit(text), text) for text in readings), key=lambda item: item[0], reverse=True)
        (fit, text), (second, other) = ranked[0], (ranked[1:] or [((0.0, 0), "")])[0]
        if fit[0] >= LOOKS_RIGHT:
            return Guess(readings[text], fit > second, text, "" if fit > second else readings[other])
    from charset_normalizer import from_bytes

    found = [each for each in from_bytes(sample, cp_isolation=OTHERS) if each.encoding in OTHERS]
    if not found:
        return Guess(readings[text], False, text) if readings else None
    text = str(found[0])
    words = [word for word in _WORD.findall(text) if not word.isascii()]
    mixed = sum(re.search("[A-Za-z]", word) is not None for word in words)
    sure = found[0].percent_chaos <= (MAX_CHAOS_CJK if found[0].multi_byte_usage else MAX_CHAOS)
    letters = sum(map(len, words))
    sure = sure and letters >= ENOUGH and letters > 1.5 * len(words) and mixed <= MAX_MIXED * len(words)
    chaos, coherence = found[0].percent_chaos + 1, found[0].percent_coherence
    rivals = (each for each in found[1:] if each.percent_chaos <= chaos and each.percent_coherence >= coherence)
    sure = (
        sure and all(str(each) == text for each in rivals) and not (found[0].encoding == "cp949" and _JAMO.search(text))
    )
    return Guess(found[0].encoding, sure, text, found[1].encoding if found[1:] else "")


def _fit(text: str) -> tuple[float, int]:
    """The share of the characters outside of ASCII that are of the one Latin alphabet that fits best, or marks; and the marks.

    0 where most letters are outside of ASCII: no language of Latin script is written so.
    """
    counts = Counter("".join(_NOT_ASCII.findall(text)).lower())
    if not counts:
        return 1.0, 0
    if 2 * sum(count for each, count in counts.items() if each.isalpha()) > sum(map(str.isalpha, text)):
        return 0.0, 0
    marks = sum(counts[character] for character in PUNCTUATION)
    best = max(sum(counts[letter] for letter in alphabet) for alphabet in ALPHABETS)
    misplaced = 0  # capital letters, and symbols within a word
    for character, following in _AFTER_LETTER.findall(text):
        symbol = following and character not in "’‘·\u00ad" and not unicodedata.combining(character)
        misplaced += character.isupper() or bool(symbol and not character.isalpha())
    return (marks + best - misplaced) / counts.total(), marks


def _byte(error: UnicodeError) -> tuple[bytes, int]:
    """What Latin-1 has and Windows has not; others are a byte that UTF-8 never has."""
    characters = error.object[error.start : error.end]  # type: ignore[attr-defined]
    return bytes(ord(each) if each < "\u0100" else 0xFF for each in characters), error.end  # type: ignore[attr-defined]


codecs.register_error("athanor.byte", _byte)  # type: ignore[arg-type]


def mojibake(text: str) -> Guess | None:
    """The true encoding of text that was decoded in another one; "" where bytes are lost.

    None for text that is right, or has few characters outside of ASCII.
    """
    if _ISO_2022.search(text[:SAMPLE]):
        again = text[:SAMPLE].encode("ascii", "ignore").decode("iso2022_jp", "ignore")
        return Guess("iso2022_jp", True, again, "ascii")
    if text.isascii():
        return None
    sample = "\n".join(_sample(text, "\n"))
    characters = "".join(_NOT_ASCII.findall(sample))
    if len(characters) < FEW:
        return None
    if characters.count("\ufffd") > len(characters) / 2:
        return Guess("", True, sample)
    probe = characters[:PROBE]
    wide = 2 * sum(each > "\u2e7f" for each in probe) > len(probe)  # UTF-8 read in an encoding of Asia is ideographs
    words = probe.isalpha() and not re.search("[а-яё][А-ЯЁ]", sample)  # those of cp866 have marks or capitals within
    for wrong in MISREAD:
        if not wrong.startswith("cp125") and 2 * len(probe.encode(wrong, "ignore").decode(wrong)) < len(probe):
            continue  # most are not of it
        if (wrong in ASIAN) != wide or (wrong == "cp866" and words) or not _is_utf8_read_as(wrong, probe):
            continue
        again = sample.encode(wrong, "athanor.byte").decode(UTF_8, "replace")
        if _is_utf8_read_as(wrong, sample) and again != sample:
            return Guess(UTF_8, True, again, _latin(characters) if wrong == "cp1252" else wrong)
    foreign = set(characters) - WINDOWS
    if sum(each in foreign for each in characters) > len(characters) / 20 or _fit(sample)[0] > LOOKS_WRONG:
        return None
    if (
        sum(left > "\x7f" and ord(right) - ord(left) == 1 for left, right in itertools.pairwise(sample))
        > len(characters) / 4
    ):
        return None  # a table of characters
    if 2 * len(set(characters)) < FEW and not any("\x80" <= each < "\xa0" for each in characters):
        return None
    sample = sample.translate(dict.fromkeys(map(ord, foreign)))
    guess = _detect(sample.encode("cp1252", "athanor.byte"))
    if guess is None or not guess.sure or guess.text == sample:
        return None
    return guess._replace(other=_latin(characters))


def _is_utf8_read_as(wrong: str, text: str) -> bool:
    found = "".join(_NOT_ASCII.findall(text.encode(wrong, "athanor.byte").decode(UTF_8, "replace")))
    return 2 * found.count("\ufffd") < len(found) and 2 * len(found) >= FEW


def _latin(characters: str) -> str:
    return "cp1252" if max(characters) > "\xff" else "latin1"
