"""Each preset that needs the hub, from end to end at a thousandth of its size, on stand-ins of its data sets.

The data sets lie on a hub of this machine under their own names, configs and commits, with the layout and the columns of
the real ones (hub.yaml). What is no amount (columns, filters, rules, shares, gates, rates) is the preset's own. Amounts
that would be nothing at a thousandth have a least value here, and so has the model.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import read_json
from athanor.runtime import presets
from tests.e2e import hub
from tests.e2e.clone import ROOT, STAGES, commit, make_clone

SCALE = 1000
# The least that an amount shrinks to, by section and key.
LEAST: dict[str, dict[str, int]] = {
    "download": {"max_bytes": 1, "min_bytes": 1, "min_documents": 1},
    "instruct": {"max_rows": 60, "min_rows": 1, "multi_turn_rows": 40, "*": 30},
    "battery": {"*": 4},
    "classifiers": {"sample_bytes": 1_500_000},
    "clean": {"duplicate_check_documents": 50},
    "tokenizer": {"vocab_size": 1024, "sample_bytes": 1_000_000, "check_bytes": 50_000},
    "shard": {"train_tokens": 1, "cooldown_tokens": 1, "shard_tokens": 100_000},
    "sft_data": {"max_supervised_tokens": 1},
    "pretrain": {"validation_max_bytes": 10_000},
    "sft": {"validation_max_conversations": 60},
    "eval": {"bpb_max_bytes_per_source": 16_384},
}
SMALL: dict[str, dict[str, Any]] = {
    "download": {"val_fraction": 0.02},
    "model": {"vocab_size": None, "layers": 2, "dim": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn_dim": 128},
    "sft": {"batch_tokens": 1024},
    "eval": {"max_new_tokens": 24, "condition_items": 8},
    "export": {"parity_prompts": 10, "parity_new_tokens": 16, "parity_texts": 100, "parity_windows": 2},
}
CONTEXT, BATCH = 128, 2048


def scaled(value: Any, least: dict[str, int]) -> Any:
    """The amounts that `least` names, anywhere below, a thousandth of themselves."""
    if isinstance(value, list):
        return [scaled(item, least) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: max(item // SCALE, least[key])
        if key in least and isinstance(item, int)
        else scaled(item, {**least, **dict.fromkeys(item, least["*"])} if key == "categories" else least)
        for key, item in value.items()
    }


def small(name: str) -> dict[str, Any]:
    values = presets.values(ROOT / "presets" / f"{name}.yaml")
    for section, least in LEAST.items():
        values[section] = scaled(values[section], least)
    for section, changes in SMALL.items():
        values[section] |= changes
    pretrain = values["pretrain"]
    steps = max(pretrain["tokens"] // pretrain["batch_tokens"] // SCALE, 10)
    pretrain |= {"tokens": steps * BATCH, "batch_tokens": BATCH, "warmup_tokens": 2 * BATCH}
    pretrain |= dict.fromkeys(("validation_every_tokens", "sample_every_tokens"), steps // 3 * BATCH)
    values["model"]["context_tokens"] = values["sft_data"]["context_tokens"] = CONTEXT
    return values


def stand_ins(folder: Path, values: dict[str, Any]) -> None:
    """Every data set of the hub that the preset reads, somewhat more of it than is wanted."""
    download, instruct = values["download"], values["instruct"]["sources"]
    for source in (
        *download["sources"],
        *download.get("labels", ()),
        *instruct,
        *values["battery"].get("benchmarks", ()),
    ):
        name, rows = source.get("dataset") or source.get("hub_id"), source.get("max_rows", 60)
        if name:
            size = int(1.7 * (source.get("max_bytes") or source.get("min_bytes", 500 * rows)))
            config, split = (source.get(f"hub_{key}") or source.get(key) for key in ("config", "split"))
            split = split or ("test" if "question" in source else "train")
            hub.write(folder, name, config or "default", split, size, source["revision"])


@pytest.mark.parametrize("name", ["plasma-1.0", "plasma-1.1", "plasma-1.2", "lora-mi50"])
def test_a_preset_runs_from_end_to_end_at_a_thousandth_of_its_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, stages = small(name), set(STAGES)
    stand_ins(tmp_path / "hub", values)
    (tmp_path / "clone").mkdir()
    clone = make_clone(tmp_path / "clone")
    command = ["repro"]
    if theirs := values["side"]["base"] != "models/export/hf":
        from tests.tuning import tiny

        monkeypatch.chdir(tmp_path)
        tiny.make_base("llama", "bfloat16")
        shutil.copytree("base", clone.path / values["side"]["base"])
        values["tune"] |= {"context_tokens": 127, "rows_per_step": 4, "epochs": 0.2}
        values["sft_data"]["max_pad_share"] = 1.0
        command, stages = (
            ["side", "tune"],
            {"download", "clean", "train-classifiers", "tune-data", "tune", "tune-export"},
        )
    (clone.path / "params.yaml").write_text(json.dumps(values))
    commit(clone, name)
    with hub.serving(tmp_path / "hub") as address:
        home = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "ATHANOR_TRACKING": "off"}
        clone.run(sys.executable, "-m", "athanor", *command, timeout=1800, **home)
    done = {path.stem.replace("_", "-") for path in (clone.path / "metrics" / "runs").glob("*.json")}
    assert done == stages
    if not theirs:
        cleaned, trained = (
            read_json(clone.path / "metrics" / f"{stage}.json") for stage in ("clean", "train_classifiers")
        )
        assert {"quality_labelled_and_weak", "toxicity_labelled"} == set(trained)
        assert cleaned["contaminated"]["by_category"]["hellaswag"] > 0
