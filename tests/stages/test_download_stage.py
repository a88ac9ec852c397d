"""The download stage as a whole: its outputs, its manifests, its gates, and that it repeats to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from athanor.artifacts import read_json, read_manifest, verify_files
from athanor.corpus.conversations import read_conversations, read_items
from athanor.corpus.documents import read_documents
from athanor.errors import GateError, InputError, Interrupted
from athanor.pipeline.run import Run
from stages import download

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ("data/raw", "data/instruct", "data/battery")
LIMITS = {"text_column": "text", "max_document_bytes": 100_000, "min_chars": 1, "min_documents": 1, "min_bytes": 1}


def params():
    files = {"type": "files", "name": "notes", "kind": "prose", "license": "CC0-1.0", "globs": ["corpus/*.md"]}
    hub = {"type": "huggingface", "name": "web", "kind": "web", "license": "MIT", "dataset": "./set", "config": None}
    hub |= {"split": "train", "revision": None, "skip_documents": 0, "max_documents": None, "max_bytes": None}
    chats = {"type": "messages", "name": "chats", "files": "chats.jsonl", "hub_id": None, "hub_config": None}
    chats |= {"revision": None, "hub_split": "train", "column": "messages", "max_rows": 9, "min_rows": 1}
    chats |= {"license": "CC0-1.0"}
    exercises = {"type": "exercises", "name": "exercises", "categories": {"comparison": 30, "http_status": 20}}
    return {
        "download": {
            "val_fraction": 0.3,
            "sources": [files | LIMITS, hub | LIMITS | {"checkpoint_documents": 7}],
        },
        "instruct": {
            "seed": 1,
            "val_fraction": 0.2,
            "sources": [
                exercises | {"multi_turn_rows": 5, "system_fraction": 0.1},
                {"type": "identity", "name": "identity", "repeats": 3, "min_rows": 20},
                chats,
            ],
        },
        "battery": {"seed": 1, "held_out_fraction": 0.2, "categories": {"comparison": 5, "http_status": 5}},
    }


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)

    def make(name="one"):
        folder = tmp_path / name
        (folder / "corpus").mkdir(parents=True)
        (folder / "set").mkdir()
        for package in ("athanor", "stages"):
            (folder / package).symlink_to(ROOT / package)
        for number in range(9):
            (folder / "corpus" / f"{number}.md").write_text(f"# Note {number}\n\nSome text.\n")
        pq.write_table(pa.table({"text": [f"page {number}" for number in range(40)]}), folder / "set" / "a.parquet")
        row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
        (folder / "chats.jsonl").write_text(json.dumps(row) + "\n")
        return folder

    return make


def execute(folder, monkeypatch, values, stop=False):
    monkeypatch.chdir(folder)
    YAML().dump(values, folder / "params.yaml")
    run = Run("download", "stages.download")
    if stop:
        run.on_signal()
    download.run(run)
    run.finish()


def content(folder):
    paths = [path for output in OUTPUTS for path in (folder / output).rglob("*")] + [folder / "metrics/download.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_outputs_manifests_and_determinism(workspace, monkeypatch):
    first, second = workspace("one"), workspace("another/place")
    execute(first, monkeypatch, params())
    execute(second, monkeypatch, params())
    made = content(first)
    assert made == content(second)
    assert not any(str(first).encode() in data for data in made.values())
    assert sorted(made) == sorted(
        ["data/raw/manifest.json", "data/raw/notes.parquet", "data/raw/web.parquet", "data/battery/items.jsonl"]
        + ["data/battery/manifest.json", "data/instruct/manifest.json", "data/instruct/exercises.jsonl"]
        + ["data/instruct/identity.jsonl", "data/instruct/chats.jsonl", "metrics/download.json"]
    )
    for output, kind in zip(OUTPUTS, ("raw", "instruct", "battery"), strict=True):
        read_manifest(first / output, kind, 1)
        verify_files(first / output)
    raw = read_json(first / "data/raw/manifest.json")
    documents = list(read_documents(first / "data/raw/notes.parquet"))
    assert raw["counts"]["notes"]["documents"] == len(documents) == 9
    assert raw["counts"]["notes"]["bytes"] == sum(len(document.text.encode()) for document in documents)
    sides = {side: sum(document.split == side for document in documents) for side in ("train", "val")}
    assert sides == {side: raw["counts"]["notes"][side]["documents"] for side in sides}
    assert raw["sources"]["web"]["license"] == "MIT" and raw["sources"]["web"]["rows_read"] == 40
    metrics = read_json(first / "metrics/download.json")
    rows = [row for path in (first / "data/instruct").glob("*.jsonl") for row in read_conversations(path)]
    assert metrics["conversations"] == len(rows) and metrics["documents"] == 49
    assert metrics["battery"] == {"comparison": 5, "http_status": 5}
    assert len(list(read_items(first / "data/battery/items.jsonl"))) == 10
    assert read_json(first / "metrics/runs/download.json")["facts"]["notes_seconds"] >= 0


def test_interrupted_then_resumed_is_uninterrupted(workspace, monkeypatch):
    whole, parts = workspace("whole"), workspace("parts")
    execute(whole, monkeypatch, params())
    with pytest.raises(Interrupted):
        execute(parts, monkeypatch, params(), stop=True)
    assert not (parts / "data/raw").exists()
    execute(parts, monkeypatch, params())
    assert content(parts) == content(whole)


def test_changed_local_data_set_is_read_again(workspace, monkeypatch):
    folder = workspace()
    execute(folder, monkeypatch, params())
    pq.write_table(pa.table({"text": ["another page"]}), folder / "set" / "a.parquet")
    execute(folder, monkeypatch, params())
    assert [document.text for document in read_documents(folder / "data/raw/web.parquet")] == ["another page"]


@pytest.mark.parametrize(
    ("section", "number", "change", "error", "message"),
    [
        ("download", 0, {"min_documents": 10}, GateError, "'notes' gave 9 documents, its minimum is 10"),
        ("download", 1, {"min_bytes": 10_000}, GateError, "'web' gave .* bytes, its minimum is 10,000"),
        ("download", 0, {"globs": ["corpus/*.txt"]}, InputError, r"corpus/\*.txt: no file matches"),
        ("download", 1, {"dataset": "./gone"}, InputError, "./gone: no such directory"),
        ("instruct", 1, {"min_rows": 5000}, GateError, "'identity' gave .* conversations, its minimum is 5,000"),
    ],
)
def test_a_source_that_fails_fails_the_stage_and_leaves_the_old_outputs(
    workspace, monkeypatch, section, number, change, error, message
):
    folder = workspace()
    execute(folder, monkeypatch, params())
    before = content(folder)
    values = params()
    values[section]["sources"][number] |= change
    with pytest.raises(error, match=message):
        execute(folder, monkeypatch, values)
    assert content(folder) == before
    assert sorted(path.name for path in (folder / "data").iterdir()) == ["battery", "instruct", "raw"]


def test_battery_question_in_a_chat_file_fails_the_stage(workspace, monkeypatch):
    folder = workspace()
    execute(folder, monkeypatch, params())
    item = next(read_items(folder / "data/battery/items.jsonl"))
    row = {"messages": [{"role": "user", "content": item.prompt[-1].content}, {"role": "assistant", "content": "x"}]}
    (folder / "chats.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(GateError, match="battery held out.*'chats'"):
        execute(folder, monkeypatch, params())
