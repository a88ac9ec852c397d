"""Made text with the layout and the manifest of data/raw, of any size: what the data stages are measured on.

    python -m tools.made_text FOLDER --shards 4000 --shard-bytes 1000000 --workers 2

Words come from a vocabulary of Zipf's shares whose first are the English stop words, in sentences, paragraphs and
documents of the lengths of web pages (code in lines of nine words), so that the rules of the Plasma presets keep nearly
all. Shares of the documents
are copies of documents of other shards, exact ones and ones with 1 to 3 % of their words replaced. A shard follows from
the seed and its number alone.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from athanor.base.artifacts import new_dir, write_manifest
from athanor.base.work import Facts
from athanor.quality.language import ENGLISH
from athanor.sources.fetch import Tally
from athanor.text.documents import ROW_GROUP_DOCUMENTS, SCHEMA, SHARD_BYTES, Document, content_id, split_of

WORDS, DRAWS = 12_000, 1 << 18
SENTENCE_WORDS, SENTENCE_BYTES = (6, 26), 105  # the second is the mean that the first gives
KINDS, LICENSE = ("web", "prose"), "CC0-1.0"


@dataclass(frozen=True)
class Made:
    """The text of one folder; `near` and `exact` are the shares of copies among its documents."""

    shard_bytes: int = SHARD_BYTES
    document_bytes: int = 3000
    near: float = 0.05
    exact: float = 0.02
    val_fraction: float = 0.001
    seed: int = 1386


@lru_cache(1)
def vocabulary() -> tuple[np.ndarray, np.ndarray]:
    """(every word plain, at a sentence's end, at a paragraph's end, and as its first; numbers drawn with Zipf's shares)."""
    rng = np.random.default_rng(0)
    syllables = np.array(
        [c + v for c in "b c d f g h k l m n p r s st t tr w".split() for v in "a e i o u ea ou".split()]
    )
    made = ("".join(rng.choice(syllables, size)) for size in rng.integers(2, 5, 4 * WORDS))
    words = list(dict.fromkeys([*ENGLISH.split(), *made]))[:WORDS]
    forms = [word + end for end in (" ", ". ", ".\n\n") for word in words] + [word.capitalize() + " " for word in words]
    shares = np.cumsum(1 / (np.arange(WORDS) + 2.7))
    drawn = np.searchsorted(shares / shares[-1], (np.arange(DRAWS) + 0.5) / DRAWS).astype(np.uint16)
    return np.array(forms, object), drawn


def texts(rng: np.random.Generator, count: int, mean_bytes: int) -> list[str]:
    forms, drawn = vocabulary()
    spread = 0.9
    sizes = np.exp(rng.normal(np.log(mean_bytes / SENTENCE_BYTES) - spread**2 / 2, spread, count))
    sentences = np.clip(sizes, 4, 2000).astype(np.int64)
    lengths = rng.integers(*SENTENCE_WORDS, sentences.sum())
    ends = np.cumsum(lengths)
    words = drawn[rng.integers(0, DRAWS, ends[-1], dtype=np.uint32)]
    words[ends - lengths] += 3 * WORDS
    words[ends - 1] += WORDS
    words[ends[rng.random(len(ends)) < 0.2] - 1] += WORDS
    pieces, cuts = forms[words].tolist(), [0, *ends[np.cumsum(sentences) - 1].tolist()]
    return ["".join(pieces[a:b]).rstrip() for a, b in zip(cuts, cuts[1:], strict=False)]


def nearly(rng: np.random.Generator, text: str) -> str:
    words, (forms, drawn) = text.split(" "), vocabulary()
    for place in rng.integers(0, len(words), max(1, int(len(words) * rng.uniform(0.01, 0.03)))):
        words[place] = forms[drawn[rng.integers(0, DRAWS)]].rstrip()
    return " ".join(words)


def shard_texts(made: Made, number: int) -> list[str]:
    copies = (made.near + made.exact) * made.shard_bytes / made.document_bytes  # expected
    donors = int(np.ceil(copies))
    given, rng = (np.random.default_rng([made.seed, number, part]) for part in range(2))
    found = texts(given, donors, made.document_bytes) if donors else []
    if number and donors:
        other = np.random.default_rng([made.seed, int(rng.integers(0, number)), 0])
        for text in texts(other, donors, made.document_bytes)[: rng.binomial(donors, copies / donors)]:
            near = rng.random() < made.near / (made.near + made.exact)
            found.append(nearly(rng, text) if near else text)
    while (missing := made.shard_bytes - sum(map(len, found))) > 0:
        found += texts(rng, min(missing // made.document_bytes // 2 + 1, 500), made.document_bytes)
    return found


def write_shard(made: Made, task: tuple[int, Path, str, str]) -> Facts:
    number, path, source, kind = task
    texts = shard_texts(made, number)
    if kind == "code":
        texts = [re.sub(r"((?:\S+ ){8}\S+) ", r"\1\n", text) for text in texts]
    ids = [content_id(text) for text in texts]
    splits = [split_of(key, made.val_fraction) for key in ids]
    same = {"source": source, "kind": kind, "license": LICENSE, "meta": "{}"}
    columns = {"id": ids, "text": texts, "split": splits} | {name: [value] * len(ids) for name, value in same.items()}
    table = pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)
    pq.write_table(table, path, row_group_size=ROW_GROUP_DOCUMENTS, compression="zstd", compression_level=3)
    tally = Tally()
    for text, split in zip(texts, splits, strict=True):
        tally.add(Document(text, source, kind, LICENSE, split))
    return asdict(tally)


def sums(one: Facts, other: Facts) -> Facts:
    return {k: sums(v, other[k]) if isinstance(v, dict) else v + other[k] for k, v in one.items()}


def make(folder: Path, sources: Sequence[tuple[str, str, int]], made: Made, workers: int = 1) -> int:
    """Write sources, each a name, a kind and a number of shards, as data/raw is; returns the bytes of text."""
    counts: dict[str, Facts] = {}
    with new_dir(folder) as raw:
        shards = [(raw / name / f"{n:05d}.parquet", name, kind) for name, kind, count in sources for n in range(count)]
        for name, _, _ in sources:
            (raw / name).mkdir()
        with ProcessPoolExecutor(workers) as pool:
            tasks = [(number, *shard) for number, shard in enumerate(shards)]
            for (_, _, name, _), found in zip(
                tasks, pool.map(partial(write_shard, made), tasks, chunksize=4), strict=True
            ):
                counts[name] = sums(counts[name], found) if name in counts else found
        facts = {name: {"license": LICENSE} for name in counts}
        write_manifest(raw, kind="raw", version=1, counts=counts, sources=facts, labels={})
    return sum(count["bytes"] for count in counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--shards", type=int, required=True, help="of all sources together")
    parser.add_argument("--workers", type=int, default=1)
    for name, default in asdict(Made()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    count, shards, started = args["sources"], args["shards"], time.monotonic()
    sources = [(f"made-{n}", KINDS[n % len(KINDS)], shards // count + (n < shards % count)) for n in range(count)]
    made = Made(**{name: args[name] for name in asdict(Made())})
    size = make(args["folder"], sources, made, args["workers"])
    seconds = time.monotonic() - started
    print(f"{size / 1e6:,.0f} MB of text in {shards:,} shards: {seconds:,.1f} s, {size / 1e6 / seconds:,.0f} MB/s")


if __name__ == "__main__":
    main()
