"""The pretrain and sft stages: outputs, slots, refusals, and that they repeat to the byte."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from athanor.base.artifacts import read_json, read_manifest, verify_files, write_manifest
from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.data import rows as packed
from athanor.data.shards import ShardWriter, token_dtype
from athanor.model.weights import load_model
from tests.stages.conftest import PARAMS, run_stage, settle

ROOT = Path(__file__).resolve().parents[2]
VOCAB, CONTEXT = 64, 16
MODEL, PRETRAIN, SFT = (PARAMS[name] for name in ("model", "pretrain", "sft"))


def write_inputs(root):
    draw = np.random.Generator(np.random.PCG64(0))
    texts = [np.array([2, *(draw.integers(8, VOCAB) + np.arange(n)) % 56 + 8, 3]) for n in draw.integers(4, 40, 160)]
    tokenizer = root / "models/tokenizer"
    tokenizer.mkdir(parents=True)
    np.save(tokenizer / "token_bytes.npy", np.array([0] * 8 + [2] * 56, dtype=np.int32))
    counts = {"vocab_size": VOCAB}
    write_manifest(tokenizer, kind="tokenizer", version=1, counts=counts, digest="tok", template_hash="tpl")
    shards, dtype = root / "data/shards", token_dtype(VOCAB)
    for folder, part in (("train", texts[:120]), ("val/code", texts[120:140]), ("val/prose", texts[140:])):
        writer = ShardWriter(shards / folder, dtype, 1500, sources=folder == "train")
        for text in part:
            writer.add(text)
        writer.close()
    val = {name: {"documents": 20} for name in ("code", "prose")}
    write_manifest(shards, kind="shards", version=1, counts={}, dtype=dtype.name, tokenizer="tok", val=val)
    sft = root / "data/sft"
    sft.mkdir()
    talks = [(ids[:12], np.arange(len(ids[:12])) >= 4) for ids in texts if len(ids) >= 8]
    for split, part in (("train", talks[:60]), ("val", talks[60:80])):
        packed.write_split(sft, split, part, [[n] for n in range(len(part))], VOCAB)
    facts = {"dtype": dtype.name, "tokenizer": "tok", "template_hash": "tpl", "pad_id": 0, "stop_id": 3}
    write_manifest(sft, kind=packed.KIND, version=packed.VERSION, counts={}, context_tokens=CONTEXT, **facts)
    for name in ("athanor", "stages"):  # a slot's fingerprint covers the code
        (root / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    write_inputs(root)
    return root


@pytest.fixture
def work(inputs, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    shutil.copytree(inputs, tmp_path / "work", symlinks=True)
    settle(monkeypatch, tmp_path / "work")
    yield tmp_path / "work"
    torch.set_flush_denormal(False)


def execute(stage, stop_after=None, **changes):
    params = {"model": MODEL, "pretrain": PRETRAIN, "sft": SFT}
    params = {name: values | changes.get(name, {}) for name, values in params.items()}
    return run_stage(importlib.import_module(f"stages.{stage}"), params, stop_after)


def results(stage):
    folder = {"pretrain": "models/base", "sft": "models/sft"}[stage]
    tables = [Path(f"plots/{stage}.tsv"), Path(f"plots/{stage}_validation.tsv")]
    paths = [*sorted(Path(folder).iterdir()), Path(f"metrics/{stage}.json"), *tables]
    return {str(path): path.read_bytes() for path in paths}


def slots(stage):
    """Slots of whole runs, without trunks."""
    folders = sorted(Path(".athanor/slots", stage).iterdir())
    return [folder for folder in folders if read_json(folder / "facts.json").get("part") != "trunk"]


@pytest.fixture(scope="module")
def pretrained(inputs, tmp_path_factory):
    """Results of an uninterrupted run of both stages, and the folder they are in."""
    root = tmp_path_factory.mktemp("done") / "work"
    shutil.copytree(inputs, root, symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, root)
        execute("pretrain")
        execute("sft")
        return results("pretrain"), results("sft"), root


def test_pretrain_outputs(pretrained):
    _, _, root = pretrained
    verify_files(root / "models/base")
    manifest = read_manifest(root / "models/base", "model", 1)
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors"]
    assert sorted(manifest["parents"]) == ["shards", "tokenizer"]
    model, facts = load_model(root / "models/base")
    assert facts == {"tokenizer_digest": "tok", "template_hash": "tpl", "skipped_ranges": []}
    assert model.config.vocab_size == VOCAB
    metrics = read_json(root / "metrics/pretrain.json")
    assert metrics["tokens"] == 1280 and metrics["steps"] == 20 and metrics["parameters"] == 5712
    assert sorted(metrics["validation"]) == ["all", "code", "prose"]
    assert all(score["stderr"] > 0 and 400 <= score["bytes"] < 1000 for score in metrics["validation"].values())
    assert metrics["train_loss"] < np.log(VOCAB)
    summary = {"bpb": metrics["validation"]["all"]["bpb"], "parameters": 5712}
    assert read_json(root / "metrics/summary/pretrain.json") == summary
    rows = list(csv.DictReader((root / "plots/pretrain.tsv").open(), delimiter="\t"))
    assert list(rows[0]) == ["tokens", "loss", "lr", "grad_norm"] and len(rows) == 20
    with (root / "plots/pretrain_validation.tsv").open() as file:
        validations = list(csv.DictReader(file, delimiter="\t"))
    assert [row["tokens"] for row in validations] == ["640", "1280"] and all(
        float(row["all"]) > 0 for row in validations
    )
    assert float(rows[-1]["lr"]) == 0.001


def test_pretrain_repeats_to_the_byte_whatever_the_machine(work, pretrained, monkeypatch):
    monkeypatch.setenv("ATHANOR_THREADS", "2")
    monkeypatch.setenv("ATHANOR_LOG_EVERY_STEPS", "3")
    execute("pretrain")
    assert results("pretrain") == pretrained[0]


def test_a_done_slot_writes_outputs_again_without_training(work, pretrained):
    """The columns of the validation plot once came in another order out of a checkpoint."""
    execute("pretrain")
    shutil.rmtree("models/base")
    run = execute("pretrain", pretrain={"sample_prompts": ["not part of the result"]})
    assert results("pretrain") == pretrained[0] and len(slots("pretrain")) == 1
    assert "train_seconds" not in run._facts


def test_stop_and_resume(work, pretrained):
    for steps in (3, 8):
        with pytest.raises(Interrupted, match="stopped at step"):
            execute("pretrain", stop_after=steps)
    assert not Path("models/base").exists() and not Path("metrics/pretrain.json").exists()
    execute("pretrain")
    assert results("pretrain") == pretrained[0]


def test_stop_and_resume_after_first_weights_from_pairs(work, capsys):
    changes = {"model": {"tied_embeddings": False}, "pretrain": {"bigram_tokens": 1500}}
    execute("pretrain", **changes)
    whole = results("pretrain")
    shutil.rmtree(".athanor")
    with pytest.raises(Interrupted, match="stopped at step"):
        execute("pretrain", stop_after=3, **changes)
    execute("pretrain", **changes)
    assert results("pretrain") == whole
    assert "initial_loss" not in capsys.readouterr().err


def test_another_configuration_is_another_slot(work):
    with pytest.raises(Interrupted):
        execute("pretrain", stop_after=3)
    execute("pretrain", pretrain={"lr": 0.005})
    assert len(slots("pretrain")) == 2
    assert [(slot / "DONE").is_file() for slot in slots("pretrain")].count(True) == 1


def test_a_larger_budget_continues_the_trunk(work, pretrained, capfd):
    """1,300 to 2,600 tokens: 20 steps of 64 have a trunk of 15; a run of 40 trains the other 25."""
    execute("pretrain")
    assert "trunk" not in capfd.readouterr().err
    longer = execute("pretrain", pretrain={"tokens": 2600})
    assert "continues from 960 tokens\npretrain: that is the trunk" in capfd.readouterr().err
    assert longer._facts["trained_tokens"] == 25 * 64
    grown = results("pretrain")
    (trunk,) = {path.parent for path in Path(".athanor/slots/pretrain").glob("*/PINNED")}
    pinned = (trunk / "step_00000030/tensors.safetensors").read_bytes()
    rows = [json.loads(line) for line in (longer.journal.folder / "journal.jsonl").read_text().splitlines()]
    assert [row["s"] for row in rows if "loss" in row.get("m", {})] == list(range(1, 41))
    shutil.rmtree(".athanor")
    torch.manual_seed(99)  # as at the start of a process, where torch seeds at random
    alone = execute("pretrain", pretrain={"tokens": 2600})
    assert alone._facts["trained_tokens"] == 40 * 64 and results("pretrain") == grown
    (trunk,) = {path.parent for path in Path(".athanor/slots/pretrain").glob("*/PINNED")}
    assert (trunk / "step_00000030/tensors.safetensors").read_bytes() == pinned


def test_a_stream_that_is_read_again_is_told(work, capfd):
    """The caps of the mixture hold for the stream; what reads it twice goes past them."""
    execute("pretrain")
    assert "stream is read" not in capfd.readouterr().err
    execute("pretrain", pretrain={"tokens": 6500})
    assert re.search(
        r"the shards' stream is read [2-9]\.\d times, .* pretrain.tokens: \d+ reads it once", capfd.readouterr().err
    )


def test_a_cosine_run_has_no_trunk(work):
    execute("pretrain", pretrain={"schedule": "cosine"})
    assert not list(Path(".athanor/slots/pretrain").glob("*/PINNED"))


def test_sft_outputs(pretrained):
    _, _, root = pretrained
    verify_files(root / "models/sft")
    assert sorted(read_manifest(root / "models/sft", "model", 1)["parents"]) == ["base", "sft", "tokenizer"]
    metrics = read_json(root / "metrics/sft.json")
    rows = len(packed.PackedRows(root / "data/sft", "train"))
    assert metrics["tokens"] == int(1.5 * rows * CONTEXT) // 64 * 64
    assert metrics["validation"]["conversations"] == 5 and metrics["validation"]["stderr"] > 0
    assert read_json(root / "metrics/summary/sft.json") == {"loss": metrics["validation"]["loss"]}
    base, _ = load_model(root / "models/base")
    tuned, facts = load_model(root / "models/sft")
    assert facts == {"tokenizer_digest": "tok", "template_hash": "tpl", "skipped_ranges": []}
    assert not torch.equal(base.head_weight, tuned.head_weight)


def test_sft_validations_stand_at_the_tokens_trained_on(pretrained):
    """The score's own count of tokens once took the place of the position: every row of the plot was at 429."""
    with (pretrained[2] / "plots/sft_validation.tsv").open() as file:
        tokens = [int(row["tokens"]) for row in csv.DictReader(file, delimiter="\t")]
    assert tokens == sorted(set(tokens)) and len(tokens) == 3
    assert tokens[-1] == read_json(pretrained[2] / "metrics/sft.json")["tokens"]


def test_sft_stop_and_resume(work, pretrained):
    shutil.copytree(pretrained[2] / "models/base", "models/base")
    with pytest.raises(Interrupted):
        execute("sft", stop_after=4)
    assert not Path("models/sft").exists()
    execute("sft")
    assert results("sft") == pretrained[1]


def edit(path, old, new):
    path = Path(path)
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("stage", "path", "old", "new", "fix"),
    [
        ("pretrain", "data/shards/manifest.json", '"tok"', '"other"', "dvc repro shard"),
        ("sft", "data/sft/manifest.json", '"tok"', '"other"', "dvc repro sft-data"),
        ("sft", "data/sft/manifest.json", '"tpl"', '"other"', "dvc repro sft-data"),
        ("sft", "models/base/config.json", '"tok"', '"other"', "dvc repro pretrain"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(work, pretrained, stage, path, old, new, fix):
    shutil.copytree(pretrained[2] / "models/base", "models/base")
    edit(path, old, new)
    with pytest.raises(InputError, match=fix):
        execute(stage)
    assert not Path(".athanor/slots").exists()


def test_wrong_sizes_are_refused(work, monkeypatch):
    with pytest.raises(ParamsError, match="pretrain.batch_tokens.*multiple of 16"):
        execute("pretrain", pretrain={"batch_tokens": 72})
    with pytest.raises(ParamsError, match="model.vocab_size.*has 64"):
        execute("pretrain", model={"vocab_size": 512})
    monkeypatch.setattr("athanor.training.memory.available_bytes", lambda device: 1 << 20)
    with pytest.raises(InputError, match="GiB are free"):
        execute("pretrain")
    assert not Path("models/base").exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_number_format_that_has_no_effect_here_is_told(work, capfd, monkeypatch, precision):
    """bf16 on a CPU without AMX; what such a CPU is asked is tested in tests/model/test_precision.py."""
    monkeypatch.setattr("athanor.runtime.choices.without_effect", lambda name, device: name == "bf16")
    execute("pretrain", pretrain={"precision": precision})
    assert ("this processor has no units for it" in capfd.readouterr().err) == (precision == "bf16")
