"""Weak labels: generated good and bad texts, for use where no real texts have been judged.

Quality: a document of the corpus is good and a corruption of the same document
is bad. Both have the same length, layout and subject, so that none of these
can be what the classifier learns; the predecessor's negatives were all short,
and its classifier learned length. Code is corrupted as code, so "is code" is
not what it learns either.

Toxicity: sentences from templates, filled with words of abuse or with friendly
words, are put between the lines of a document. What is learned is a list of
words and how they go together, no understanding, and nothing measured on such
texts says how well abuse in real text is found.

The texts made from a document depend on the document and the seed alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from athanor.quality import language
from athanor.text.recipes import read_texts

WINDOW_CHARS = 4_000  # of a document that are trained on
_WHITESPACE = re.compile(r"(\s+)")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_STOP = frozenset(language.ENGLISH.split())
_WORD = re.compile(r"\w+")
TEXTS = read_texts(Path(__file__).with_name("weak.yaml"))
_KEYWORDS = frozenset(TEXTS["keywords"].split())


def window(text: str, rng: random.Random) -> str:
    """At most WINDOW_CHARS of a text, from the beginning of a line where there is one."""
    if len(text) <= WINDOW_CHARS:
        return text
    start = rng.randrange(len(text) - WINDOW_CHARS + 1)
    start = text.rfind("\n", 0, start) + 1
    return text[start : start + WINDOW_CHARS]


def corrupt(text: str, kind: str, rng: random.Random) -> tuple[str, str, str]:
    """(name of the corruption, a good text, a bad text). The good one is the text, cut to the length of the bad one."""
    name = rng.choice(tuple(CORRUPTIONS))
    bad = CORRUPTIONS[name](text, kind == "code", rng)
    return name, text[: max(len(bad), 1)], bad[: len(text)]


def _split_words(text: str) -> tuple[list[str], list[str]]:
    """The words between white space, and the white space after each."""
    pieces = _WHITESPACE.split(text)
    return pieces[::2], [*pieces[1::2], ""]


def _join(words: list[str], gaps: list[str]) -> str:
    return "".join(word + gap for word, gap in zip(words, gaps, strict=True))


def shuffle(text: str, code: bool, rng: random.Random) -> str:
    words, gaps = _split_words(text)
    rng.shuffle(words)
    return _join(words, gaps)


def boilerplate(text: str, code: bool, rng: random.Random) -> str:
    """Boilerplate of web pages; for code, lines as code generators write them and hexadecimal numbers."""
    out: list[str] = []
    size = 0
    while size < len(text):
        if code and rng.random() < 0.5:
            piece = " ".join(f"0x{rng.getrandbits(32):08x}," for _ in range(rng.randint(2, 12)))
        else:
            piece = rng.choice(TEXTS["generated" if code else "page"])
        out.append(piece)
        size += len(piece) + 1
    return "\n".join(out)


def noise(text: str, code: bool, rng: random.Random) -> str:
    """Replace a tenth to a third of the characters that are not white space by random ones."""
    share = rng.uniform(0.1, 0.35)
    return "".join(rng.choice(_LETTERS) if not c.isspace() and rng.random() < share else c for c in text)


def strip(text: str, code: bool, rng: random.Random) -> str:
    """Remove the function words, or from code the keywords."""
    removed = _KEYWORDS if code else _STOP
    words, gaps = _split_words(text)
    remaining = [
        (w, g) for w, g in zip(words, gaps, strict=True) if not removed & {m.lower() for m in _WORD.findall(w)[:1]}
    ]
    return "".join(word + gap for word, gap in remaining)


def fragments(text: str, code: bool, rng: random.Random) -> str:
    """Join pieces of two to six words from anywhere in the text, each cut off in the middle of its last word."""
    words, gaps = _split_words(text)
    out: list[str] = []
    while len(out) < len(words):
        start = rng.randrange(len(words))
        piece = words[start : start + rng.randint(2, 6)]
        out += [*piece[:-1], piece[-1][: max(len(piece[-1]) // 2, 1)]]
    return _join(out[: len(words)], gaps)


CORRUPTIONS: dict[str, Callable[[str, bool, random.Random], str]] = {
    "shuffled_words": shuffle,
    "boilerplate": boilerplate,
    "character_noise": noise,
    "function_words_stripped": strip,
    "fragments": fragments,
}


def loop(text: str, rng: random.Random) -> str:
    """One phrase of the text over and over, in the layout of the text: for the test only, since its words are good."""
    words, gaps = _split_words(text)
    size = rng.randint(1, 12)
    start = rng.randrange(max(len(words) - size, 1))
    phrase = words[start : start + size]
    return _join([phrase[number % len(phrase)] for number in range(len(words))], gaps)


def with_inserted_sentences(text: str, toxic: bool, test: bool, rng: random.Random) -> str:
    """Insert abusive or friendly sentences between the lines, a twentieth to a half as many words as the text has."""
    lines = text.split("\n")
    words = len(text.split())
    count = max(round(words * rng.uniform(0.05, 0.5) / 7), 1)
    vocabulary = TEXTS["abuse" if toxic else "friendly"]
    for _ in range(count):
        slots = {name: rng.choice(values) for name, values in vocabulary.items()}
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(TEXTS["templates"])[test].format(**slots))
    return "\n".join(lines)
