from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from athanor.artifacts import manifest_digest, read_json, sha256_file, verify_files
from athanor.corpus.documents import read_documents, read_sources
from athanor.data.shards import open_train, open_val, read_shards_manifest
from athanor.errors import GateError, InputError
from athanor.tokenizer.tokenizer import Tokenizer
from stages import shard
from tests.stages.conftest import text_documents, write_clean


@pytest.fixture
def world(tokenizer_world: Path) -> Path:
    return tokenizer_world


def test_shards_hold_the_corpus_in_its_mixture(world, run_text_stage):
    run_text_stage(shard)
    verify_files("data/shards")
    tokenizer, manifest = Tokenizer.load("models/tokenizer"), read_shards_manifest("data/shards")
    assert manifest["tokenizer"] == tokenizer.digest and manifest["vocab_size"] == tokenizer.vocab_size
    stream = open_train("data/shards")
    assert stream.tokens == manifest["counts"]["tokens"] and 30_000 <= stream.tokens < 32_000
    texts = {d.text for d in read_sources("data/clean/train")}
    for number in range(0, stream.documents, 20):
        ids = stream.document(number)
        assert ids[0] == tokenizer.bos and ids[-1] == tokenizer.eos
        assert tokenizer.decode(ids.tolist()) in texts
    for name, share in (("code", 0.6), ("prose", 0.4)):
        facts = manifest["sources"][name]
        assert facts["share"] == pytest.approx(share, abs=0.02)
        assert facts["target_share"] == share
        assert facts["epochs"] == pytest.approx(facts["tokens"] / facts["unique_tokens"], rel=1e-5)


def test_validation_holds_every_held_out_document_with_its_bytes(world, run_text_stage):
    run_text_stage(shard)
    tokenizer, manifest = Tokenizer.load("models/tokenizer"), read_shards_manifest("data/shards")
    held_out = list(read_documents("data/clean/val.parquet"))
    for name, stream in open_val("data/shards").items():
        texts = [tokenizer.decode(stream.document(n).tolist()) for n in range(stream.documents)]
        assert texts == [d.text for d in held_out if d.source == name]
        assert manifest["val"][name]["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_repeats_to_the_byte_and_a_seed_changes_the_order_only(world, run_text_stage, monkeypatch):
    run_text_stage(shard)
    first, metrics = manifest_digest("data/shards"), sha256_file("metrics/shard.json")
    monkeypatch.setenv("ATHANOR_THREADS", "2")
    run_text_stage(shard)
    assert (manifest_digest("data/shards"), sha256_file("metrics/shard.json")) == (first, metrics)
    seeded = {"seed": 2, "sources": {n: {"share": s, "max_epochs": 2.0} for n, s in (("code", 0.6), ("prose", 0.4))}}
    run_text_stage(shard, mixture=seeded)
    assert manifest_digest("data/shards") != first


def test_null_takes_what_the_caps_allow_and_more_is_reported(world, run_text_stage, capsys):
    run_text_stage(shard, shard={"train_tokens": None})
    allowed = read_json("metrics/shard.json")
    assert allowed["limited_by"] == "prose"
    assert allowed["tokens"] == pytest.approx(allowed["allowed_tokens"], rel=0.02)
    assert allowed["sources"]["prose"]["epochs"] == pytest.approx(3.0, abs=0.05)
    capsys.readouterr()
    run_text_stage(shard, shard={"train_tokens": 10**9})
    assert "the epoch cap of source 'prose' allows" in capsys.readouterr().err
    assert read_json("metrics/shard.json")["tokens"] == allowed["tokens"]


def test_a_document_in_both_splits_is_refused_and_the_old_shards_stay(world, run_text_stage):
    run_text_stage(shard)
    before = manifest_digest("data/shards")
    documents = text_documents()
    twin = next(d for d in documents if d.split == "val")
    write_clean(world, [*documents, type(twin)(twin.text, twin.source, twin.kind, twin.license, "train")])
    with pytest.raises(GateError, match="1 documents are in both train and val"):
        run_text_stage(shard)
    assert manifest_digest("data/shards") == before
    assert sorted(p.name for p in Path("data").iterdir()) == ["clean", "shards"]


def test_a_mixture_that_is_not_interleaved_is_refused(world, run_text_stage, monkeypatch):
    real = shard.plan_mixture

    def one_after_the_other(sources, target, seed, **how):
        plan = real(sources, target, seed, **how)
        order = np.argsort(plan.sources, kind="stable")
        return type(plan)(plan.sources[order], plan.documents[order], plan.taken, plan.allowed, plan.limited_by)

    monkeypatch.setattr(shard, "plan_mixture", one_after_the_other)
    with pytest.raises(GateError, match="gate 'shares'"):
        run_text_stage(shard, shard={"train_tokens": None, "share_tolerance": 0.01})


def test_a_source_left_out_and_no_validation_text(world, run_text_stage):
    only = {"code": {"share": 1.0, "max_epochs": 1.0}, "prose": {"share": 0.0, "max_epochs": 1.0}}
    run_text_stage(shard, mixture={"seed": 1, "sources": only})
    assert list(read_shards_manifest("data/shards")["sources"]) == ["code"]
    write_clean(world, [d for d in text_documents() if d.split == "train"])
    with pytest.raises(InputError, match="no validation document"):
        run_text_stage(shard)
