"""The hub source on a local data set: budgets, resuming, and errors told."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.base.artifacts import sha256_file
from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.base.strict import build
from athanor.base.work import stopping
from athanor.runtime.executor import Executor
from athanor.runtime.slots import Slot
from athanor.sources import hub_tasks, huggingface
from athanor.sources.fetch import Fetcher
from athanor.sources.params import HuggingFaceSource
from athanor.text.documents import read_documents
from tests.sources.world import json_lines


def source(dataset, **changes):
    values = dict(
        type="huggingface", name="hub", kind="web", license="MIT", dataset=str(dataset), revision=None,
        text_column="text", max_document_bytes=10_000, max_malformed_fraction=0.0,
        min_chars=1, min_documents=1, min_bytes=1,
    )  # fmt: skip
    return build(HuggingFaceSource, values | changes, "download.sources[0]")


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        texts = [f"document {number}.{row} " * (1 + row % 5) for row in range(40)]
        table = pa.table({"text": texts, "score": list(range(40))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=7)
    return folder


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(hub_tasks, "SHARD_BYTES", 700)
    monkeypatch.setattr(hub_tasks, "FIRST_WAVE", 2000)


def at(number):
    """Asks to stop when it is asked for this time."""
    calls = iter(range(1, 10**6))
    return lambda: next(calls) == number


class Fetched(NamedTuple):
    counts: dict
    rows: int
    documents: list
    files: dict

    @property
    def names(self):
        return [document.text.split()[1] for document in self.documents]


def fetch(made, folder, workers=1, stop=lambda: False):
    target = folder / "raw"
    shutil.rmtree(target, ignore_errors=True)
    with stopping(stop):
        tally, rows = hub_tasks.fetch(made, folder, 0.1, target, Executor(workers))
    paths = sorted(target.iterdir())
    documents = [document for path in paths for document in read_documents(path)]
    assert [path.name for path in paths] == [f"{n:05d}.parquet" for n in range(len(paths))]
    assert (tally.documents, tally.bytes) == (len(documents), sum(len(d.text.encode()) for d in documents))
    assert tally.val["documents"] == sum(d.split == "val" for d in documents)
    assert rows == tally.documents + sum(tally.left_out.values())
    return Fetched(asdict(tally), rows, documents, {path.name: sha256_file(path) for path in paths})


def interrupted(made, folder, *stops):
    for after in stops:
        with pytest.raises(Interrupted, match="run again to continue"):
            fetch(made, folder, stop=at(after))
    return fetch(made, folder)


CASES = [{}, {"max_bytes": 900}, {"max_documents": 77, "min_chars": 20}, {"skip_documents": 38, "max_documents": 9}]


@pytest.mark.parametrize("case", [*CASES, {"skip_documents": 5}, {"max_documents": 10**6, "max_bytes": 1800}])
@pytest.mark.parametrize("lines", [None, "*.jsonl"])
def test_the_corpus_is_that_of_reading_piece_after_piece(dataset, tmp_path, lines, case):
    """Workers, waves and stops decide nothing: the reference reads pieces one after another, document by document."""
    if lines:
        for path in dataset.glob("*.parquet"):
            json_lines(path.with_suffix(".jsonl"), pq.read_table(path).to_pylist())
    made = source(dataset, json_lines=lines, **case)
    pieces = []
    for number in range(3):
        texts = pq.read_table(dataset / f"{number}.parquet")["text"].to_pylist()
        pieces += [texts] if lines else [texts[first : first + 7] for first in range(0, 40, 7)]
    if hub_tasks.drawn(made):
        pieces = [pieces[number] for number in huggingface.piece_order("hub", len(pieces))]
    expected, budget = [], (case.get("max_documents", 10**9), case.get("max_bytes", 10**9))
    for text in [text for piece in pieces for text in piece][made.skip_documents :]:
        if len(expected) < budget[0] and sum(map(len, expected)) < budget[1] and len(text) >= made.min_chars:
            expected.append(text)
    whole = fetch(made, tmp_path / "whole")
    assert [document.text for document in whole.documents] == expected
    assert interrupted(made, tmp_path / "parts", 1, 12, 1) == whole
    assert lines or "skip_documents" in case or len(list((tmp_path / "whole/tasks").iterdir())) > 2
    for document in whole.documents:  # the meta names the row
        texts = pq.read_table((dataset / document.meta["file"]).with_suffix(".parquet"))["text"]
        assert texts[document.meta["row"]].as_py() == document.text


def test_two_workers_give_the_bytes_of_one(dataset, tmp_path):
    made = source(dataset, max_bytes=1800)
    assert fetch(made, tmp_path / "two", workers=2) == fetch(made, tmp_path / "one")


def test_sources_that_keep_little_fill_their_shards(tmp_path, monkeypatch):
    """Tasks grow by what the first of them kept, so that filters leave no crowd of tiny shards."""
    (tmp_path / "set").mkdir()
    table = pa.table({"text": [f"text {n} " * 3 for n in range(4000)], "score": [n % 10 for n in range(4000)]})
    pq.write_table(table, tmp_path / "set/a.parquet", row_group_size=10)
    keeps = {"filters": [{"column": "score", "min": 0.0, "max": 0.0}]}
    whole = fetch(source(tmp_path / "set", select=keeps), tmp_path / "work")
    sizes = [path.stat().st_size for path in (tmp_path / "work/raw").iterdir()]
    assert whole.counts["documents"] == 400 and whole.counts["bytes"] / len(sizes) > 350  # of 700; 70 without


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_part_is_fetched_again(dataset, tmp_path, damage, number, finished):
    """One flipped bit in a part once gave another corpus, and nobody was told."""
    made = source(dataset)
    whole = fetch(made, tmp_path / "parts")
    if not finished:
        (tmp_path / "parts/plan.json").unlink()
    part = sorted((tmp_path / "parts/tasks").glob("*/*.parquet"))[number]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.unlink()  # it is linked into the corpus
    if damage != "delete":
        part.write_bytes({"flip": data, "cut": data[:100]}[damage])
    before = {path: path.stat().st_ino for path in (tmp_path / "parts/tasks").glob("*/*.parquet")}
    assert fetch(made, tmp_path / "parts") == whole
    after = {path: path.stat().st_ino for path in (tmp_path / "parts/tasks").glob("*/*.parquet")}
    assert before.keys() | {part} == after.keys() and all(
        after[path] == before[path] for path in before if path != part
    )


def test_everything_in_order_and_once_fetched_no_data_set_is_needed(dataset, tmp_path):
    made = source(dataset)
    whole = fetch(made, tmp_path / "work")
    assert whole.rows == 120 and whole.names == [f"{number}.{row}" for number in range(3) for row in range(40)]
    for file in dataset.iterdir():
        file.unlink()
    assert fetch(made, tmp_path / "work") == whole


@pytest.mark.parametrize("lines", [None, "*.jsonl"])
def test_a_budget_is_drawn_from_all_over_the_set_whatever_interrupts(tmp_path, monkeypatch, lines):
    """It was the head of the data set: Wikipedia's oldest articles, one site's questions."""
    monkeypatch.setattr(hub_tasks, "SMALL_PIECE", 1)
    rows = [[{"text": f"text {file}.{row} " * 5} for row in range(50)] for file in range(20)]
    folder = json_set(tmp_path, *rows)
    for number in range(20 if lines is None else 0):
        (folder / f"{number}.jsonl").unlink()
        pq.write_table(pa.Table.from_pylist(rows[number]), folder / f"{number}.parquet", row_group_size=5)
    made = source(folder, json_lines=lines, max_bytes=sum(len(row["text"]) for file in rows for row in file) // 10)
    whole = fetch(made, tmp_path / "whole")
    assert interrupted(made, tmp_path / "parts", 1, 12, 23) == whole
    files, places = ({int(name.split(".")[part]) for name in whole.names} for part in (0, 1))
    assert len(set(whole.names)) == len(whole.names) and len(files) >= 10 and min(files) < 5 and max(files) >= 15
    assert lines or (min(places) < 15 and max(places) >= 35)


def test_another_min_chars_is_fetched_anew_and_another_minimum_is_not(dataset, tmp_path):
    bar = contextlib.nullcontext(SimpleNamespace(update=lambda amount: None))
    place = lambda name, module, inputs: Slot(tmp_path / "slots", inputs)  # noqa: E731
    fetcher = Fetcher(tmp_path / "raw", 0.1, lambda *_: bar, lambda: False, place, lambda **_: None, Executor())

    def fetched(**changes):
        shutil.rmtree(tmp_path / "raw", ignore_errors=True)
        tally, _ = fetcher.fetch(source(dataset, **changes), None)["hub"]
        return tally.documents, len(list((tmp_path / "slots").iterdir()))

    assert fetched(min_chars=30) == (72, 1)
    assert fetched(min_chars=30, min_documents=72) == (72, 1)
    assert fetched(min_chars=1) == (120, 2)


def test_jsonl_directory(tmp_path):
    folder = json_set(tmp_path, [{"text": f"row {row}"} for row in range(5)])
    assert fetch(source(folder), tmp_path / "work").rows == 5


def test_local_digest_follows_content(dataset):
    before = huggingface.local_digest(str(dataset))
    assert huggingface.local_digest(str(dataset)) == before
    assert huggingface.local_digest("owner/name") is None
    (dataset / "0.parquet").write_bytes(b"other")
    assert huggingface.local_digest(str(dataset)) != before


def test_errors_are_told(dataset, tmp_path):
    with pytest.raises(InputError, match="column 'body' is missing.*name one of: score, text"):
        fetch(source(dataset, text_column="body"), tmp_path / "a")
    with pytest.raises(InputError, match="no such directory"):
        fetch(source(tmp_path / "nowhere"), tmp_path / "b")
    with pytest.raises(InputError, match="split 'test'.*Fix: correct the split"):
        fetch(source(dataset, split="test"), tmp_path / "c")
    with pytest.raises(InputError, match="0.parquet row group 0: a document is larger than max_document_bytes"):
        pq.write_table(pa.table({"text": ["x" * (3 << 20)], "score": [1]}), dataset / "0.parquet")
        fetch(source(dataset, max_document_bytes=5), tmp_path / "d")


def test_a_torn_file_fails_the_source_and_keeps_progress(dataset, tmp_path):
    good = (dataset / "2.parquet").read_bytes()
    (dataset / "2.parquet").write_bytes(good[:8] + b"\0" * (len(good) // 2) + good[8 + len(good) // 2 :])
    with pytest.raises(InputError, match=r"set 2.parquet after \d+ rows: cannot be read.*run dvc repro again"):
        fetch(source(dataset), tmp_path / "work")
    finished = {path: path.stat().st_ino for path in (tmp_path / "work/tasks").glob("*/*.parquet")}
    assert len(finished) > 2
    (dataset / "2.parquet").write_bytes(good)
    assert fetch(source(dataset), tmp_path / "work").rows == 120
    assert all(path.stat().st_ino == node for path, node in finished.items())


def test_offline_and_gated(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="owner/name: the hub cannot be reached.*Fix: check the network"):
        huggingface.open_stream("owner/name", None, "train", "0" * 40, ["text"])

    class GatedRepoError(OSError):
        pass

    told = str(huggingface.explain(GatedRepoError("Access to dataset x is restricted"), "x", "train"))
    assert "gated" in told and "HF_TOKEN" in told


def test_a_missing_data_set_is_not_called_gated():
    """The client's message for it ends with advice on gated repositories, which was taken for the reason."""

    class RepositoryNotFoundError(OSError):
        pass

    advice = "404. Repository Not Found. If you try to access a private or gated repo, make sure you are authenticated"
    assert "cannot be found" in str(huggingface.explain(RepositoryNotFoundError(advice), "x", "train"))

    class GatedRepoError(RepositoryNotFoundError):
        pass

    assert "is gated" in str(huggingface.explain(GatedRepoError("401"), "x", "train"))


@pytest.mark.parametrize("revision", ["main", "v1.0", "0123abc", "G" * 40])
def test_hub_ids_need_a_commit(revision):
    with pytest.raises(ParamsError, match=r"revision: .*does not pin.*Fix: use the 40 hex digits"):
        source("owner/name", revision=revision)
    assert source("owner/name", revision="0" * 40).revision == "0" * 40


SCORED = {"filters": [{"column": "score", "min": 10.0, "max": 29.0}], "meta_columns": ["score"]}


def test_filtered_and_interrupted_is_uninterrupted(dataset, tmp_path):
    """Counts of what is left out survive interruption and damage as the documents do."""
    made = source(dataset, select=SCORED, min_chars=24)
    whole = fetch(made, tmp_path / "whole")
    scores = [document.meta["score"] for document in whole.documents]
    assert set(scores) <= set(range(10, 30)) and whole.rows == 120
    assert whole.counts["left_out"] == {"filters": 60, "short": 60 - len(scores)} and len(scores) < 60
    assert interrupted(made, tmp_path / "parts", 1, 27, 23) == whole


def json_set(tmp_path, *files):
    (tmp_path / "set").mkdir()
    for number, rows in enumerate(files):
        json_lines(tmp_path / "set" / f"{number}.jsonl", rows)
    return tmp_path / "set"


def test_columns_that_change_their_type_do_not_matter_to_json_lines(tmp_path):
    """The client library's reader casts all columns to those of the first file, and failed in the middle of a set."""
    numbers = [{"text": f"a{n} \u2028", "meta": n} for n in range(9)]
    objects = [{"text": f"b{n}", "meta": {"x": "y"}} for n in range(9)]
    folder = json_set(tmp_path, numbers, objects, [{"text": "c", "meta": "z", "new": [1]}])
    made = source(folder, json_lines="*.jsonl")
    fetched = interrupted(made, tmp_path / "work", 11)
    texts = [document.text for document in fetched.documents]
    assert texts == [f"a{n} \u2028" for n in range(9)] + [f"b{n}" for n in range(9)] + ["c"]
    with pytest.raises(InputError, match=r"\*.json.gz: no row was found.*Fix: correct json_lines"):
        fetch(source(folder, json_lines="*.json.gz"), tmp_path / "none")


def test_few_malformed_rows_are_counted_and_many_are_an_error(tmp_path):
    good = [{"text": f"row {n}"} for n in range(97)]
    folder = json_set(tmp_path, [*good[:50], {"text": 7}, "{broken", *good[50:], {"body": "x"}])
    made = source(folder, json_lines="*.jsonl", max_malformed_fraction=0.03)
    counts = fetch(made, tmp_path / "work").counts
    assert counts["documents"] == 97 and counts["left_out"] == {"malformed": 3}
    told = r"'hub': 3 of 100 rows are malformed, the first: .*row 51: column 'text' holds int"
    with pytest.raises(InputError, match=told):
        fetch(source(folder, json_lines="*.jsonl", max_malformed_fraction=0.029), tmp_path / "b")
    with pytest.raises(InputError, match=told):  # also of what was fetched under another tolerance
        fetch(source(folder, json_lines="*.jsonl", max_malformed_fraction=0.029), tmp_path / "work")
    with pytest.raises(InputError, match="1 of 51 rows are malformed"):  # none tolerated: at once
        fetch(source(folder, json_lines="*.jsonl"), tmp_path / "c")


def test_a_text_of_several_columns(tmp_path):
    rows = [{"title": "A {title}?", "answer": "Yes."}, {"title": "Without an answer", "answer": ""}]
    made = source(json_set(tmp_path, rows), text_column=None, text_template="Question: {title}\n\nAnswer: {answer}")
    fetched = fetch(made, tmp_path / "work")
    assert [document.text for document in fetched.documents] == ["Question: A {title}?\n\nAnswer: Yes."]
    assert fetched.counts["left_out"] == {"short": 1}
    with pytest.raises(ParamsError, match="exactly one of text_column and text_template"):
        source("./set", text_template="{text}")
    for template in ("no column", "{a} {", "{a!r}"):
        with pytest.raises(ParamsError, match="text_template: "):
            source("./set", text_column=None, text_template=template)


def test_a_source_that_gives_less_and_less_is_read_in_few_waves(tmp_path):
    """What the first pieces kept asked for a piece or two, a wave of their own, again and again."""
    (tmp_path / "set").mkdir()
    table = pa.table({"text": [f"text {n} " * 3 for n in range(8000)], "score": [int(n > 100) for n in range(8000)]})
    pq.write_table(table, tmp_path / "set/a.parquet", row_group_size=10)
    keeps = {"filters": [{"column": "score", "min": 0.0, "max": 0.0}]}
    waves = []

    def map_shards(work, tasks, folder, **options):
        waves.append(len(tasks))
        return Executor()(work, tasks, folder, **options)

    made = source(tmp_path / "set", skip_documents=1, select=keeps, max_documents=101)
    tally, _ = hub_tasks.fetch(made, tmp_path / "work", 0.1, tmp_path / "raw", map_shards)
    assert tally.documents == 100 and len(waves) < 60 < 800
