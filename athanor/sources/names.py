"""Names and sentences of one's own text: what a reader asks about, or types, first."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from athanor.base.errors import InputError
from athanor.sources import select
from athanor.sources.params import DocumentSource, FilesSource
from athanor.text import globs

LOOK_CHARS = 4_000_000  # of each source
MOST, LEAST_TIMES = 80, 3
# Words with a capital letter after one without: not the first of a sentence.
_NAME = re.compile(r"(?<=[^\W\d_] )(?:(?:Mr|Mrs|Miss|Ms|Dr|Sir|Lady|St)\.? )?([^\W\d_]{3,})(?: ([^\W\d_]{3,}))?")
_SENTENCE = re.compile(r"[^\W\d_][^.?!\u3002\n]{20,120}[.?!\u3002]")


def names_and_sentences(documents: Sequence[DocumentSource]) -> tuple[list[str], list[str]]:
    """The names that the files of one's own tell of most, and their sentences; no names without capital letters."""
    found: Counter[str] = Counter()
    small: Counter[str] = Counter()
    sentences: list[str] = []
    for source in documents:
        if isinstance(source, FilesSource) and source.kind != "code":
            for text in _texts(source):
                found.update(_names_in(text))
                small.update(re.findall(r"[^\W\d_]+", text))
                sentences += _SENTENCE.findall(re.sub(r"(?<=\S)\n(?=\S)", " ", text))
    often = (name for name, times in found.most_common() if times >= LEAST_TIMES)
    # A word that also stands in small letters is no name: "I told Mother".
    return list(itertools.islice((name for name in often if not small[name.lower()]), MOST)), sentences


def _texts(source: FilesSource) -> Iterator[str]:
    size = 0
    for file in globs.find(source.globs):
        try:
            for document in select.documents(source, [file], 0.0):
                yield document.text
                size += len(document.text)
                if size > LOOK_CHARS:
                    return
        except InputError:  # it is told where the file is read for its text
            continue


def _names_in(text: str) -> Iterator[str]:
    for match in _NAME.finditer(text):
        if text[match.start() - 2].islower() and match[1].istitle():
            yield match[0] if match[2] and match[2].istitle() else text[match.start() : match.end(1)]
