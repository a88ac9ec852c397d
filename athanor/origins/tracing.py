"""Which parts of a text stand word for word in what a model was trained on, and where.

For each token of the text the longest match is looked up in the suffix arrays; of matches inside one another the longest
is kept (maximal spans, as in OLMoTrace: Liu et al. 2025, arXiv:2504.07096). A few common words stand somewhere in any
text and say nothing. So a span has MIN_WORDS words or is the whole text, and of tokens drawn one by one by their
frequency less than one in 2^RARE_BITS training texts of this size would hold it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.origins.documents import trained_on
from athanor.origins.index import open_index
from athanor.origins.matching import Query, Range, common_beginning
from athanor.origins.suffixes import END

MIN_WORDS, RARE_BITS = 6, 20.0
EXAMINED = 256  # places of a match, in each part of the data, that are looked at one by one
EDGE_TOKENS = 16  # beside a match, in which it may go on: a word that is cut into other tokens there
MAX_CHARS = 20_000  # of a text


class Seen(NamedTuple):
    """Where a match stands: number of the data, first token in all its blocks together, and how many tokens."""

    data: int
    place: int
    tokens: int


@dataclass(frozen=True)
class Place:
    """A document or conversation that holds a span.

    kind: document, conversation, or text in fine-tuning. id: of the text in data/clean, or the entry's number.
    about: its meta, or the question of the turn. part: of that turn, question or answer. copies: how often the data has
    it. steps: those that learned the span from it; None where that is not known.
    """

    kind: str
    id: str
    source: str
    license: str
    about: str
    part: str
    copies: int
    steps: list[int] | None


@dataclass(frozen=True)
class Span:
    """A part of the text that stands in the training data.

    times: how often in distinct documents. documents: how many of them hold it, or of the first EXAMINED times.
    """

    text: str
    times: int
    documents: int
    places: list[Place]


@dataclass(frozen=True)
class Trace:
    """pieces: the text, each piece with its span's number from 1, or None where it is the model's own.

    found: tokens inside spans, of `tokens`. data_tokens: of the distinct documents searched.
    """

    pieces: list[tuple[str, int | None]]
    spans: list[Span]
    found: int
    tokens: int
    data_tokens: int
    min_words: int = MIN_WORDS

    def as_json(self) -> Facts:
        return asdict(self)


class Tracer:
    """Looks texts up in the data of one checkout. Opening it makes the indexes that are missing."""

    def __init__(self, root: Path, advance: Tick = ignore) -> None:
        self._data = trained_on(root)
        self.tokenizer = self._data[0].tokenizer
        self._indexes = [open_index(root, documents, advance) for documents in self._data]
        counts = np.sum([index.counts for index in self._indexes], axis=0)
        self._tokens = int(counts.sum())
        self._bits = np.log2(self._tokens) - np.log2(np.maximum(counts, 1))  # of each id, by its frequency
        self._control = self.tokenizer.token_bytes == 0

    def trace(self, text: str, most: int = 3) -> Trace:
        """The spans of a text, each with up to `most` places in every part of the data.

        InputError for a text that is empty or has more than MAX_CHARS characters.
        """
        if not text.strip() or len(text) > MAX_CHARS:
            what = f"{len(text):,} characters, of at most {MAX_CHARS:,}" if text.strip() else "no text"
            raise InputError(what, where="trace", fix="give an answer, or a part of one")
        query = Query.of(text, self.tokenizer)
        matches = self._chosen(query, self._candidates(query))
        found = sum(int(query.inside(*bounds).sum()) for bounds in matches)
        spans = self._described(query, matches, most)
        return Trace(_pieces(query, list(matches)), spans, found, len(query.ids), self._tokens)

    def tells(self, text: str) -> bool:
        """Whether the text as a whole is rare enough to be a span, if it stands somewhere."""
        query = Query.of(text, self.tokenizer)
        return self._rare(query, query.whole())

    def _candidates(self, query: Query) -> list[tuple[Range, list[Seen]]]:
        """Maximal matches, widened to what their places have in common with the text beyond the tokens."""
        asked, at = np.append(query.ids, END), np.arange(len(query.ids))
        length = np.max([index.longest(asked, at) for index in self._indexes], axis=0)
        maximal = (length > 0) & (np.append(0, (at + length)[:-1]) < at + length)
        # A match may go on at both ends, by a word that is cut into other tokens there.
        words, tokens = MIN_WORDS - 2, 0
        if query.words(*query.whole()) < MIN_WORDS:  # all of it or nothing
            words, tokens = 0, len(query.ids) - 2 * EDGE_TOKENS
        cores = [
            (start, start + count)
            for start, count in zip(at[maximal].tolist(), length[maximal].tolist(), strict=True)
            if count >= tokens and query.words(int(query.starts[start]), int(query.ends[start + count - 1])) >= words
        ]
        seen = self._places([query.ids[start:end] for start, end in cores])
        return [self._widened(query, core, places) for core, places in zip(cores, seen, strict=True)]

    def _places(self, patterns: list[np.ndarray]) -> list[list[Seen]]:
        found: list[list[Seen]] = [[] for _ in patterns]
        for number, index in enumerate(self._indexes):
            _, places = index.places(patterns, EXAMINED)
            for seen, pattern, starts in zip(found, patterns, places, strict=True):
                seen += [Seen(number, place, len(pattern)) for place in starts.tolist()]
        return found

    def _widened(self, query: Query, core: Range, places: list[Seen]) -> tuple[Range, list[Seen]]:
        start, end = int(query.starts[core[0]]), int(query.ends[core[1] - 1])
        beyond = [self._beyond(query, start, end, place) for place in places]
        left, right = max(beyond, key=sum)
        reaching = [place for place, (a, b) in zip(places, beyond, strict=True) if a >= left and b >= right]
        return query.trimmed(start - left, end + right), reaching

    def _beyond(self, query: Query, start: int, end: int, seen: Seen) -> tuple[int, int]:
        """How many bytes before and after a match its document goes on like the text."""
        index = self._indexes[seen.data]
        before, after = index.around(seen.place, seen.tokens, EDGE_TOKENS)
        if (borders := np.flatnonzero(self._control[before])).size:
            before = before[borders[-1] + 1 :]
        if (borders := np.flatnonzero(self._control[after])).size:
            after = after[: borders[0]]
        left = self.tokenizer.decode_bytes(before.tolist())[::-1]
        right = self.tokenizer.decode_bytes(after.tolist())
        return common_beginning(left, query.data[:start][::-1]), common_beginning(right, query.data[end:])

    def _chosen(self, query: Query, candidates: list[tuple[Range, list[Seen]]]) -> dict[Range, list[Seen]]:
        """Candidates that say something, the rarest first; where two overlap, the other one keeps what is left."""
        chosen: dict[Range, list[Seen]] = {}
        for bounds, seen in sorted(candidates, key=lambda candidate: -self._rarity(query, candidate[0])):
            start, end = query.trimmed(*query.uncovered(bounds, chosen))
            enough = query.words(start, end) >= MIN_WORDS or (start, end) == query.whole()
            if enough and self._rare(query, (start, end)):
                chosen[start, end] = seen
        return dict(sorted(chosen.items()))

    def _rare(self, query: Query, bounds: Range) -> bool:
        return self._rarity(query, bounds) >= float(np.log2(self._tokens)) + RARE_BITS

    def _rarity(self, query: Query, bounds: Range) -> float:
        return float(self._bits[query.ids[query.inside(*bounds)]].sum())

    def _described(self, query: Query, matches: dict[Range, list[Seen]], most: int) -> list[Span]:
        texts = [query.data[start:end].decode() for start, end in matches]
        # In another place the first word may have a space before it, and then it is another token.
        patterns = [np.array(self.tokenizer.encode(space + text), np.int64) for text in texts for space in ("", " ")]
        times = np.zeros(len(texts), np.int64)
        holding = list(matches.values())
        for number, index in enumerate(self._indexes):
            counts, places = index.places(patterns, EXAMINED)
            known = np.array([sum(seen.data == number for seen in found) for found in holding], np.int64)
            times += np.maximum(counts.reshape(-1, 2).sum(axis=1), known)
            for at, starts in enumerate(places):
                more = [Seen(number, place, len(patterns[at])) for place in starts.tolist()]
                holding[at // 2] = [*holding[at // 2], *more]
        documents = [self._documents(seen) for seen in holding]
        chosen = [self._first(found, most) for found in documents]
        facts = self._facts(chosen)
        return [
            Span(text, int(count), len(found), [self._place(seen, facts) for seen in shown])
            for text, count, found, shown in zip(texts, times, documents, chosen, strict=True)
        ]

    def _documents(self, seen: list[Seen]) -> list[Seen]:
        """One place in each distinct document."""
        one_each: dict[tuple[int, int], Seen] = {}
        for place in seen:
            one_each.setdefault((place.data, self._document(place)), place)
        return list(one_each.values())

    def _document(self, seen: Seen) -> int:
        return int(self._indexes[seen.data].document_of(np.array([seen.place]))[0])

    def _first(self, documents: list[Seen], most: int) -> list[Seen]:
        """Up to `most` places in each part of the data: answers before questions, then in the order of the data."""
        shown = []
        for number in range(len(self._data)):
            here = [seen for seen in documents if seen.data == number]
            shown += sorted(here, key=lambda seen: (self._part(seen)[0] == "question", seen.place))[:most]
        return shown

    def _copies(self, seen: Seen) -> list[int]:
        return self._indexes[seen.data].copies(self._document(seen)).tolist()

    def _offset(self, seen: Seen) -> int:
        return seen.place - int(self._indexes[seen.data].starts[self._document(seen)])

    def _part(self, seen: Seen) -> tuple[str, str]:
        data = self._data[seen.data]
        return data.part(self._copies(seen)[0], self._offset(seen) + seen.tokens // 2)

    def _facts(self, chosen: list[list[Seen]]) -> dict[tuple[int, int], Facts]:
        """What is known of the documents, by number of the data and of the document in it."""
        facts = {}
        for number, data in enumerate(self._data):
            wanted = {self._copies(seen)[0] for shown in chosen for seen in shown if seen.data == number}
            facts |= {(number, document): row for document, row in data.describe(wanted).items()}
        return facts

    def _place(self, seen: Seen, facts: dict[tuple[int, int], Facts]) -> Place:
        copies = self._copies(seen)
        data, (part, question) = self._data[seen.data], self._part(seen)
        steps = data.steps(copies, self._offset(seen), seen.tokens)
        described = facts[seen.data, copies[0]] | ({"about": question} if part else {})
        return Place(**described, part=part, copies=data.copies(copies), steps=steps)


def _pieces(query: Query, ranges: list[Range]) -> list[tuple[str, int | None]]:
    pieces: list[tuple[str, int | None]] = []
    done = 0
    for number, (start, end) in enumerate(ranges, 1):
        pieces += [(query.data[done:start].decode(), None), (query.data[start:end].decode(), number)]
        done = end
    return [piece for piece in [*pieces, (query.data[done:].decode(), None)] if piece[0]]
