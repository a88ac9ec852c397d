"""The download stage as a whole: its outputs, its manifests, its gates, and that it repeats to the byte."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.base.artifacts import read_json, read_manifest, verify_files
from athanor.base.errors import GateError, InputError, Interrupted, ParamsError
from athanor.sources import holdout
from athanor.text.conversations import read_conversations, read_items
from athanor.text.documents import read_documents
from stages import download
from tests.stages.conftest import PARAMS, run_stage, settle

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ("data/raw", "data/instruct", "data/battery")
LIMITS = {"text_column": "text", "max_document_bytes": 100_000, "min_chars": 1, "min_documents": 1, "min_bytes": 1}
FOREIGN = {"filters": [], "meta_columns": [], "license_column": "license", "licenses": ["MIT"]}


def params():
    return {name: copy.deepcopy(PARAMS[name]) for name in ("download", "instruct", "battery")}


@pytest.fixture
def workspace(tmp_path):
    def make(name="one"):
        folder = tmp_path / name
        (folder / "corpus").mkdir(parents=True)
        for name_ in ("set", "empty", "torn"):
            (folder / name_).mkdir()
        (folder / "empty" / "a.md").write_text("")
        row = json.dumps({"text": "a text", "license": "GPL-3.0-only"})
        (folder / "torn" / "a.jsonl").write_text(f"{row}\n" * 9)
        (folder / "torn" / "b.jsonl").write_text(f"{row}\n{row[:9]}\n")
        for number in range(9):
            (folder / "corpus" / f"{number}.md").write_text(f"# Note {number}\n\nSome text.\n")
        pq.write_table(pa.table({"text": [f"page {number}" for number in range(40)]}), folder / "set" / "a.parquet")
        row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
        (folder / "chats.jsonl").write_text(json.dumps(row) + "\n")
        return folder

    return make


def execute(folder, monkeypatch, values, stop_after=None):
    settle(monkeypatch, folder)
    run_stage(download, values, stop_after)


def content(folder):
    paths = [path for output in OUTPUTS for path in (folder / output).rglob("*")] + [folder / "metrics/download.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def test_unreadable_files_end_the_stage_or_are_counted(workspace, monkeypatch, capsys):
    folder, values = workspace(), params()
    for name, data in {"bad.md": b"\xff", "worse.md": b"\0"}.items():
        (folder / "corpus" / name).write_bytes(data)
    with pytest.raises(InputError, match="2 of 11 files cannot be read: 1 holds zero bytes.*1 not valid UTF-8"):
        execute(folder, monkeypatch, values)
    values["download"]["sources"][0]["on_unreadable"] = "skip"
    execute(folder, monkeypatch, values)
    assert read_json("metrics/download.json")["sources"]["notes"]["left_out"] == {"unreadable": 2}
    facts = read_manifest("data/raw", "raw", 1)["sources"]["notes"]
    assert facts["unreadable"] == {"holds zero bytes: not text": 1, "not valid UTF-8": 1}
    assert "notes: files and rows left out, because they cannot be read: 1 holds zero bytes" in capsys.readouterr().err


def test_no_source_is_fetched_before_all_were_opened(workspace, monkeypatch):
    folder, values = workspace(), params()
    values["download"]["sources"].append(values["download"]["sources"][1] | {"name": "last", "text_column": "body"})
    with pytest.raises(InputError, match=r"download.sources\[2\] \(last\): .*column 'body' is missing"):
        execute(folder, monkeypatch, values)
    assert not (folder / ".athanor" / "slots").exists()


def test_outputs_manifests_and_determinism(workspace, monkeypatch):
    first, second = workspace("one"), workspace("another/place")
    execute(first, monkeypatch, params())
    execute(second, monkeypatch, params())
    made = content(first)
    assert made == content(second)
    assert not any(str(first).encode() in data for data in made.values())
    assert sorted(made) == sorted(
        ["data/raw/manifest.json", "data/raw/notes/00000.parquet", "data/raw/web/00000.parquet"]
        + ["data/battery/items.jsonl", "data/battery/manifest.json"]
        + ["data/instruct/manifest.json", "data/instruct/exercises.jsonl"]
        + ["data/instruct/identity.jsonl", "data/instruct/chats.jsonl", "metrics/download.json"]
    )
    for output, kind in zip(OUTPUTS, ("raw", "instruct", "battery"), strict=True):
        read_manifest(first / output, kind, 1)
        verify_files(first / output)
    raw = read_json(first / "data/raw/manifest.json")
    documents = list(read_documents(first / "data/raw/notes/00000.parquet"))
    assert raw["counts"]["notes"]["documents"] == len(documents) == 9
    assert raw["counts"]["notes"]["bytes"] == sum(len(document.text.encode()) for document in documents)
    expected = holdout.expected(documents, params()["download"]["val_fraction"])
    assert 0 < expected == raw["counts"]["notes"]["val"]["bytes"]
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
        execute(parts, monkeypatch, params(), stop_after=1)
    assert not (parts / "data/raw").exists()
    execute(parts, monkeypatch, params())
    assert content(parts) == content(whole)


def test_changed_local_data_set_is_read_again(workspace, monkeypatch):
    folder = workspace()
    execute(folder, monkeypatch, params())
    pq.write_table(pa.table({"text": ["another page"]}), folder / "set" / "a.parquet")
    execute(folder, monkeypatch, params())
    assert [document.text for document in read_documents(folder / "data/raw/web/00000.parquet")] == ["another page"]


@pytest.mark.parametrize(
    ("section", "number", "change", "error", "message"),
    [
        ("download", 0, {"min_documents": 10}, GateError, "'notes' gave 9 documents, its minimum is 10"),
        ("download", 1, {"min_bytes": 10_000}, GateError, "'web' gave .* bytes, its minimum is 10,000"),
        ("download", 0, {"globs": ["corpus/*.txt"]}, InputError, r"corpus/\*.txt: no file matches"),
        ("download", 1, {"dataset": "./gone"}, InputError, "./gone: no such directory"),
        ("download", 0, {"globs": ["empty/*.md"]}, GateError, "'notes' gave 0 documents, .*left out: 1 short"),
        ("download", 0, {"globs": ["torn/*.jsonl"]}, InputError, "torn/b.jsonl:2: not valid JSON"),
        ("download", 0, {"globs": ["torn/a.jsonl"], "select": FOREIGN}, GateError, "0 documents.*left out: 9 license"),
        ("download", 1, {"dataset": "owner/name"}, ParamsError, r"\[1\].revision: .*not pinned. Fix: .*athanor pin"),
        ("instruct", 2, {"files": None, "hub_id": "owner/chats"}, ParamsError, "owner/chats is not pinned"),
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


def test_rows_of_ones_own_that_are_not_taught_are_told(workspace, monkeypatch, capfd):
    folder, values = workspace(), params()
    turns = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}] for n in range(20)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    for fraction in (0.2, 0.0):
        values["instruct"]["val_fraction"] = fraction
        execute(folder, monkeypatch, values)
        rows = [json.loads(line) for line in (folder / "data/instruct/chats.jsonl").read_text().splitlines()]
        held_out = sum(row["split"] == "val" for row in rows)
        told = f"chats: {held_out} of {len(rows)} conversations are held out"
        assert (held_out > 0) == (fraction > 0) == (told in capfd.readouterr().err)


def test_a_drawn_question_that_ones_own_conversations_teach_is_not_asked_any_more(workspace, monkeypatch, capfd):
    folder = workspace()
    execute(folder, monkeypatch, params())
    items = list(read_items(folder / "data/battery/items.jsonl"))
    row = {
        "messages": [{"role": "user", "content": items[0].prompt[-1].content}, {"role": "assistant", "content": "x"}]
    }
    (folder / "chats.jsonl").write_text(json.dumps(row) + "\n")
    execute(folder, monkeypatch, params())
    assert list(read_items(folder / "data/battery/items.jsonl")) == items[1:]
    assert "1 questions of the battery are taught by your own conversations" in capfd.readouterr().err


def test_items_written_by_hand_join_the_battery(workspace, monkeypatch):
    folder, values = workspace(), params()
    (folder / "battery").mkdir()
    row = {"category": "own", "kind": "format", "prompt": "Is ice cold? Yes or no.", "accepted": ["Yes"]}
    row |= {"rejected": ["No", "Yes, it is"], "checks": ["yes_no Yes"], "difficulty": "easy"}
    (folder / "battery" / "own.jsonl").write_text(json.dumps(row) + "\n")
    values["battery"]["written"] = "battery/own.jsonl"
    execute(folder, monkeypatch, values)
    (item,) = [item for item in read_items("data/battery/items.jsonl") if item.category == "own"]
    assert (item.origin, item.split, item.checks, item.difficulty) == ("written", "test", ("yes_no Yes",), "easy")
    assert read_json("metrics/download.json")["battery"] == {"comparison": 5, "http_status": 5, "own": 1}
    talk = {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "Yes"}]}
    (folder / "chats.jsonl").write_text(json.dumps(talk) + "\n")
    with pytest.raises(GateError, match="battery held out.*'chats'"):
        execute(folder, monkeypatch, values)
    (folder / "battery" / "own.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="own.jsonl:1"):
        execute(folder, monkeypatch, values)
