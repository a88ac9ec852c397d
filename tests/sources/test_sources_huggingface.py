"""The hub source on a local data set: budgets, resuming, and errors told."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from athanor.base.artifacts import sha256_file
from athanor.base.errors import InputError, Interrupted, ParamsError
from athanor.base.strict import build
from athanor.runtime.executor import Executor
from athanor.runtime.slots import Slot
from athanor.sources import huggingface
from athanor.sources.fetch import Fetcher
from athanor.sources.params import HuggingFaceSource
from athanor.text.documents import write_documents
from tests.sources.world import json_lines


def source(dataset, **changes):
    values = dict(
        type="huggingface", name="hub", kind="web", license="MIT", dataset=str(dataset), revision=None,
        text_column="text", max_document_bytes=10_000, max_malformed_fraction=0.0, checkpoint_documents=11,
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


def at(number):
    """Asks to stop when it is asked for this time."""
    calls = iter(range(1, 10**6))
    return lambda: next(calls) == number


def result(made, folder, tmp_path):
    path = tmp_path / "out.parquet"
    write_documents(path, huggingface.documents(folder))
    return sha256_file(path), [document.text.split()[1] for document in huggingface.documents(folder)]


def test_interrupted_and_resumed_is_uninterrupted(dataset, tmp_path):
    made = source(dataset, skip_documents=5, max_documents=100, min_chars=20)
    whole = huggingface.fetch(made, tmp_path / "whole", 0.1)
    for after in (1, 7, 23, 40):
        with pytest.raises(Interrupted, match="run again to continue"):
            huggingface.fetch(made, tmp_path / "parts", 0.1, stop=at(after))
    assert huggingface.fetch(made, tmp_path / "parts", 0.1) == whole
    assert result(made, tmp_path / "parts", tmp_path) == result(made, tmp_path / "whole", tmp_path)


def test_killed_between_part_and_state_repeats_that_part_only(dataset, tmp_path):
    made = source(dataset)
    huggingface.fetch(made, tmp_path / "whole", 0.1)

    class Killed(BaseException):
        pass

    def die(size, seen=[0]):  # noqa: B006  (counts calls)
        seen[0] += 1
        if seen[0] == 30:
            raise Killed

    with pytest.raises(Killed):
        huggingface.fetch(made, tmp_path / "parts", 0.1, tick=die)
    state = json.loads((tmp_path / "parts" / "state.json").read_text())
    assert state["rows"] == 22 and not state["done"]
    (tmp_path / "parts" / f"part-{len(state['parts']):05d}.parquet").write_bytes(b"torn")  # written, not yet counted
    with pytest.raises(InputError, match="not finished"):
        list(huggingface.documents(tmp_path / "parts"))
    huggingface.fetch(made, tmp_path / "parts", 0.1)
    assert result(made, tmp_path / "parts", tmp_path) == result(made, tmp_path / "whole", tmp_path)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("number", [0, 2, -1])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_part_and_what_follows_is_fetched_again(dataset, tmp_path, damage, number, finished):
    """One flipped bit in a part once gave another corpus, and nobody was told."""
    made = source(dataset)
    huggingface.fetch(made, tmp_path / "whole", 0.1)
    if finished:
        huggingface.fetch(made, tmp_path / "parts", 0.1)
    else:
        with pytest.raises(Interrupted):
            huggingface.fetch(made, tmp_path / "parts", 0.1, stop=at(71))
    part = sorted((tmp_path / "parts").glob("part-*.parquet"))[number]
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes({"flip": data, "cut": data[:100], "delete": b""}[damage])
    if damage == "delete":
        part.unlink()
    ticks = []
    assert huggingface.fetch(made, tmp_path / "parts", 0.1, tick=ticks.append)["documents"] == 120
    assert sum(ticks) == huggingface.fetch(made, tmp_path / "whole", 0.1)["bytes"]
    assert result(made, tmp_path / "parts", tmp_path) == result(made, tmp_path / "whole", tmp_path)


def test_everything_in_order_and_once_fetched_no_data_set_is_needed(dataset, tmp_path):
    made = source(dataset)
    counts = huggingface.fetch(made, tmp_path / "work", 0.1)
    _, names = result(made, tmp_path / "work", tmp_path)
    assert counts["documents"] == counts["rows"] == 120
    assert names == [f"{number}.{row}" for number in range(3) for row in range(40)]
    for file in dataset.iterdir():
        file.unlink()
    assert huggingface.fetch(made, tmp_path / "work", 0.1) == counts


def test_budgets_and_skip(dataset, tmp_path):
    counts = huggingface.fetch(source(dataset, max_bytes=500), tmp_path / "a", 0.1)
    sizes = [len(document.text) for document in huggingface.documents(tmp_path / "a")]
    assert counts["bytes"] == sum(sizes) >= 500 > sum(sizes[:-1])
    huggingface.fetch(source(dataset, skip_documents=38, max_documents=4), tmp_path / "b", 0.1)
    first, *_, last = huggingface.documents(tmp_path / "b")
    assert first.text.startswith("document 0.38") and last.text.startswith("document 1.1")
    assert first.meta == {"row": 38}


@pytest.mark.parametrize("lines", [None, "*.jsonl"])
def test_a_budget_is_drawn_from_all_over_the_set_whatever_interrupts(tmp_path, monkeypatch, lines):
    """It was the head of the data set: Wikipedia's oldest articles, one site's questions."""
    monkeypatch.setattr(huggingface, "SMALL_PIECE", 1)
    rows = [[{"text": f"text {file}.{row} " * 5} for row in range(50)] for file in range(20)]
    folder = json_set(tmp_path, *rows)
    for number in range(20 if lines is None else 0):
        (folder / f"{number}.jsonl").unlink()
        pq.write_table(pa.Table.from_pylist(rows[number]), folder / f"{number}.parquet", row_group_size=5)
    made = source(folder, json_lines=lines, max_bytes=sum(len(row["text"]) for file in rows for row in file) // 10)
    whole = huggingface.fetch(made, tmp_path / "whole", 0.1)
    for after in (1, 12, 23, 40):
        with pytest.raises(Interrupted):
            huggingface.fetch(made, tmp_path / "parts", 0.1, stop=at(after))
    assert huggingface.fetch(made, tmp_path / "parts", 0.1) == whole
    assert result(made, tmp_path / "parts", tmp_path) == result(made, tmp_path / "whole", tmp_path)
    names = result(made, tmp_path / "whole", tmp_path)[1]
    files, places = ({int(name.split(".")[part]) for name in names} for part in (0, 1))
    assert len(set(names)) == len(names) and len(files) >= 10 and min(files) < 5 and max(files) >= 15
    assert lines or (min(places) < 15 and max(places) >= 35)


def test_another_min_chars_is_fetched_anew_and_another_minimum_is_not(dataset, tmp_path):
    bar = contextlib.nullcontext(SimpleNamespace(update=lambda amount: None))
    place = lambda name, module, inputs: Slot(tmp_path / "slots", inputs)  # noqa: E731
    fetcher = Fetcher(tmp_path / "raw", 0.1, lambda *_: bar, lambda: False, place, lambda **_: None, Executor())

    def fetched(**changes):
        tally, _ = fetcher.fetch(source(dataset, **changes), None)["hub"]
        return tally.documents, len(list((tmp_path / "slots").iterdir()))

    assert fetched(min_chars=30) == (72, 1)
    assert fetched(min_chars=30, min_documents=72) == (72, 1)
    assert fetched(min_chars=1) == (120, 2)


def test_jsonl_directory(tmp_path):
    folder = json_set(tmp_path, [{"text": f"row {row}"} for row in range(5)])
    assert huggingface.fetch(source(folder), tmp_path / "work", 0.1)["documents"] == 5


def test_local_digest_follows_content(dataset):
    before = huggingface.local_digest(str(dataset))
    assert huggingface.local_digest(str(dataset)) == before
    assert huggingface.local_digest("owner/name") is None
    (dataset / "0.parquet").write_bytes(b"other")
    assert huggingface.local_digest(str(dataset)) != before


def test_errors_are_told(dataset, tmp_path):
    with pytest.raises(InputError, match="column 'body' is missing.*name one of: score, text"):
        huggingface.fetch(source(dataset, text_column="body"), tmp_path / "a", 0.1)
    with pytest.raises(InputError, match="no such directory"):
        huggingface.fetch(source(tmp_path / "nowhere"), tmp_path / "b", 0.1)
    with pytest.raises(InputError, match="split 'test'.*Fix: correct the split"):
        huggingface.fetch(source(dataset, split="test"), tmp_path / "c", 0.1)
    with pytest.raises(InputError, match="row 1: a document is larger than max_document_bytes"):
        huggingface.fetch(source(dataset, max_document_bytes=5), tmp_path / "d", 0.1)


def test_a_torn_file_fails_the_source_and_keeps_progress(dataset, tmp_path):
    good = (dataset / "2.parquet").read_bytes()
    (dataset / "2.parquet").write_bytes(good[:8] + b"\0" * (len(good) // 2) + good[8 + len(good) // 2 :])
    with pytest.raises(InputError, match=r"after (80|\d+) rows.*run dvc repro again to continue"):
        huggingface.fetch(source(dataset), tmp_path / "work", 0.1)
    state = json.loads((tmp_path / "work" / "state.json").read_text())
    assert state["rows"] == 77 and not state["done"]
    (dataset / "2.parquet").write_bytes(good)
    assert huggingface.fetch(source(dataset), tmp_path / "work", 0.1)["documents"] == 120


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
    whole = huggingface.fetch(made, tmp_path / "whole", 0.1)
    scores = [document.meta["score"] for document in huggingface.documents(tmp_path / "whole")]
    assert set(scores) <= set(range(10, 30)) and whole["rows"] == 120
    assert whole["left_out"]["filters"] == 60 and whole["left_out"]["short"] == 60 - len(scores) > 0
    for after in (1, 7, 23, 40):
        with pytest.raises(Interrupted, match="run again to continue"):
            huggingface.fetch(made, tmp_path / "parts", 0.1, stop=at(after))
    sorted((tmp_path / "parts").glob("part-*.parquet"))[1].unlink()
    assert huggingface.fetch(made, tmp_path / "parts", 0.1) == whole
    assert result(made, tmp_path / "parts", tmp_path) == result(made, tmp_path / "whole", tmp_path)


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
    made = source(folder, json_lines="*.jsonl", checkpoint_documents=4)
    with pytest.raises(Interrupted):
        huggingface.fetch(made, tmp_path / "work", 0.1, stop=at(11))
    assert huggingface.fetch(made, tmp_path / "work", 0.1)["documents"] == 19
    texts = [document.text for document in huggingface.documents(tmp_path / "work")]
    assert texts == [f"a{n} \u2028" for n in range(9)] + [f"b{n}" for n in range(9)] + ["c"]
    with pytest.raises(InputError, match=r"\*.json.gz: no row was found.*Fix: correct json_lines"):
        huggingface.fetch(source(folder, json_lines="*.json.gz"), tmp_path / "none", 0.1)


def test_few_malformed_rows_are_counted_and_many_are_an_error(tmp_path):
    good = [{"text": f"row {n}"} for n in range(97)]
    folder = json_set(tmp_path, [*good[:50], {"text": 7}, "{broken", *good[50:], {"body": "x"}])
    made = source(folder, json_lines="*.jsonl", max_malformed_fraction=0.03)
    counts = huggingface.fetch(made, tmp_path / "work", 0.1)
    assert counts["documents"] == 97 and counts["left_out"] == {"malformed": 3}
    told = r"'hub': 3 of 100 rows are malformed, the first: .*row 51: column 'text' holds int"
    with pytest.raises(InputError, match=told):
        huggingface.fetch(source(folder, json_lines="*.jsonl", max_malformed_fraction=0.029), tmp_path / "b", 0.1)
    with pytest.raises(InputError, match=told):  # also of what was fetched under another tolerance
        huggingface.fetch(source(folder, json_lines="*.jsonl", max_malformed_fraction=0.029), tmp_path / "work", 0.1)
    with pytest.raises(InputError, match="1 of 51 rows are malformed"):  # none tolerated: at once
        huggingface.fetch(source(folder, json_lines="*.jsonl"), tmp_path / "c", 0.1)


def test_a_text_of_several_columns(tmp_path):
    rows = [{"title": "A {title}?", "answer": "Yes."}, {"title": "Without an answer", "answer": ""}]
    made = source(json_set(tmp_path, rows), text_column=None, text_template="Question: {title}\n\nAnswer: {answer}")
    counts = huggingface.fetch(made, tmp_path / "work", 0.1)
    assert [d.text for d in huggingface.documents(tmp_path / "work")] == ["Question: A {title}?\n\nAnswer: Yes."]
    assert counts["left_out"] == {"short": 1}
    with pytest.raises(ParamsError, match="exactly one of text_column and text_template"):
        source("./set", text_template="{text}")
    for template in ("no column", "{a} {", "{a!r}"):
        with pytest.raises(ParamsError, match="text_template: "):
            source("./set", text_column=None, text_template=template)
