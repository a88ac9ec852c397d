"""Exports of tiny models: merged weights are the base's plus B A, llama.cpp agrees on both GGUF files, faults are caught."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from athanor.base.artifacts import write_json, write_manifest
from athanor.base.errors import GateError, InputError
from athanor.catalog.discover import discover
from athanor.cli.evaluate.job import Job, kind_of, run
from athanor.export.params import ExportParams
from athanor.tuning import export
from tests.tuning.tiny import make_base

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
pytest.importorskip("xllamacpp")
OUT = Path("models/tune-export")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(model, method="lora"):
    """Leave what a training leaves, with random changes."""
    model.name_or_path = "base"
    if method == "lora":
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if method == "full" or "lora_B" in name:
                weight += torch.randn_like(weight) * 0.1
    model.save_pretrained("models/tune")
    facts = {"method": method, "base": "base", "recipe": {"side": {"quantise": "none"}}}
    write_manifest("models/tune", kind="side", version=1, counts={"steps": 3}, parents={}, **facts)
    write_json("metrics/tune.json", {"before": {"val_loss": 2.0}, "after": {"val_loss": 1.0}})


def run_export():
    params = ExportParams(name="tiny", dtype="float32", gguf_types=("f16",), llama_cpp="required")
    stage = SimpleNamespace(params=lambda *_: params, param=lambda _: "base", metrics=lambda _: None)
    export.export(stage, "tune")


@pytest.mark.parametrize(("kind", "module"), [
    ("qwen3", "model.layers.1.self_attn.q_proj"),
    ("llama", "model.layers.1.self_attn.k_proj"),
    ("gemma", "model.layers.0.mlp.up_proj"),
    ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value"),
])  # fmt: skip
def test_a_lora_is_merged_and_llama_cpp_agrees(kind, module):
    train(make_base(kind))
    run_export()
    assert (OUT / "adapter/adapter.gguf").is_file() and (OUT / "model.gguf").is_file()
    base, merged = (load_file(folder / "model.safetensors") for folder in (Path("base"), OUT / "hf"))
    factors = load_file(OUT / "adapter/adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
    torch.testing.assert_close(merged[f"{module}.weight"], base[f"{module}.weight"] + 2 * b @ a)
    assert "| val_loss | 2 | 1 |" in (OUT / "MODEL_CARD.md").read_text()
    assert "Assistant" in transformers.AutoTokenizer.from_pretrained(OUT / "hf").chat_template
    (served,) = discover(Path(), [str(OUT)])
    assert served.path.endswith("model.gguf") and not served.problem


@pytest.mark.parametrize("kind", ["gemma", "gpt_neox"])
def test_all_weights_in_the_type_of_the_base(kind):
    train(make_base(kind, "bfloat16").float(), "full")
    run_export()
    assert not (OUT / "adapter").exists()
    kinds = {weight.dtype for weight in load_file(OUT / "hf/model.safetensors").values()}
    assert kinds == {torch.bfloat16} and json.loads((OUT / "hf/config.json").read_text())["dtype"] == "bfloat16"


def wrong_scale(patch):
    value = export.Value
    patch.setattr(export, "Value", lambda kind, x: value(kind, x * 1.5 if isinstance(x, float) else x))


def torn(patch):
    write = export.write_raw

    def cut(path, *rest):
        write(path, *rest)
        path.write_bytes(path.read_bytes()[:-500])

    patch.setattr(export, "write_raw", cut)


FAULTS = {
    "scale": wrong_scale,
    "torn": torn,
    "rows": lambda patch: patch.setattr(export, "interleave", lambda array, heads: array),
    "unmerged": lambda patch: patch.setattr("peft.LoraModel.merge_and_unload", peft.LoraModel.unload),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_nothing(fault, monkeypatch):
    train(make_base("llama"))
    FAULTS[fault](monkeypatch)
    with pytest.raises(GateError):
        run_export()
    assert not OUT.exists()


def test_a_checkpoint_is_scored_with_its_lora():
    train(make_base("llama"))
    run_export()
    Path("set.txt").write_text(export.TEXT * 12)

    def loss(model):
        (row,) = run(Job(str(model), kind_of(model), "", "set.txt", "none"))
        return row["loss"]

    scored = loss("models/tune")
    assert abs(scored - loss(OUT / "model.gguf")) < 1e-3 < abs(scored - loss("base/base.gguf"))
    Path("base/base.gguf").unlink()
    with pytest.raises(InputError, match="no GGUF"):
        loss("models/tune")
