from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import manifest_digest, read_json, sha256_file, verify_files
from athanor.base.errors import GateError, InputError, Interrupted, ParamsError
from athanor.data.mixture import MixSource
from athanor.data.shards import main_digest, open_cooldown, open_train, open_val, read_shards_manifest
from athanor.runtime.executor import Executor
from athanor.runtime.run import Run
from athanor.text.documents import read_documents, read_sources
from athanor.tokenizer.tokenizer import Tokenizer
from stages import shard
from tests.stages.conftest import PARAMS, ROOT, run_text_stage, text_documents, write_clean


@pytest.fixture
def world(tokenizer_world: Path) -> Path:
    return tokenizer_world


def test_shards_hold_the_corpus_in_its_mixture(world):
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


def test_more_files_than_may_be_open_give_the_same_shards(world, monkeypatch, few_files):
    run_text_stage(shard)
    expected = read_json("data/shards/manifest.json")["files"]
    monkeypatch.setattr("tests.stages.conftest.SHARD_BYTES", 1)
    write_clean(Path(), text_documents())
    assert len(list(Path("data/clean/train").glob("*/*"))) > 2 * few_files
    run_text_stage(shard)
    assert read_json("data/shards/manifest.json")["files"] == expected


def test_validation_holds_every_held_out_document_with_its_bytes(world):
    run_text_stage(shard)
    tokenizer, manifest = Tokenizer.load("models/tokenizer"), read_shards_manifest("data/shards")
    held_out = list(read_documents("data/clean/val.parquet"))
    for name, stream in open_val("data/shards").items():
        texts = [tokenizer.decode(stream.document(n).tolist()) for n in range(stream.documents)]
        assert texts == [d.text for d in held_out if d.source == name]
        assert manifest["val"][name]["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_repeats_to_the_byte_and_a_seed_changes_the_order_only(world, monkeypatch):
    run_text_stage(shard)
    first, metrics = manifest_digest("data/shards"), sha256_file("metrics/shard.json")
    monkeypatch.setenv("ATHANOR_THREADS", "2")
    run_text_stage(shard)
    assert (manifest_digest("data/shards"), sha256_file("metrics/shard.json")) == (first, metrics)
    seeded = {"seed": 2, "sources": {n: {"share": s, "max_epochs": 2.0} for n, s in (("code", 0.6), ("prose", 0.4))}}
    run_text_stage(shard, mixture=seeded)
    assert manifest_digest("data/shards") != first


def test_null_takes_what_the_caps_allow_and_more_is_reported(world, capsys):
    run_text_stage(shard, shard={"train_tokens": None})
    allowed = read_json("metrics/shard.json")
    assert allowed["limited_by"] == "prose"
    assert allowed["tokens"] == pytest.approx(allowed["allowed_tokens"], rel=0.02)
    assert allowed["sources"]["prose"]["epochs"] == pytest.approx(3.0, abs=0.05)
    capsys.readouterr()
    run_text_stage(shard, shard={"train_tokens": 10**9})
    assert "the epoch cap of source 'prose' allows" in capsys.readouterr().err
    assert read_json("metrics/shard.json")["tokens"] == allowed["tokens"]


def test_a_document_in_both_splits_is_refused_and_the_old_shards_stay(world):
    run_text_stage(shard)
    before = manifest_digest("data/shards")
    documents = text_documents()
    twin = next(d for d in documents if d.split == "val")
    write_clean(world, [*documents, type(twin)(twin.text, twin.source, twin.kind, twin.license, "train")])
    with pytest.raises(GateError, match="1 documents are in both train and val"):
        run_text_stage(shard)
    assert manifest_digest("data/shards") == before
    assert sorted(p.name for p in Path("data").iterdir()) == ["clean", "shards"]


def test_a_mixture_that_is_not_interleaved_is_refused(world, monkeypatch):
    real = shard.plan_mixture

    def one_after_the_other(sources, target, seed, **how):
        plan = real(sources, target, seed, **how)
        order = np.argsort(plan.sources, kind="stable")
        return type(plan)(plan.sources[order], plan.documents[order], plan.taken, plan.allowed, plan.limited_by)

    monkeypatch.setattr(shard, "plan_mixture", one_after_the_other)
    with pytest.raises(GateError, match="gate 'shares'"):
        run_text_stage(shard, shard={"train_tokens": None, "share_tolerance": 0.01})


def test_no_validation_text(world):
    write_clean(world, [d for d in text_documents() if d.split == "train"])
    with pytest.raises(InputError, match="no validation document"):
        run_text_stage(shard)


# -- tokenising, shard by shard -------------------------------------------------------------------------------------

COOLDOWN = {"sources": {"prose": {"share": 0.7, "max_epochs": 1.0}, "code": {"share": 0.3, "max_epochs": 0.5}}}
MIXTURE = PARAMS["mixture"]


def results() -> dict[str, str]:
    """Hash by name of everything that the stage hands on."""
    paths = [*Path("data/shards").rglob("*.*"), Path("metrics/shard.json"), *Path("plots").iterdir()]
    return {str(path): sha256_file(path) for path in paths}


def spooled() -> dict[str, int]:
    """When each finished file of the spool was written; what a worker has half-written does not count.

    `os.walk`, because `rglob` fails when a worker gives a folder its final name meanwhile.
    """
    found = [Path(folder, name) for folder, _, names in os.walk(".athanor/slots/shard") for name in names]
    files = [path for path in found if path.suffix == ".bin" and ".tmp/" not in str(path)]
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_another_mixture_or_length_tokenises_nothing_again(world):
    run_text_stage(shard, shard={"train_tokens": None})
    first, tokens = results(), spooled()
    assert len(tokens) > 6
    shares = {"code": {"share": 0.3, "max_epochs": 1.0}, "prose": {"share": 0.7, "max_epochs": 2.0}}
    run_text_stage(shard, mixture={"sources": shares, "cooldown": COOLDOWN}, shard={"train_tokens": 9000})
    assert results() != first and spooled() == tokens
    run_text_stage(shard, shard={"train_tokens": None})
    assert results() == first and spooled() == tokens
    write_clean(world, text_documents()[:-20])
    run_text_stage(shard)
    assert len(spooled()) > len(tokens)  # other text is another slot


def test_a_source_that_gets_a_share_later_is_tokenised_then(world):
    run_text_stage(shard)
    both = results()
    shutil.rmtree(".athanor")
    only = {"code": {"share": 1.0, "max_epochs": 2.0}, "prose": {"share": 0.0, "max_epochs": 1.0}}
    run_text_stage(shard, mixture={"sources": only})
    tokens = spooled()
    assert not any("prose-00000" in name for name in tokens)
    run_text_stage(shard)
    assert results() == both and tokens.items() < spooled().items()


def test_a_stop_while_shards_are_written_keeps_the_tokens(world, monkeypatch):
    monkeypatch.setattr(Run, "stop_requested", lambda run: len(spooled()) > 6)
    monkeypatch.setattr(Executor, "__call__", _unstopped(Executor.__call__))
    with pytest.raises(Interrupted, match="while writing shards"):
        run_text_stage(shard)
    assert [path.name for path in Path("data").iterdir()] == ["clean"]
    tokens = spooled()
    monkeypatch.undo()
    monkeypatch.chdir(world)
    run_text_stage(shard)
    assert spooled() == tokens


def _unstopped(real):
    def call(executor, *args, **named):
        executor.stop = lambda: False
        return real(executor, *args, **named)

    return call


KILLED = """
import os, signal
from athanor.runtime import executor, run
from stages import shard

class Deadly(executor.Executor):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.done, self.advance = 0, self.count

    def count(self, size):
        self.done += 1
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

run.MIN_BYTES_PER_WORKER, executor.Executor = 1, Deadly
shard.run(run.Run("shard", "stages.shard"))
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_while_tokenising_and_resumed(world, monkeypatch, workers):
    monkeypatch.setenv("ATHANOR_WORKERS", workers)
    run_text_stage(shard)
    whole = results()
    for folder in (".athanor", "data/shards", "metrics", "plots"):
        shutil.rmtree(folder)
    with open("killed.log", "wb") as log:  # no pipe: workers that live on a little would keep it open
        how = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stdout": log, "stderr": log, "start_new_session": True}
        killed = subprocess.Popen([sys.executable, "-P", "-c", KILLED], **how)
        assert killed.wait(timeout=300) == -signal.SIGKILL, Path("killed.log").read_text()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(killed.pid, signal.SIGKILL)
    done = {path.parent.parent.parent.parent for path in Path(".athanor/slots/shard").rglob("tokens/*/00000.bin")}
    assert done and not Path("data/shards").exists()
    run_text_stage(shard)
    assert results() == whole


def test_a_shard_that_is_missing_is_a_failed_stage(world):
    """Never a smaller corpus: what clean counted must be there."""
    (world / "data/clean/train/code/00001.parquet").unlink()
    with pytest.raises(GateError, match="'complete' failed: .* of source 'code' in train, clean counted"):
        run_text_stage(shard)
    shutil.rmtree(world / "data/clean/train/code")
    with pytest.raises(InputError, match="mixture source 'code': no training text"):
        run_text_stage(shard)
    shutil.rmtree(world / "data/clean/train")
    with pytest.raises(InputError, match="data/clean/train: no documents"):
        run_text_stage(shard)


def test_a_source_without_a_document_is_refused_before_anything_is_tokenised(world):
    """A code source of no bytes was once renormalised away, and a model trained without code."""
    shares = MIXTURE["sources"] | {"maths": {"share": 0.2, "max_epochs": 1.0}}
    with pytest.raises(InputError, match="mixture source 'maths': no training text"):
        run_text_stage(shard, mixture={"sources": shares})
    cooldown = {"sources": {"maths": {"share": 1.0, "max_epochs": 1.0}}}
    with pytest.raises(InputError, match="mixture source 'maths': no training text"):
        shares = shares | {"maths": {"share": 0.0, "max_epochs": 1.0}}
        run_text_stage(shard, mixture={"sources": shares, "cooldown": cooldown})
    assert not spooled()


def test_tokens_that_do_not_match_the_plan_are_refused(world, monkeypatch):
    real = shard.plan_mixture

    def miscounted(*args, **named):
        plan = real(*args, **named)
        return type(plan)(plan.sources, plan.documents, (plan.taken[0] + 1, *plan.taken[1:]), plan.allowed, "code")

    monkeypatch.setattr(shard, "plan_mixture", miscounted)
    with pytest.raises(GateError, match="'counts' failed: .* tokens of 'code', not"):
        run_text_stage(shard)


# -- what is told ---------------------------------------------------------------------------------------------------


def test_the_mixture_is_shown_before_it_is_built(world, capsys, monkeypatch):
    def refuse(*_):
        raise RuntimeError("not yet")

    with monkeypatch.context() as patch:
        patch.setattr(shard.build, "write_stream", refuse)
        with pytest.raises(RuntimeError, match="not yet"):
            run_text_stage(shard)
    told = capsys.readouterr().err
    run_text_stage(shard)
    manifest = read_shards_manifest("data/shards")
    for name, facts in manifest["sources"].items():
        (row,) = [line.split() for line in told.splitlines() if line.startswith(f"{name} ")]
        numbers = [f"{facts[key]:,}" for key in ("unique_documents", "unique_tokens")]
        assert row[1:3] == numbers and float(row[3]) == facts["target_share"]
        assert float(row[5]) == pytest.approx(facts["epochs"], abs=0.006) and row[6] == f"{facts['tokens']:,}"
    assert "30,000 asked; the caps allow" in told and "by source 'prose'" in told


# -- the cooldown's mixture -----------------------------------------------------------------------------------------


def test_the_cooldown_has_a_stream_of_its_own_and_leaves_the_main_one_alone(world, capsys):
    run_text_stage(shard)
    alone, digest = results(), manifest_digest("data/shards")
    run_text_stage(shard, mixture={"cooldown": COOLDOWN}, shard={"cooldown_tokens": 5000})
    verify_files("data/shards")
    with_it, manifest = results(), read_shards_manifest("data/shards")
    same = [name for name in alone if name.startswith("data/shards/") and name.endswith((".bin", ".npy"))]
    assert same and all(with_it[name] == alone[name] for name in same)
    assert main_digest("data/shards") == digest != manifest_digest("data/shards")
    stream, facts = open_cooldown("data/shards"), manifest["cooldown"]
    longest = read_json("metrics/shard.json")["cooldown"]["longest_document_tokens"]
    assert 5000 <= stream.tokens == facts["counts"]["tokens"] < 5000 + longest
    assert facts["sources"]["prose"]["target_share"] == 0.7 and facts["sources"]["prose"]["share"] > 0.5
    assert {name: sum(counts) for name, counts in facts["per_shard"].items()} == {
        name: row["tokens"] for name, row in facts["sources"].items()
    }
    metrics = read_json("metrics/shard.json")
    assert metrics["cooldown"]["asked_tokens"] == 5000 and metrics["tokens"] == open_train("data/shards").tokens
    assert "prose (cooldown)" in Path("plots/shard_mixture.tsv").read_text()
    assert "shard: cooldown\n" in capsys.readouterr().err
    run_text_stage(shard)
    assert results() == alone


def test_a_source_of_the_cooldown_only(world):
    sources = MIXTURE["sources"] | {"prose": {"share": 0.0, "max_epochs": 1.0}}
    cooldown = {"sources": {"prose": {"share": 1.0, "max_epochs": 1.0}}}
    run_text_stage(shard, mixture={"sources": sources, "cooldown": cooldown})
    manifest = read_shards_manifest("data/shards")
    assert list(manifest["sources"]) == list(manifest["val"]) == ["code"]
    facts = manifest["cooldown"]["sources"]
    assert list(facts) == ["prose"] and facts["prose"]["epochs"] == 1.0


def test_gates_hold_for_the_cooldown(world, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(MixSource, "cap", property(lambda source: 4 * source.total))
        with pytest.raises(GateError, match="'epochs' failed: source 'prose' is seen .* cap 1.0"):
            run_text_stage(shard, mixture={"cooldown": COOLDOWN})
    run_text_stage(shard, mixture={"cooldown": COOLDOWN}, shard={"cooldown_tokens": 10**9})
    facts = read_shards_manifest("data/shards")["cooldown"]["sources"]
    assert all(facts[name]["epochs"] <= row["max_epochs"] for name, row in COOLDOWN["sources"].items())
    assert "1,000,000,000 tokens asked; at these shares the epoch cap of source" in capsys.readouterr().err


def test_a_cooldown_that_cannot_be_meant(world):
    with pytest.raises(ParamsError, match="shard.cooldown_tokens: there is no mixture for the cooldown"):
        run_text_stage(shard, shard={"cooldown_tokens": 100})
    unknown = {"sources": {"maths": {"share": 1.0, "max_epochs": 1.0}}}
    with pytest.raises(ParamsError, match="mixture.cooldown.sources.maths: not a source of the mixture"):
        run_text_stage(shard, mixture={"cooldown": unknown})
    nothing = {"sources": {"code": {"share": 0.0, "max_epochs": 1.0}}}
    with pytest.raises(ParamsError, match="mixture.cooldown.sources: no source has a share"):
        run_text_stage(shard, mixture={"cooldown": nothing})
