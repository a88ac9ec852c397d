"""A checkpoint without its optimiser: the same weights, a third of the size, read by the chat."""

from __future__ import annotations

import json

import pytest
import torch

from athanor.base.artifacts import manifest_digest, write_json
from athanor.base.errors import InputError
from athanor.catalog.loading import load_export
from athanor.cli import cli
from athanor.cli.shrink import newest_checkpoint, shrink
from athanor.model.weights import load_config, model_tensors, save_model
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training import checkpoint
from tests.evaluation.tiny import make_model, write_tiny_tokenizer


@pytest.fixture
def project(tmp_path, monkeypatch, request):
    """A tokenizer, a base model, and the slots of pretraining and fine-tuning with two checkpoints each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    tokenizer = write_tiny_tokenizer(tmp_path / "models" / "tokenizer")
    tied = getattr(request, "param", True)
    model = make_model(tokenizer, qk_norm=True, tied=tied)
    facts = {"tokenizer_digest": tokenizer.digest, "template_hash": template_hash(tokenizer)}
    save_model("models/base", model, model.config, facts)
    shape = model.config.to_dict()
    if tied:  # a slot from before there was a choice
        del shape["tied_embeddings"]
    params = {"model": shape, "pretrain": {"lr": 0.1}}
    told = {
        "pretrain": {"code": "c", "params": params, "inputs": {"tokenizer": tokenizer.digest, "shards": "s"}},
        "sft": {
            "code": "c",
            "params": {"lr": 0.1},
            "inputs": {"tokenizer": manifest_digest("models/tokenizer"), "base": manifest_digest("models/base")},
        },
    }
    for stage, content in told.items():
        slot = tmp_path / ".athanor" / "slots" / stage / (stage[0] * 16)
        slot.mkdir(parents=True)
        write_json(slot / "facts.json", content)
        for step in (10, 20):
            save(slot, step)
    return tmp_path


def at(step: int) -> dict[str, torch.Tensor]:
    tied = load_config("models/base")[0].tied_embeddings
    model = make_model(Tokenizer.load("models/tokenizer"), seed=step, qk_norm=True, tied=tied)
    return model_tensors(model)


def save(slot, step):
    tensors = {f"model.{name}": weight for name, weight in at(step).items()}
    for name, weight in at(step).items():
        tensors |= {f"optimizer.{name}.{part}": torch.ones_like(weight) for part in ("exp_avg", "exp_avg_sq")}
    checkpoint.save(slot, step, {**tensors, "rng.cpu": torch.get_rng_state()}, {"step": step})


def slot_of(project, stage):
    return project / ".athanor" / "slots" / stage / (stage[0] * 16)


@pytest.mark.parametrize("project", [True, False], ids=["tied", "untied"], indirect=True)
@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_weights_are_those_of_the_checkpoint_and_a_third_of_its_size(stage, project):
    step, before, after = shrink(newest_checkpoint(slot_of(project, stage)), project / "out", "float32")
    model, _ = load_export(project / "out")
    found = model_tensors(model)
    assert step == 20 and all(torch.equal(found[name], weight) for name, weight in at(20).items())
    assert after < 0.6 * before  # here the tokenizer is half of it
    weights = (project / "out" / "model.safetensors").stat().st_size
    assert weights < 0.35 * before
    _, whole, _ = shrink(slot_of(project, stage) / "step_00000010", project / "half", "bfloat16")
    model, _ = load_export(project / "half")
    assert all(torch.equal(model_tensors(model)[n], w.bfloat16().float()) for n, w in at(10).items())
    assert (project / "half" / "model.safetensors").stat().st_size < 0.55 * weights and whole == before


def test_a_torn_checkpoint_is_refused(project):
    path = newest_checkpoint(slot_of(project, "pretrain"))
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "tensors.safetensors").write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        shrink(path, project / "out", "float32")
    (path / "state.json").write_text(json.dumps({"step": 20}))
    with pytest.raises(InputError, match="damaged"):
        shrink(path, project / "out", "float32")
    assert not (project / "out").exists()
    assert path.is_dir()  # and it is still there for the run to judge


def test_parts_of_another_run_are_refused(project):
    for stage, complaint in (("pretrain", "another tokenizer"), ("sft", "another models/base")):
        path = slot_of(project, stage) / "facts.json"
        content = json.loads(path.read_text())
        content["inputs"]["tokenizer" if stage == "pretrain" else "base"] = "0" * 64
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=complaint):
            shrink(newest_checkpoint(path.parent), project / "out", "float32")
    with pytest.raises(InputError, match="not a checkpoint of a slot"):
        shrink(project / "models" / "base", project / "out", "float32")


def test_command_takes_an_id_and_says_the_sizes(project, capsys):
    words = ["ppp", "out", "--dtype", "float16"]
    assert cli.call("shrink", words) == 0
    assert "step 20: 0.4 MiB with optimiser state, 0." in capsys.readouterr().out
    with pytest.raises(InputError, match="exists"):
        cli.call("shrink", words)
    with pytest.raises(InputError, match="0 slots begin with 'zzz'"):
        cli.call("shrink", ["zzz", "other"])
