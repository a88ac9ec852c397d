from __future__ import annotations

import shutil

import pytest

from athanor.artifacts import manifest_digest, read_json, sha256_file, verify_files
from athanor.errors import GateError, InputError, ParamsError
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from stages import train_tokenizer


def test_artifact_is_complete_and_repeats_elsewhere(text_world, run_text_stage, tmp_path_factory, monkeypatch):
    run_text_stage(train_tokenizer)
    verify_files("models/tokenizer")
    tokenizer = Tokenizer.load("models/tokenizer")
    facts = read_json("models/tokenizer/tokenizer.json")
    assert facts["vocab_size"] == tokenizer.vocab_size == 768
    assert facts["digest"] == tokenizer.digest
    assert facts["template_hash"] == template_hash(tokenizer)
    metrics = read_json("metrics/train_tokenizer.json")
    assert metrics["sample"]["share"]["code"] == pytest.approx(0.6, abs=0.05)
    assert set(metrics["check"]["sources"]) == {"code", "prose"}

    first = {name: manifest_digest(name) for name in ("models/tokenizer", "data/clean")}
    first_metrics = sha256_file("metrics/train_tokenizer.json")
    other = tmp_path_factory.mktemp("a directory with another and longer name")
    shutil.copytree("data", other / "data")
    monkeypatch.chdir(other)
    run_text_stage(train_tokenizer)
    assert {name: manifest_digest(name) for name in first} == first
    assert sha256_file("metrics/train_tokenizer.json") == first_metrics


def test_a_red_gate_publishes_nothing(text_world, run_text_stage, monkeypatch):
    run_text_stage(train_tokenizer)
    before = manifest_digest("models/tokenizer")
    real = train_tokenizer.train

    def train_badly(texts, params):
        from sentencepiece import sentencepiece_model_pb2 as proto

        model = proto.ModelProto()
        model.ParseFromString(real(texts, params))
        model.normalizer_spec.add_dummy_prefix = True
        return model.SerializeToString()

    monkeypatch.setattr(train_tokenizer, "train", train_badly)
    with pytest.raises(GateError, match="whitespace-ids"):
        run_text_stage(train_tokenizer)
    assert manifest_digest("models/tokenizer") == before


def test_bad_parameters_and_missing_text_are_named(text_world, run_text_stage):
    with pytest.raises(ParamsError, match="tokenizer.vocab_size: 32768 is more than the text supports"):
        run_text_stage(train_tokenizer, tokenizer={"vocab_size": 32768})
    shares = {"code": {"share": 1.0, "max_epochs": 1.0}}
    with pytest.raises(ParamsError, match="'prose' has documents but no share"):
        run_text_stage(train_tokenizer, mixture={"sources": shares})
    shares |= {"prose": {"share": 0.0, "max_epochs": 1.0}, "maths": {"share": 1.0, "max_epochs": 1.0}}
    with pytest.raises(InputError, match="mixture source 'maths'"):
        run_text_stage(train_tokenizer, mixture={"sources": shares})
    shutil.rmtree(text_world / "data/clean/train")
    with pytest.raises(InputError, match="data/clean/train: no documents"):
        run_text_stage(train_tokenizer)
