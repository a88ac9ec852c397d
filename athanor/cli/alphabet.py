"""The alphabet of a text: the script of its letters, and whether it is written in a natural language at all."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

LOOK_CHARS = 20_000  # of a text
MIN_PLAIN = 0.75  # of what is not white space, in plain words: prose has 0.95, logs and chess moves half of it
MAX_WORD_CHARS = 24
MIN_LETTERS = 12  # different ones; Hawaiian has 13, DNA four
NAMES = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "FULLWIDTH": "Latin"}


def script(text: str) -> str:
    """The other script that more than a third of the letters are of, as Unicode names it, else "Latin".

    Of the scripts that one language alone writes it is the name of that language.
    """
    counts: Counter[str] = Counter()
    for char, count in Counter(text[:LOOK_CHARS]).items():
        if char.isalpha():
            name = unicodedata.name(char, "LATIN").partition(" ")[0]
            counts[NAMES.get(name, name.capitalize())] += count
    if 10 * counts["Japanese"] > counts["Chinese"]:  # its text is half of it in Chinese characters
        counts["Japanese"] += counts.pop("Chinese", 0)
    others = [(count, name) for name, count in counts.items() if name != "Latin" and 3 * count > counts.total()]
    return max(others)[1] if others else "Latin"


def is_language(text: str) -> bool:
    """Whether a text is of words: in another script, or of Latin letters that are set apart, in lower case or capitalised.

    Not so are sequences (DNA, SMILES), events (MIDI), moves and logs, whose rules are those of the kind `tokens`.
    """
    if script(text) != "Latin":
        return True
    text = unicodedata.normalize("NFC", text[:LOOK_CHARS])
    words = [word for word in re.findall(r"\w+", text) if word.isalpha() and len(word) <= MAX_WORD_CHARS]
    plain = "".join(word for word in words if word.islower() or word.istitle())
    return len(plain) > MIN_PLAIN * len("".join(text.split())) and len(set(plain.lower())) >= MIN_LETTERS
