"""Pretraining with a stream of its own for the cooldown: where it begins, the trunk before it, kill and resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from athanor.base.artifacts import read_json, write_manifest
from athanor.base.errors import Interrupted, ParamsError
from athanor.data.sampler import PretrainSampler
from athanor.data.shards import ShardWriter, token_dtype
from tests.stages import test_train_stages
from tests.stages.test_train_stages import PRETRAIN, VOCAB, execute, results

inputs, work = test_train_stages.inputs, test_train_stages.work
BATCH, STEPS, TRUNK = PRETRAIN["batch_tokens"], 20, 15  # 1,300 tokens, a quarter of them cooldown


def set_cooldown(seed: int | None) -> None:
    """Give data/shards a stream for the cooldown drawn with this seed, or none."""
    folder = Path("data/shards")
    manifest = read_json(folder / "manifest.json")
    shutil.rmtree(folder / "cooldown", ignore_errors=True)
    facts = {name: manifest[name] for name in ("dtype", "tokenizer", "val")}
    if seed is not None:
        draw = np.random.Generator(np.random.PCG64(seed))
        writer = ShardWriter(folder / "cooldown", token_dtype(VOCAB), 400, sources=True)
        for length in draw.integers(4, 40, 25):
            writer.add(np.array([2, *draw.integers(8, 16, length), 3]))
        writer.close()
        facts["cooldown"] = {"counts": {}}
    (folder / "manifest.json").unlink()
    write_manifest(folder, kind="shards", version=1, counts={}, **facts)


@pytest.fixture
def batches(monkeypatch):
    """Position and ids of every batch that was read."""
    read = []
    real = PretrainSampler.batch

    def batch(self, position, tokens):
        rows = real(self, position, tokens)
        read.append((position, rows.tokens_BS))
        return rows

    monkeypatch.setattr(PretrainSampler, "batch", batch)
    return read


def trunk_files():
    (trunk,) = {path.parent for path in Path(".athanor/slots/pretrain").glob("*/PINNED")}
    return {path.name: path.read_bytes() for path in (trunk / f"step_{TRUNK:08d}").iterdir()}


def test_the_stream_changes_at_the_first_step_of_the_cooldown(work, batches):
    set_cooldown(1)
    run = execute("pretrain")
    trained = dict(batches[1:])  # the first is the preflight's
    assert sorted(trained) == [step * BATCH for step in range(STEPS)]
    # The cooldown's text has small ids only; the rate is at its peak until the step that ends at the switch.
    small = {position: int(ids.max()) < 16 for position, ids in trained.items()}
    assert small == {step * BATCH: step >= TRUNK for step in range(STEPS)}
    rows = Path("plots/pretrain.tsv").read_text().splitlines()[1:]
    rates = [float(row.split("\t")[2]) for row in rows]
    assert rates[TRUNK - 1] == max(rates) > rates[TRUNK]
    metrics = read_json("metrics/pretrain.json")
    assert metrics["cooldown_epochs"] > 0 and metrics["epochs"] < 1.1
    assert run._facts["trained_tokens"] == STEPS * BATCH


def test_another_cooldown_mixture_continues_the_trunk(work):
    """From none to one, to another, and back: only the steps of the cooldown are trained again."""
    execute("pretrain")
    alone, trunk = results("pretrain"), trunk_files()
    made = []
    for seed in (1, 2):
        set_cooldown(seed)
        run = execute("pretrain")
        assert run._facts["trained_tokens"] == (STEPS - TRUNK) * BATCH
        assert trunk_files() == trunk
        made.append(results("pretrain")["models/base/model.safetensors"])
    assert len({*made, alone["models/base/model.safetensors"]}) == 3
    shutil.rmtree(".athanor")
    execute("pretrain")  # without a trunk to continue
    assert results("pretrain")["models/base/model.safetensors"] == made[1] and trunk_files() == trunk
    set_cooldown(None)
    execute("pretrain")
    assert results("pretrain") == alone


def test_stopped_inside_the_cooldown_and_resumed(work):
    set_cooldown(1)
    execute("pretrain")
    whole = results("pretrain")
    shutil.rmtree(".athanor")
    shutil.rmtree("models/base")
    for steps in (TRUNK - 1, 3, 2):  # before the switch, behind it, and once more
        with pytest.raises(Interrupted, match="stopped at step"):
            execute("pretrain", stop_after=steps)
    assert execute("pretrain")._facts["trained_tokens"] < (STEPS - TRUNK) * BATCH
    assert results("pretrain") == whole


def test_a_cooldown_of_less_than_a_step_is_the_last_step(work, batches):
    set_cooldown(1)
    execute("pretrain", pretrain={"cooldown_fraction": 0.02})
    assert [int(ids.max()) < 16 for _, ids in batches[1:]] == [False] * (STEPS - 1) + [True]


def test_cosine_with_a_mixture_for_the_cooldown_is_refused(work):
    set_cooldown(1)
    with pytest.raises(ParamsError, match="pretrain.schedule: .*no cooldown. Fix: use wsd, or set mixture.cooldown"):
        execute("pretrain", pretrain={"schedule": "cosine"})
    assert not Path("models/base").exists() and not Path(".athanor/slots").exists()
