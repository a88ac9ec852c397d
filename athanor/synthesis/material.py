"""What requests show the other model: passages of training documents, and example conversations.

Both are ranked by a hash of the seed and their own content, so a request
depends on what it shows and not on how much else there is: a corpus that grows
changes few requests, and those that were paid for stay answered.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from athanor.base.errors import InputError
from athanor.sources import messages
from athanor.sources.instruct_params import MessagesSource
from athanor.text.conversations import Messages
from athanor.text.documents import Document, read_documents, shard_files

SEED_FILES = "*.jsonl*"
# Where a passage may end, the best first. One is looked for between MIN_FILLED of the passage's length and its end.
BREAKS = ("\n\n", "\n", ". ", " ")
MIN_FILLED = 0.6


@dataclass(frozen=True)
class Passage:
    """A stretch of a document, with where it comes from."""

    text: str
    document: str  # id
    source: str
    license: str


def rank(seed: int, key: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()


def passages(
    folder: Path, count: int, *, seed: int, sources: Collection[str] | None, chars: int, min_chars: int
) -> list[Passage]:
    """The first `count` passages of the documents below `folder`, by rank; fewer if there are fewer.

    One passage of every document comes before the second of any.
    """
    shards = shards_of(folder, sources)
    candidates = count
    while True:
        ids = _smallest(shards, candidates, seed)
        by_document = _passages_by_document(
            (d for path in shards for d in read_documents(path) if d.id in ids), seed, chars, min_chars
        )
        max_pieces = max((len(pieces) for pieces in by_document), default=0) if len(ids) < candidates else 1
        distinct: dict[str, Passage] = {}  # two documents may share a passage, such as the head of a licence
        for pieces, index in ((pieces, index) for index in range(max_pieces) for pieces in by_document):
            if index < len(pieces):
                distinct.setdefault(pieces[index].text, pieces[index])
        if len(distinct) >= count or len(ids) < candidates:
            return list(distinct.values())[:count]
        candidates *= 2  # some were too short


def shards_of(folder: Path, sources: Collection[str] | None) -> list[Path]:
    """The shards of the wanted sources; InputError for a source that is not there."""
    shards = shard_files(folder)
    if not shards:
        raise InputError("no documents", where=folder, fix="run dvc repro clean")
    missing = sorted(set(sources or ()) - set(shards))
    if missing:
        fix = f"use some of: {', '.join(shards)}"
        raise InputError(f"there are no documents of '{missing[0]}'", where="synthetic.sources", fix=fix)
    return [path for name, paths in shards.items() if sources is None or name in sources for path in paths]


def _smallest(shards: list[Path], count: int, seed: int) -> set[str]:
    """Ids of the `count` documents of smallest rank; reads nothing but ids."""
    batches = (batch for path in shards for batch in pq.ParquetFile(path).iter_batches(columns=["id"]))
    ids = (key for batch in batches for key in batch.column(0).to_pylist())
    return set(heapq.nsmallest(count, ids, key=lambda key: rank(seed, key)))


def _passages_by_document(documents: Iterable[Document], seed: int, chars: int, min_chars: int) -> list[list[Passage]]:
    """The passages of each document in the order they are used, the documents by rank."""
    by_document = {}
    for document in documents:
        texts = [text for text in cut(document.text, chars) if len(text) >= min_chars]
        texts.sort(key=lambda text: rank(seed, f"{document.id}:{text}"))
        by_document[document.id] = [Passage(text, document.id, document.source, document.license) for text in texts]
    return [by_document[key] for key in sorted(by_document, key=lambda key: rank(seed, key))]


def cut(text: str, chars: int) -> list[str]:
    """A text in pieces of at most `chars` characters, ended at a paragraph, line, sentence or word if there is one."""
    pieces, start = [], 0
    while len(text) - start > chars:
        low, high = start + int(MIN_FILLED * chars), start + chars
        breaks = ((mark, text.rfind(mark, low, high)) for mark in BREAKS)
        end = next((position + len(mark) for mark, position in breaks if position >= 0), high)
        pieces.append(text[start:end].strip("\n"))
        start = end
    return [piece for piece in (*pieces, text[start:].strip("\n")) if piece.strip()]


def examples(folder: Path, seed: int) -> list[Messages]:
    """The conversations of the files in `folder`, each once, in order of their rank."""
    files = str(folder / SEED_FILES)
    source = MessagesSource(type="messages", name="seeds", files=files, max_malformed_fraction=0.0, license="")
    by_id: dict[str, Messages] = {}
    for conversation in messages.conversations(source, 0.0) if any(folder.glob(SEED_FILES)) else ():
        by_id.setdefault(conversation.id, conversation.messages)
    return [by_id[key] for key in sorted(by_id, key=lambda key: rank(seed, key))]
