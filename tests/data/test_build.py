"""Building from the spool, without a tokenizer: what goes in comes out, described by what is on disk."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from athanor.base.errors import GateError
from athanor.data import mixture
from athanor.data.mixture import mix_sources, plan_mixture
from athanor.data.shards import TokenStream, token_dtype
from athanor.sharding import build, shard_gate
from athanor.sharding.tokenise import SpoolWriter, read_spool
from tests.data.conftest import BOS, EOS, documents

DTYPE = token_dtype(320)
SHARES = {name: SimpleNamespace(share=share, max_epochs=2.0) for name, share in (("a", 0.7), ("b", 0.3))}


@pytest.fixture
def spool(tmp_path):
    """Two files of source a, one of b, and one that holds both."""
    texts, made = {"a": documents(90), "b": documents(40, seed=1)}, {}
    parts = {"a-0": [("a", 0, 50)], "a-1": [("a", 50, 80)], "b-0": [("b", 0, 30)]}
    parts["mixed"] = [("b", 30, 40), ("a", 80, 90)]
    for name, rows in parts.items():
        writer = SpoolWriter(tmp_path / "spool" / name, DTYPE)
        for source, first, end in rows:
            for number in range(first, end):
                writer.add(source, texts[source][number], f"{source} {number}".encode())
        made[name] = writer.close()
    return texts, read_spool(tmp_path / "spool", made)


def target(tmp_path, tolerance=0.05):
    return build.Target(tmp_path, SimpleNamespace(vocab_size=320, bos=BOS, eos=EOS), 400, tolerance)


def built(tmp_path, tokens, **how):
    where = target(tmp_path, **how)
    sources = mix_sources(SHARES, {name: part.lengths for name, part in tokens.items()})
    plan = plan_mixture(sources, None, 1)
    seen = []
    build.write_stream(where, "train", sources, plan, tokens, seen.append)
    assert sum(seen) == plan.total
    return plan, build.check_stream(where, "train", sources, plan, tokens, None)


def test_spool_keeps_order_lengths_and_content(spool):
    texts, tokens = spool
    for name, expected in texts.items():
        found, stream = tokens[name], tokens[name].stream(DTYPE)
        assert found.lengths.tolist() == [len(ids) for ids in expected] and found.documents == len(expected)
        assert [stream.document(n).tolist() for n in range(stream.documents)] == [ids.tolist() for ids in expected]
        assert found.text_bytes == sum(len(f"{name} {n}") for n in range(len(expected)))
        assert sum(len(part) for part in found.content_hashes()) == len(expected)
    hashes = np.concatenate([part for found in tokens.values() for part in found.content_hashes()])
    assert len({tuple(pair) for pair in hashes.tolist()}) == 130
    with pytest.raises(GateError, match="130 documents are in both"):
        shard_gate.check_disjoint([hashes[:90], hashes[90:]], [hashes])


def test_stream_is_the_plan_and_is_described_by_its_files(spool, tmp_path):
    texts, tokens = spool
    plan, stream = built(tmp_path, tokens)
    written = TokenStream(tmp_path / "train", DTYPE)
    for place, (number, document) in enumerate(zip(plan.sources.tolist(), plan.documents.tolist(), strict=True)):
        assert written.document(place).tolist() == texts["ab"[number]][document].tolist()
    facts = stream.facts
    assert facts["counts"] == {"tokens": plan.total, "documents": len(plan.sources)}
    assert [sum(facts["per_shard"][name]) for name in "ab"] == list(plan.taken)
    assert facts["sources"]["a"]["epochs"] == pytest.approx(plan.taken[0] / tokens["a"].lengths.sum(), rel=1e-5)
    names = [row["source"] for row in build.shares_by_source({"train": facts, "cooldown": facts})]
    assert names == ["a", "b", "a (cooldown)", "b (cooldown)"]


def test_a_document_takes_few_bytes_of_memory(tmp_path, monkeypatch):
    """60 for each further one in all: lengths, an order, the plan, starts; of the files, one at a time."""
    for module, block in ((build, "GATHER_DOCUMENTS"), (mixture, "BLOCK_DOCUMENTS")):
        monkeypatch.setattr(module, block, 64)  # as Python numbers, which are large
    peaks, ids = {}, np.array([BOS, 5, EOS])
    for count in (2000, 10000):
        folder, made = tmp_path / str(count), {}
        for first in range(0, count, 1000):
            writer = SpoolWriter(folder / str(first), DTYPE)
            for number in range(first, first + 1000):
                writer.add("aab"[number % 3], ids, b"%d" % number)
            made[str(first)] = writer.close()
        tracemalloc.start()
        tokens = read_spool(folder, made)
        shard_gate.check_disjoint((part for found in tokens.values() for part in found.content_hashes()), [])
        built(folder, tokens)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (peaks[10000] - peaks[2000]) / 8000 < 60, peaks


def test_held_out_documents_and_sources_without_any(spool, tmp_path):
    _, tokens = spool
    rows = build.write_val(target(tmp_path), {"a": tokens["a"]}, ["a", "b"])
    a = tokens["a"]
    assert rows["a"] == {"tokens": int(a.lengths.sum()), "documents": 90, "text_bytes": a.text_bytes}
    assert rows["b"] == {"tokens": 0, "documents": 0, "text_bytes": 0} and not (tmp_path / "val/b").exists()


def test_ids_never_used_hardly_used_and_spelled():
    """Of ids 0 control, 1 and 2 bytes, 3 to 5 learned."""
    processor = SimpleNamespace(is_byte=lambda i: i in (1, 2))
    tokenizer = SimpleNamespace(vocab_size=6, token_bytes=np.array([0, 1, 1, 3, 2, 4]), processor=processor)
    facts = build.id_statistics(tokenizer, np.array([50, 20, 0, 0, 30, 100]))
    assert facts == {"dead_ids": 1, "rare_ids": 2, "byte_fallback_share": 0.1}
