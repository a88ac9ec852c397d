"""`athanor side` on our own export and on tiny models of others, from a command to files that runtimes read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import read_json
from tests.e2e.clone import Clone

transformers = pytest.importorskip("transformers")
OWN, THEIRS = "models/export/hf", ("qwen3", "llama", "gemma", "gpt_neox")
PAIRS = "pairs.jsonl"
TRAININGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"side": {"method": "full"}},
    "text": {"side": {"method": "full"}, "tune": {"data": "text", "max_text_tokens": 20_000, "epochs": 1.0}},
    "dpo": {"dpo_data": {"sources": [{"type": "pairs", "name": "pairs", "files": PAIRS}]}},
    "grpo": {},
}
CASES = [(OWN, "full"), (OWN, "text"), *((base, name) for base in THEIRS for name in ("lora", "full"))]


@pytest.fixture
def clone(micro: Clone) -> Iterator[Clone]:
    """The micro build, whose params.yaml comes back as it was."""
    kept = (micro.path / "params.yaml").read_text()
    rows = [{"prompt": f"Name {n}", "chosen": f"It is {n}.", "rejected": f"{n} or not"} for n in range(100, 160)]
    (micro.path / PAIRS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield micro
    (micro.path / "params.yaml").write_text(kept)


def settings(clone: Clone, **sections: Any) -> None:
    yaml, path = YAML(), clone.path / "params.yaml"
    values = yaml.load(path)
    for section, changes in sections.items():
        values[section].update(changes)
    yaml.dump(values, path)


def side(clone: Clone, method: str, **env: str) -> str:
    return clone.run(sys.executable, "-m", "athanor", "side", method, **env).stdout


def test_our_export_is_tuned_and_exported(clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_and_exported(clone, OWN, "lora", tmp_path, monkeypatch)
    assert "Running stage" not in side(clone, "tune")


@pytest.mark.parametrize(("base", "training"), CASES)
def test_a_base_is_tuned_and_exported(
    clone: Clone, base: str, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_and_exported(clone, base, training, tmp_path, monkeypatch)


@pytest.mark.parametrize("training", ["dpo", "grpo"])
@pytest.mark.parametrize("base", [OWN, *THEIRS])
def test_by_trl(clone: Clone, base: str, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="pip install -r requirements-side.txt")
    trained_and_exported(clone, base, training, tmp_path, monkeypatch)


def trained_and_exported(
    clone: Clone, base: str, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = training if training in ("dpo", "grpo") else "tune"
    if base != OWN:
        from tests.tuning import tiny

        monkeypatch.chdir(tmp_path)
        tiny.make_base(base)
        shutil.rmtree(clone.path / "theirs", ignore_errors=True)
        shutil.copytree("base", clone.path / "theirs")
        settings(clone, side={"base": "theirs"})
    settings(clone, **TRAININGS[training])
    said = side(clone, method)
    assert "before" in said and f"models/{method}-export" in said
    out = clone.path / f"models/{method}-export"
    trained = read_json(clone.path / f"metrics/{method}.json")
    assert trained["before"] != trained["after"] and trained["steps"] > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "hf")
    assert transformers.AutoTokenizer.from_pretrained(out / "hf").chat_template
    assert base in (OWN, model.config.model_type)
    assert (out / "model.gguf").is_file() and "before" in (out / "MODEL_CARD.md").read_text()
    lora = TRAININGS[training].get("side", {}).get("method") != "full"
    assert (out / "adapter/adapter.gguf").is_file() == lora == (out / "adapter/adapter_model.safetensors").is_file()


def test_two_processes_train_as_one(clone: Clone) -> None:
    """The recipe of the preset lora-mi50, at a tiny size: fp32, eager attention, recomputed activations, DDP by gloo."""
    settings(clone, side={"precision": "fp32", "attention": "eager", "checkpointing": True})
    settings(clone, tune={"rows_per_step": 8, "rows_at_once": 2, "epochs": 0.02})
    losses = []
    for processes in (1, 2):
        (clone.path / "machine.yaml").write_text(f"launch: {{processes: {processes}}}\nparallel: ddp\n")
        clone.run(sys.executable, "-m", "athanor", "side", "tune", "--force")
        losses.append(read_json(clone.path / "metrics/tune.json")["after"]["val_loss"])
        shutil.rmtree(clone.path / ".athanor/slots/tune")
    (clone.path / "machine.yaml").unlink()
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
