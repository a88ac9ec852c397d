"""A checkout with training data of a few texts, in the files that the stages write."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from athanor.base.artifacts import MANIFEST, write_manifest
from athanor.data import rows, shards
from athanor.text.conversations import Conversation, Message, write_rows
from athanor.text.documents import Document, write_shards
from athanor.tokenizer.chat import render
from athanor.tokenizer.tokenizer import Tokenizer

SOURCE, TALKS, CONTEXT = "books", "talks", 128


def write_data(
    root: Path,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    talks: Sequence[tuple[str, ...]],
    cooldown: Sequence[str] = (),
) -> None:
    """data/clean, data/shards, data/instruct and data/sft; equal texts are copies, each in the stream's order.

    A talk is questions and answers in turn; the last one is in three rows.
    """
    documents = [Document(text, SOURCE, "prose", "MIT", "train", {"chapter": text[:9]}) for text in (*texts, *cooldown)]
    write_shards(root / "data/clean/train" / SOURCE, documents)
    for name, stream in ((shards.TRAIN, texts), (shards.COOLDOWN, cooldown)):
        writer = shards.ShardWriter(root / "data/shards" / name, np.dtype("<u2"), 1000, sources=True)
        for text in stream:
            writer.add(np.array([tokenizer.bos, *tokenizer.encode(text), tokenizer.eos]))
        writer.close()
    facts = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.digest, "dtype": "uint16"}
    named = {"sources": {SOURCE: {}}}
    more = {shards.COOLDOWN: named} if cooldown else {}
    write_manifest(root / "data/shards", kind=shards.KIND, version=shards.VERSION, counts={}, **facts, **named, **more)

    messages = [tuple(map(Message, itertools.cycle(("user", "assistant")), talk)) for talk in talks]
    licences = [("CC0-1.0", "MIT")[number % 2] for number in range(len(talks))]
    pairs = zip(messages, licences, strict=True)
    (root / "data/instruct").mkdir(parents=True)
    write_rows(root / f"data/instruct/{TALKS}.jsonl", [Conversation(m, TALKS, kind, "train", "k") for m, kind in pairs])
    counts = {TALKS: {"licenses": sorted(set(licences))}}
    write_manifest(root / "data/instruct", kind="instruct", version=1, counts=counts)
    (root / "data/sft").mkdir()
    entries = [render(tokenizer, each) for each in messages]
    for split in ("train", "val"):
        numbers = rows.pack([len(ids) for ids, _ in entries], CONTEXT + 1, 0) + [[len(entries) - 1]] * 2
        rows.write_split(root / "data/sft", split, entries, numbers, tokenizer.vocab_size)
    packed = {"pad_id": tokenizer.pad, "stop_id": tokenizer.stop, "context_tokens": CONTEXT, "sources": [TALKS]}
    write_manifest(root / "data/sft", kind=rows.KIND, version=rows.VERSION, counts={}, **facts, **packed)
    assert (root / "models/tokenizer" / MANIFEST).is_file(), "the tokenizer comes first"
