"""Pretraining text among the tuning rows: documents in a seeded order, in the mixture's proportions, as pieces.

A model tuned on conversations alone forgets some of what it was trained on; a
share of plain text among them holds it (Scialom et al. 2022; Ibrahim et al.
2024). A document is `<|bos|> text <|eos|>`, as in pretraining, cut into
pieces of at most one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from athanor.chat_data.params import SftDataParams
from athanor.data.order import permutation
from athanor.text.documents import Document, read_documents
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.words.decontaminate import ItemIndex

BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class Replay:
    """Pieces of text per source (ids uint32), how many documents and pieces were left out for a battery item, and
    how many targets were wanted of each source that has fewer."""

    pieces: dict[str, list[np.ndarray]]
    contaminated: int
    short: dict[str, int]

    @property
    def targets(self) -> int:
        return sum(len(piece) - 1 for pieces in self.pieces.values() for piece in pieces)

    def share(self, asked: float, supervised: int) -> float:
        """The share of all supervised tokens beside `supervised` ones: what was asked, or what a short source leaves of it."""
        return self.targets / (supervised + self.targets) if self.short else asked


def choose_replay(
    tokenizer: Tokenizer,
    params: SftDataParams,
    shares: Mapping[str, float],
    files: Mapping[str, Sequence[Path]],
    index: ItemIndex,
    supervised: int,
) -> Replay:
    """Choose the text that makes up `params.replay_share` beside `supervised` tokens of conversations (with repeats)."""
    target_tokens = quotas(shares, targets_for(supervised, params.replay_share)) if params.replay_share else {}
    max_documents = params.decontamination.max_ngram_conversations
    return choose(tokenizer, files, target_tokens, params.context_tokens + 1, params.seed, index, max_documents)


def targets_for(supervised: int, share: float) -> int:
    """Text targets that make up `share` of all supervised tokens beside `supervised` ones of conversations."""
    fraction = Fraction(str(share))
    return round(supervised * fraction / (1 - fraction))


def quotas(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` divided in proportion to `shares`, in whole tokens; sources with share 0 are left out."""
    positive_shares = {name: Fraction(str(share)) for name, share in sorted(shares.items()) if share > 0}
    tokens, cumulative_share, total_so_far = {}, Fraction(0), 0
    for name, share in positive_shares.items():
        cumulative_share += share
        tokens[name] = round(total * cumulative_share / sum(positive_shares.values())) - total_so_far
        total_so_far += tokens[name]
    return tokens


def choose(
    tokenizer: Tokenizer,
    files: Mapping[str, Sequence[Path]],
    target_tokens: Mapping[str, int],
    capacity: int,
    seed: int,
    index: ItemIndex,
    max_ngram_documents: int,
) -> Replay:
    """Pieces with exactly `target_tokens[source]` targets of each source, or all there are of one that has less text.

    Reads no more shards than it needs. Documents with a battery item are left out again, though `clean` has done so.
    What is common among the documents of a batch may be rare among the pieces that are used, so these are searched
    all together as well, and others take the place of what is found.
    """
    contaminated: Counter[str] = Counter()

    def clean_pieces(source: str) -> Iterator[np.ndarray]:
        for batch in _batches(files.get(source, ()), source, seed):
            texts = [document.text for document in batch]
            matches = index.matches(texts, max_ngram_documents=max_ngram_documents, prompts_alone=False)
            contaminated[source] += sum(item is not None for item in matches)
            for ids in tokenizer.encode_arrays([t for t, item in zip(texts, matches, strict=True) if item is None]):
                yield from pieces_of(tokenizer, ids, capacity)

    streams = {source: clean_pieces(source) for source in target_tokens}
    chosen: dict[str, list[np.ndarray]] = {source: [] for source in target_tokens}
    while True:
        for source, targets in target_tokens.items():
            _fill(chosen[source], streams[source], targets)
        entries = [(source, piece) for source, pieces in chosen.items() for piece in pieces]
        texts = [tokenizer.decode(piece.tolist()) for _, piece in entries]
        matches = index.matches(texts, max_ngram_documents=max_ngram_documents, prompts_alone=False)
        if not any(item is not None for item in matches):
            sizes = {source: sum(len(piece) - 1 for piece in pieces) for source, pieces in chosen.items()}
            short = {source: wanted for source, wanted in target_tokens.items() if sizes[source] < wanted}
            return Replay(chosen, contaminated.total(), short)
        contaminated.update(source for (source, _), item in zip(entries, matches, strict=True) if item is not None)
        clean_entries = [entry for entry, item in zip(entries, matches, strict=True) if item is None]
        chosen = {source: [piece for name, piece in clean_entries if name == source] for source in target_tokens}


def _fill(chosen: list[np.ndarray], pieces: Iterator[np.ndarray], targets: int) -> None:
    """Add pieces until there are `targets` targets, the last one cut to fit, or no piece is left."""
    missing = targets - sum(len(piece) - 1 for piece in chosen)
    while missing and (piece := next(pieces, None)) is not None:
        piece = piece[: missing + 1]
        if len(piece) > 1:
            chosen.append(piece)
            missing -= len(piece) - 1


def pieces_of(tokenizer: Tokenizer, ids: np.ndarray, capacity: int) -> Iterator[np.ndarray]:
    """A document between `<|bos|>` and `<|eos|>`, in pieces of at most `capacity` tokens, uint32."""
    document_ids = np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(np.uint32)
    for start in range(0, len(document_ids), capacity):
        yield document_ids[start : start + capacity]


def mask_of(piece: np.ndarray) -> np.ndarray:
    """Every token is a target but the first, uint8."""
    mask = np.ones(len(piece), np.uint8)
    mask[0] = 0
    return mask


def _batches(paths: Sequence[Path], source: str, seed: int) -> Iterator[list[Document]]:
    """All documents of a source: its shards in a seeded order, and the documents of each in another."""
    for shard in permutation(len(paths), seed, source, "replay").tolist():
        documents = list(read_documents(paths[shard]))
        order = permutation(len(documents), seed, source, "replay", shard).tolist()
        for start in range(0, len(order), BATCH_DOCUMENTS):
            yield [documents[number] for number in order[start : start + BATCH_DOCUMENTS]]
