from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from athanor.base.artifacts import manifest_digest, read_json, read_manifest, sha256_file, verify_files, write_manifest
from athanor.base.errors import GateError, InputError
from athanor.cleaning import writing
from athanor.runtime import presets, run
from athanor.text.documents import Document, read_documents, read_sources, split_of, write_shards
from stages import clean
from tests.cleaning.world import write_scorer
from tests.runtime.shard_toy import until
from tests.runtime.test_cluster import ray_env, raylet, two_nodes, with_ray  # noqa: F401
from tests.stages.conftest import QUESTION, run_stage, settle, write_battery

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the of and to in is that it with as on be at by this had from they not but which have one you were".split()
FIRST, LAST = ("gar", "win", "let", "ket", "mor", "kit", "sum"), ("den", "dow", "ter", "tle")
WORDS += [first + last for first in FIRST for last in LAST]


def page(seed: int) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(10)) + "\n"


def function(seed: int) -> str:
    names = random.Random(seed).sample([w for w in WORDS if len(w) > 4], 5)
    a, b, c, d, e = names
    head = f"def {a}_{seed}({b}, {c}):\n\t{d} = {b} + {seed}\n    \n"
    return head + f"\tif {d} > {c}:\n\t\treturn [{e} for {e} in {d}]\n\treturn None\n"


def sources() -> dict[str, list[Document]]:
    pages = [page(seed) for seed in range(40)]
    texts = [*pages, pages[0], pages[1].upper(), "Too short.", f"{page(90)}{QUESTION}\n{page(91)}"]
    texts.append(page(92).replace("\n", "\r\n"))
    docs = [Document(text, "docs", "prose", "MIT", split_of(text, 0.2), {"n": n}) for n, text in enumerate(texts)]
    code = [Document(t, "code", "code", "MIT", split_of(t, 0.2), {}) for t in map(function, range(40))]
    return {"docs": docs, "code": code}


def write_raw(raw: dict[str, list[Document]]) -> None:
    Path("data/raw").mkdir(parents=True, exist_ok=True)
    for name, documents in raw.items():
        write_shards(f"data/raw/{name}", documents, 6000)
    write_manifest("data/raw", kind="raw", version=1, counts=dict.fromkeys(raw, {}))


@pytest.fixture
def world(tmp_path, monkeypatch):
    settle(monkeypatch, tmp_path)
    write_raw(sources())
    write_battery(tmp_path)
    write_scorer(Path("models/classifiers"))
    set_params()
    return tmp_path


def set_params(**dedup) -> None:
    section = presets.values(ROOT / "presets" / "micro.yaml")["clean"]
    section["dedup"] = dedup
    for rules in section["rules"].values():  # the classifiers of these tests know nothing
        rules["min_quality"] = None
    with open("params.yaml", "w", encoding="utf-8") as file:
        YAML().dump({"clean": section}, file)


def test_a_battery_that_drops_the_same_text_changes_nothing_downstream(world):
    """A corrected answer takes its question out of the battery; pretraining then ran once more on the same text."""
    run_stage(clean)
    before = manifest_digest("data/clean")
    items = Path("data/battery/items.jsonl")
    row = json.loads(items.read_text().splitlines()[0])
    asked = {
        "id": "f" * 16,
        "prompt": [{"role": "user", "content": "Is a question that no document of these holds here?"}],
    }
    items.write_text(items.read_text() + json.dumps({**row, **asked}) + "\n")
    write_manifest("data/battery", kind="battery", version=1, counts={"items": 2})
    run_stage(clean)
    assert manifest_digest("data/clean") == before


def test_outputs_describe_each_other(world):
    run_stage(clean)
    verify_files("data/clean")
    manifest, metrics = read_manifest("data/clean", "clean", 1), read_json("metrics/clean.json")
    parents = {"raw": "data/raw", "classifiers": "models/classifiers"}
    assert manifest["parents"] == {name: manifest_digest(path) for name, path in parents.items()}
    files = {"train": list(read_sources("data/clean/train")), "val": list(read_documents("data/clean/val.parquet"))}
    for split, documents in files.items():
        for source in ("docs", "code"):
            mine = [d for d in documents if d.source == source]
            size = sum(len(d.text.encode()) for d in mine)
            assert manifest["counts"][split][source] == {"documents": len(mine), "bytes": size}
            assert {d.split for d in mine} == {split}
    dropped = pq.read_table("data/clean/dropped.parquet").to_pylist()
    raw = {d.id: d for documents in sources().values() for d in documents}
    assert {row["id"] for row in dropped} <= set(raw)
    rules = {row["rule"] for row in dropped}
    assert rules == set(metrics["sources"]["docs"]["dropped_documents"])
    assert {"evaluation_item", "too_few_words"} <= rules and any("duplicate" in rule for rule in rules)
    rows = read_json("data/clean/manifest.json")["funnel"]
    with open("plots/clean_funnel.tsv", encoding="utf-8") as file:
        shown = [(row["source"], row["step"]) for row in csv.DictReader(file, delimiter="\t")]
    assert shown == [(row["source"], row["step"]) for row in rows if row["step"] not in ("in", "out")]
    for source, documents in sources().items():
        count = {row["step"]: int(row["documents"]) for row in rows if row["source"] == source}
        assert count.pop("in") == len(documents)
        assert count.pop("out") + sum(count.values()) == len(documents)
    leaked = {"by_category": {"facts": 1}, "documents": 1, "items": 1, "ngrams_shared_by_items": 0}
    assert metrics["contaminated"] == leaked
    assert metrics["duplicates"]["found"] == 0


def test_code_leaves_byte_for_byte_and_in_order(world):
    run_stage(clean)
    train = [d.text for d in read_sources("data/clean/train") if d.source == "code"]
    val = [d.text for d in read_documents("data/clean/val.parquet") if d.source == "code"]
    kept = train + val
    assert sorted(kept) == sorted(d.text for d in sources()["code"])
    order = [d.text for d in sources()["code"] if d.split == "train"]
    assert train == order


def files_of(*folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    return {path.as_posix(): sha256_file(path) for path in sorted(paths)}


RESULTS = ("data/clean", "plots")


def test_any_number_of_workers_gives_the_same_bytes(world, monkeypatch):
    """And what is older than its inputs is not made anew for that."""
    monkeypatch.setenv("ATHANOR_WORKERS", "1")
    run_stage(clean)
    first = files_of(*RESULTS)
    assert len([name for name in first if name.startswith("data/clean/train/docs/")]) > 1
    Path("data/raw/code/00000.parquet").touch()
    shutil.rmtree(".athanor")
    monkeypatch.setenv("ATHANOR_WORKERS", "2")
    monkeypatch.setattr(run, "MIN_BYTES_PER_WORKER", 1)
    run_stage(clean)
    assert files_of(*RESULTS) == first


def test_killed_at_any_shard_and_resumed_gives_the_same_bytes(world):
    """SIGKILL after each number of finished shards; what was finished is not done again."""
    run_stage(clean)
    first = files_of(*RESULTS)
    shutil.rmtree(".athanor")
    command = [sys.executable, "-c", KILLED, str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATHANOR_WORKERS": "1"}
    kills = 0
    while (code := subprocess.run(command, env=environment, capture_output=True).returncode) == -signal.SIGKILL:
        kills += 1
        assert kills < 100
    assert code == 0 and kills > 2
    assert files_of(*RESULTS) == first


# Dies in the middle of the seventh piece of work that it does.
KILLED = """
import os, signal, sys
from athanor.runtime import executor
from athanor.runtime import run
from athanor.runtime.run import Run
from stages import clean

done = 0
def dying(work, *rest, real=executor.run_task):
    def counted(task, out):
        global done
        done += 1
        found = work(task, out)
        if done == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    return real(counted, *rest)

executor.run_task = dying
clean.run(Run("clean", "stages.clean"))
"""


def test_another_threshold_finds_the_sweep_done(world):
    run_stage(clean)
    (sweep,) = Path(".athanor/slots/clean").glob("*/shards")
    before = files_of(str(sweep))
    stamps = {path: path.stat().st_mtime_ns for path in sweep.rglob("*.parquet")}
    set_params(near_duplicate_jaccard=0.9)
    run_stage(clean)
    assert files_of(str(sweep)) == before and stamps == {path: path.stat().st_mtime_ns for path in stamps}
    assert len(list(Path(".athanor/slots/clean").glob("*/DONE"))) == 3


def test_a_failed_run_leaves_the_earlier_output(world):
    run_stage(clean)
    before = manifest_digest("data/clean")
    raw = sources()
    raw["chat"] = [Document("Hi.", "chat", "qa", "MIT", "train", {})]
    write_raw(raw)
    with pytest.raises(GateError, match="source chat.*too_few_words"):
        run_stage(clean)
    assert manifest_digest("data/clean") == before
    assert not list(Path("data").glob(".clean*"))


def test_a_document_in_the_wrong_file_turns_the_gate_red(world, monkeypatch):
    real = writing.write_table

    def leaking(path, table):
        real(
            path,
            table.set_column(5, "split", pa.array(["val"] * len(table))) if path.name == "train.parquet" else table,
        )

    monkeypatch.setattr(writing, "write_table", leaking)
    with pytest.raises(GateError, match="splits stay apart"):
        run_stage(clean)


def test_a_lost_document_turns_the_gate_red(world, monkeypatch):
    real = writing.write_table
    monkeypatch.setattr(writing, "write_table", lambda path, table: real(path, table.slice(len(table) > 1)))
    with pytest.raises(GateError, match="funnel describes the files"):
        run_stage(clean)


def test_missing_and_broken_inputs_are_told(world):
    whole = Path("data/raw/docs/00000.parquet").read_bytes()
    Path("data/raw/docs/00000.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="00000.parquet: not a readable Parquet file"):
        run_stage(clean)
    Path("data/raw/docs/00000.parquet").write_bytes(whole)
    shutil.rmtree("data/raw/code")
    with pytest.raises(InputError, match="no shard of source code.*dvc repro download"):
        run_stage(clean)
    Path("data/battery/items.jsonl").write_text("")
    write_shards("data/raw/code", sources()["code"])
    with pytest.raises(InputError, match="the battery is empty"):
        run_stage(clean)
    Path("data/raw/manifest.json").unlink()
    with pytest.raises(InputError, match="file not found"):
        run_stage(clean)


@with_ray
def test_a_cluster_that_loses_a_machine_gives_the_same_bytes(world, two_nodes, monkeypatch):
    monkeypatch.setenv("ATHANOR_WORKERS", "1")
    run_stage(clean)
    first = files_of(*RESULTS)
    shutil.rmtree(".athanor")
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "ATHANOR_EXECUTOR": "ray", "RAY_ADDRESS": two_nodes.address}
    code = "from athanor.runtime.run import Run; from stages import clean; clean.run(Run('clean', 'stages.clean'))"
    with open("errors", "w", encoding="utf-8") as errors:
        job = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=errors, stderr=errors)
    second = psutil.Process(raylet(next(iter(two_nodes.worker_nodes))))
    try:
        until(lambda: any(Path(".athanor").rglob("shards/*/*/facts.json")) or job.poll(), "a shard is measured")
        for process in [second, *second.children(recursive=True)]:
            process.kill()
        assert not any(Path(".athanor").rglob("written/*/*/facts.json"))  # the machine was lost in the middle
        assert job.wait() == 0, Path("errors").read_text()
    finally:
        job.kill()
        job.wait()
    assert files_of(*RESULTS) == first
