"""The needs of the data path as functions of the text, and the limit that is met first."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from athanor.base.strict import build
from athanor.cli.plan.data_path import data_path
from athanor.runtime import presets
from athanor.runtime.schema import check_values
from athanor.sources.datapath import OPEN_FILES, Host, after_download, first_limit, needs, raw_disk, text_of
from athanor.sources.params import DownloadParams
from athanor.text.documents import SHARD_BYTES
from tests.sources.world import ROOMY

ALL = ("download", "train-classifiers", "clean", "train-tokenizer", "shard")


def test_twice_the_text_needs_twice_the_shards_files_disk_and_time_and_no_more_memory_of_a_worker() -> None:
    shards = {"a": 100, "b": 28}
    once, twice = (
        needs({name: n * count * SHARD_BYTES for name, count in shards.items()}, download_disk=n * 1e9) for n in (1, 2)
    )
    assert [need.stage for need in once] == list(ALL) and once[0].files == once[0].tasks == 128
    for small, large in zip(once, twice, strict=True):
        for name in ("files", "tasks", "disk", "work_disk", "cpu_seconds"):
            assert getattr(large, name) == pytest.approx(2 * getattr(small, name), rel=0.01), (small.stage, name)
        assert large.worker_memory == small.worker_memory
        documents = 128 * SHARD_BYTES / 2500
        assert 0 <= large.memory - small.memory <= 80 * documents, small.stage
    assert once[2].seconds(8) == pytest.approx(once[2].seconds(1) / 8)
    assert needs({"a": 1.0})[2].seconds(8) == needs({"a": 1.0})[2].seconds(1), "one shard is the work of one process"


def test_a_cache_that_copies_and_longer_ids_take_more_disk() -> None:
    text = {"a": 1e10}
    disk = lambda **how: sum(need.disk for need in needs(text, **{"download_disk": 4e9} | how))  # noqa: E731
    outputs = 0.4e10 + 0.4e10 + 2e10 / 4.2
    assert disk(copies=2) - disk() == pytest.approx(outputs, rel=0.02)
    assert disk(id_bytes=4) - disk() == pytest.approx(2 * 2e10 / 4.2, rel=0.02)
    assert disk(download_disk=0.0) == pytest.approx(disk() - 0.4e10)


@pytest.mark.parametrize(
    ("host", "named", "fix"),
    [
        (replace(ROOMY, disk=20e9), "clean needs 34.5 GB (disk), 20.0 GB are free", "free some space"),
        (replace(ROOMY, disk=5e9, memory=1e8), "download needs 0.9 GB (memory), 0.1 GB are free", "free some memory"),
        (replace(ROOMY, disk=5e9), "download needs 6.8 GB (disk)", "lower max_bytes"),
        (replace(ROOMY, workers=16, memory=4e9), "download needs 5.1 GB (memory)", "workers: 12 in machine.yaml"),
        (replace(ROOMY, memory=3e9), "train-tokenizer needs 6.9 GB", "lower sample_bytes of tokenizer"),
        (replace(ROOMY, open_files=64), f"download needs {OPEN_FILES + 8} open files", "ulimit -n 1024"),
        (replace(ROOMY, mappings=1000), "4,000 mappings (vm.max_map_count)", "sysctl -w vm.max_map_count=65530"),
        (replace(ROOMY, executor="ray", temporary=1e8), "download needs 1.0 GB", "export TMPDIR="),
    ],
)  # fmt: skip
def test_the_first_limit_is_named_with_what_to_type(host: Host, named: str, fix: str) -> None:
    path = needs({"web": 13e9, "wiki": 4e9}, download_disk=6.8e9, samples={"train-tokenizer": 400_000_000})
    limit = first_limit(path, host)
    assert limit.share > 1 and named in str(limit) and fix in limit.fix
    assert first_limit(path, ROOMY).share <= 1


def test_text_is_that_of_budgets_files_and_minima_and_of_what_is_to_come(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 5000)
    files = {"type": "files", "name": "notes", "globs": [str(tmp_path / "*.txt")]}
    hub = dict.fromkeys(("name", "kind"), "web") | dict.fromkeys(("min_chars", "min_documents", "min_bytes"), 1)
    hub |= {"type": "huggingface", "dataset": "a/b", "revision": "0" * 40, "license": "MIT", "text_column": "text"}
    sources = [files, hub | {"max_bytes": 10**10}, hub | {"name": "rest", "min_bytes": 10**9}]
    download = build(DownloadParams, {"val_fraction": 0.1, "sources": sources}, "download")
    assert text_of(download) == {"notes": 5000, "web": 1e10, "rest": 1e9}
    assert after_download(download, 1e9)[0].disk == 1e9
    assert after_download(download, 3e10)[0].files == pytest.approx(3e10 / SHARD_BYTES, abs=4)
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "part-0.jsonl").write_bytes(b"x" * 4000)
    corpus = {"type": "corpus", "name": "lake", "kind": "web", "license": "MIT", "folder": str(tmp_path / "ready")}
    with_index = build(DownloadParams, {"val_fraction": 0.1, "sources": [files, corpus]}, "download")
    assert text_of(with_index) == {"notes": 5000, "lake": 10_000}
    assert raw_disk(with_index, text_of(with_index)) == pytest.approx(0.4 * 5000 + 0.02 * 4000)
    (tmp_path / "a.txt").unlink()
    assert text_of(download)["notes"] == 1, "the stage says that no file matches"


@pytest.mark.parametrize(("name", "gigabytes"), [("plasma-1.0", 17), ("plasma-1.1", 58), ("plasma-1.2", 132)])
def test_a_plasma_preset_is_planned_at_its_real_size(name: str, gigabytes: float, tmp_path: Path) -> None:
    built = check_values(presets.values(Path("presets") / f"{name}.yaml"))
    path = data_path(tmp_path, built, ALL, 1, ROOMY)
    assert path is not None and path.is_shown and path.text_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert path.needs[0].files == pytest.approx(path.text_bytes / SHARD_BYTES, rel=0.01)
    assert 2 < sum(need.disk for need in path.needs) / path.text_bytes < 2.5
    assert all(need.memory < 9e9 and math.isfinite(need.seconds(2)) for need in path.needs)
    later = data_path(tmp_path, built, ("shard",), 1, ROOMY)
    assert later is not None and [need.stage for need in later.needs] == ["shard"]
    assert data_path(tmp_path, built, ("sft",), 1, ROOMY) is None
