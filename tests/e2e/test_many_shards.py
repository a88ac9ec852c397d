"""The data stages of each Plasma preset at its real number of shards, each shard a few documents of made text.

What grows with the number of shards (open files, mappings, tasks) is as large as in the real run, and what
grows with the text is not. Sources, kinds, rules, mixture and limits are the preset's own; the classifiers know nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from athanor.base.artifacts import read_json
from athanor.runtime import presets
from athanor.text.documents import SHARD_BYTES, shard_files
from tests.cleaning.world import write_scorer
from tests.e2e.clone import ROOT, make_clone
from tests.stages.conftest import write_battery
from tools.made_text import Made, make

MADE = Made(shard_bytes=1500, document_bytes=700, val_fraction=0.02)
STAGES = ("clean", "train_tokenizer", "shard")
OPEN_FILES = 256


def sized(name: str) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    """The preset's sections with what counts text made smaller, and the name, kind and shards of each source."""
    values = presets.values(ROOT / "presets" / f"{name}.yaml")
    real = {source["name"]: source.get("max_bytes") or source["min_bytes"] for source in values["download"]["sources"]}
    sources = [(s["name"], s["kind"], -(-real[s["name"]] // SHARD_BYTES)) for s in values["download"]["sources"]]
    scale = SHARD_BYTES / MADE.shard_bytes
    values["clean"]["dedup"] |= {"duplicate_check_documents": 50}
    values["tokenizer"] |= {"vocab_size": 1024, "sample_bytes": 1_000_000, "check_bytes": 20_000}
    for key in ("train_tokens", "cooldown_tokens", "shard_tokens"):
        values["shard"] |= {key: int(values["shard"][key] / scale)} if values["shard"].get(key) else {}
    return values, sources


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room: a task flushes a dozen small files to the disk, which takes longer than its work."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 2e9:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.mark.parametrize("name", ["plasma-1.0", "plasma-1.1", "plasma-1.2"])
def test_a_preset_at_its_number_of_shards_under_few_open_files(name: str, folder: Path) -> None:
    values, sources = sized(name)
    clone = make_clone(folder)
    make(folder / "data" / "raw", sources, MADE, 2)
    write_battery(folder)
    write_scorer(folder / "models" / "classifiers")
    (folder / "params.yaml").write_text(json.dumps(values))
    limited = ("bash", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "bash", sys.executable, "-m")
    for stage in STAGES:
        clone.run(*limited, f"stages.{stage}", timeout=1800, ATHANOR_WORKERS="2", ATHANOR_TRACKING="off")
    cleaned = shard_files(folder / "data" / "clean" / "train")
    assert all(len(cleaned[source]) > 0.9 * count for source, _, count in sources)
    sharded = read_json(folder / "metrics" / "shard.json")
    assert set(sharded["sources"]) == set(cleaned)
