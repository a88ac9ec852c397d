from __future__ import annotations

import csv
import dataclasses
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from athanor.artifacts import manifest_digest, read_json, read_manifest, sha256_file, verify_files, write_manifest
from athanor.corpus import cleaning
from athanor.corpus.conversations import Item, Message, write_rows
from athanor.corpus.documents import Document, read_documents, split_of, write_documents
from athanor.errors import GateError, InputError
from athanor.params.strict import read_yaml
from athanor.pipeline.run import Run
from stages import clean

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "How many green apples did the old farmer sell at the market on the third Sunday in May?"
ITEM = Item("facts", (Message("user", QUESTION),), "exact", "twelve", ("twelve",), ("one", "two"))
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
        write_documents(f"data/raw/{name}.parquet", documents)
    write_manifest("data/raw", kind="raw", version=1, counts={})


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    write_raw(sources())
    Path("data/battery").mkdir()
    write_rows("data/battery/items.jsonl", [ITEM])
    write_manifest("data/battery", kind="battery", version=1, counts={"facts": 1})
    set_params()
    return tmp_path


def set_params(**dedup) -> None:
    section = read_yaml(ROOT / "presets" / "micro.yaml")["clean"]
    section["dedup"] |= dedup
    with open("params.yaml", "w", encoding="utf-8") as file:
        YAML().dump({"clean": section}, file)


def run_stage() -> None:
    clean.run(Run("clean", "stages.clean"))


def test_outputs_describe_each_other(world):
    run_stage()
    verify_files("data/clean")
    manifest, metrics = read_manifest("data/clean", "clean", 1), read_json("metrics/clean.json")
    assert manifest["parents"] == {"raw": manifest_digest("data/raw"), "battery": manifest_digest("data/battery")}
    files = {split: list(read_documents(f"data/clean/{split}.parquet")) for split in ("train", "val")}
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
    run_stage()
    kept = [d.text for s in ("train", "val") for d in read_documents(f"data/clean/{s}.parquet") if d.source == "code"]
    assert sorted(kept) == sorted(d.text for d in sources()["code"])
    order = [d.text for d in sources()["code"] if d.split == "train"]
    assert [d.text for d in read_documents("data/clean/train.parquet") if d.source == "code"] == order


def test_repeats_to_the_byte(world):
    files = ("data/clean/manifest.json", "metrics/clean.json", "plots/clean_funnel.tsv")
    run_stage()
    first = [sha256_file(path) for path in files]
    Path("data/raw/code.parquet").touch()
    run_stage()
    assert [sha256_file(path) for path in files] == first


def test_a_failed_run_leaves_the_earlier_output(world):
    run_stage()
    before = manifest_digest("data/clean")
    raw = sources()
    raw["chat"] = [Document("Hi.", "chat", "qa", "MIT", "train", {})]
    write_raw(raw)
    with pytest.raises(GateError, match="source chat.*too_few_words"):
        run_stage()
    assert manifest_digest("data/clean") == before
    assert not list(Path("data").glob(".clean*"))


def test_a_document_in_the_wrong_file_turns_the_gate_red(world, monkeypatch):
    real = cleaning.clean

    def leaking(*args):
        done = real(*args)
        return dataclasses.replace(done, train=[*done.train, done.val[0]], val=done.val[1:])

    monkeypatch.setattr(clean, "clean", leaking)
    with pytest.raises(GateError, match="splits stay apart"):
        run_stage()


def test_a_lost_document_turns_the_gate_red(world, monkeypatch):
    real = cleaning.clean
    monkeypatch.setattr(clean, "clean", lambda *args: dataclasses.replace(done := real(*args), train=done.train[1:]))
    with pytest.raises(GateError, match="funnel describes the files"):
        run_stage()


def test_missing_and_broken_inputs_are_told(world):
    Path("data/raw/docs.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="docs.parquet: not a readable Parquet file"):
        run_stage()
    for path in Path("data/raw").glob("*.parquet"):
        path.unlink()
    with pytest.raises(InputError, match="no source file is there.*dvc repro download"):
        run_stage()
    Path("data/raw/manifest.json").unlink()
    with pytest.raises(InputError, match="file not found"):
        run_stage()
