"""Ready corpora: what datatrove, Dask and Spark wrote is read where it lies, as if it had been copied."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from athanor.base.artifacts import read_manifest, sha256_file, write_json, write_manifest
from athanor.base.errors import GateError, InputError
from athanor.base.strict import build
from athanor.cli.data.read import Corpus
from athanor.runtime.executor import Executor
from athanor.sources import ready
from athanor.sources.fetch import Fetcher
from athanor.sources.params import CorpusSource, DownloadParams
from athanor.text.documents import Document, ShardWriter, read_documents, read_sources
from stages import clean
from tests.cleaning.world import write_scorer
from tests.stages.conftest import run_stage, settle, write_battery
from tests.stages.test_clean_stage import page, set_params

COMMON = {"kind": "prose", "license": "MIT", "name": "pages"}


def table(numbers: range, **more: list[Any]) -> dict[str, list[Any]]:
    return {"text": [page(number) for number in numbers], **more}


def lines(columns: dict[str, list[Any]]) -> bytes:
    rows_ = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return "".join(json.dumps(row) + "\n" for row in rows_).encode()


def write(path: Path, columns: dict[str, list[Any]], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, **options)
    else:
        packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(packed(lines(columns)))


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    """What Spark leaves: parts by language, markers, checksums, and nothing else that is a row."""
    folder = tmp_path / "spark [1]"  # a name with glob signs
    for number, language in enumerate(("de", "en", "en")):
        part = folder / f"lang={language}" / f"part-{number:05d}-c000.snappy.parquet"
        columns = table(range(20 * number, 20 * number + 20), score=[n / 20 for n in range(20)])
        write(part, columns, compression="snappy", row_group_size=6)
        part.with_name(f".{part.name}.crc").write_bytes(b"crc")
    for name in ("_SUCCESS", "_metadata", "_common_metadata", "_temporary/0/part-9.parquet", "lang=en/.hidden.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.fixture
def trove(tmp_path: Path) -> Path:
    """datatrove's writers: one file of each rank with text, id and metadata."""
    for rank, ending in enumerate(("jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "parquet")):
        numbers = range(20 * rank, 20 * rank + 20)
        more = {"id": [f"<{n}>" for n in numbers], "metadata": [{"url": f"u{n}", "score": n / 100} for n in numbers]}
        write(tmp_path / "trove" / f"{rank:05d}.{ending}", table(numbers, **more))
    return tmp_path / "trove"


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few documents, so that files fill several."""
    whole = ShardWriter.__init__
    monkeypatch.setattr(ShardWriter, "__init__", lambda self, folder, size=2500: whole(self, folder, size))
    monkeypatch.setattr(ready, "SHARD_BYTES", 2500)


def fetch(root: Path, values: dict[str, Any], val_fraction: float = 0.2, executor: Any = None) -> Any:
    """The tally of one source that was fetched to `root`/data/raw."""

    @contextlib.contextmanager
    def slot(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(path=root / "slot", mark_done=lambda: None)

    bar = contextlib.nullcontext(SimpleNamespace(update=lambda amount: None))
    place = lambda *_: slot()  # noqa: E731
    raw = root / "data" / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    fetcher = Fetcher(raw, val_fraction, lambda *_: bar, lambda: False, place, lambda **_: None, executor or Executor())
    source = build(DownloadParams, {"val_fraction": val_fraction, "sources": [values]}, "download").sources[0]
    assert fetcher.probe(source).disk > 0
    tally, facts = fetcher.fetch(source, None)[source.name]
    write_manifest(raw, kind="raw", version=1, counts={source.name: vars(tally)}, sources={source.name: facts})
    return tally


def corpus(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"type": "corpus", "folder": str(folder), **COMMON, **changes}


def documents(root: Path) -> list[Document]:
    return list(read_sources(root / "data" / "raw"))


def copied(root: Path, folder: Path, *globs: str) -> Any:
    globs = globs or ("**/*.parquet",)
    values = {"type": "files", "globs": [f"{folder}/{glob}" for glob in globs], "max_chars": None, **COMMON}
    return fetch(root, values)


def test_in_place_is_as_copied_and_nothing_of_the_text_is_written(spark, tmp_path, small_shards):
    (spark / "_temporary/0/part-9.parquet").unlink()
    tallies = copied(tmp_path / "copy", spark), fetch(tmp_path / "place", corpus(spark))
    assert tallies[0] == tallies[1] and tallies[0].val["documents"] > 0
    assert documents(tmp_path / "place") == documents(tmp_path / "copy")
    assert len(documents(tmp_path / "place")) == 60
    shards = sorted((tmp_path / "place/data/raw/pages").iterdir())
    assert len(shards) > 10 and all("text" not in pq.read_schema(path).names for path in shards)
    assert max(len(list(read_documents(path))) for path in shards) <= 6


def test_the_cleaned_corpus_is_the_same_and_every_text_is_found_again(spark, tmp_path, monkeypatch):
    (spark / "_temporary/0/part-9.parquet").unlink()
    write(spark / "lang=fr/part-9.parquet", {"text": ["Too short.", page(0), page(7).upper()], "score": [1.0] * 3})
    kept = {}
    for name, make in (("copy", copied), ("place", lambda root, folder: fetch(root, corpus(folder)))):
        (tmp_path / name).mkdir()
        settle(monkeypatch, tmp_path / name)
        make(tmp_path / name, spark)
        write_battery(tmp_path / name)
        write_scorer(Path("models/classifiers"))
        set_params()
        run_stage(clean)
        train = list(read_sources("data/clean/train"))
        kept[name] = (
            train,
            list(read_documents("data/clean/val.parquet")),
            read_manifest("data/clean", "clean", 1)["counts"],
        )
        found = Corpus(Path.cwd())
        dropped = [ref for ref, *_ in found.ids() if ref.file == found.dropped]
        assert "Too short." in [entry.text for entry in found.entries(dropped)]
        texts = [
            batch["text"][0].as_py() for file in found.raw_files("pages") for _, batch in found.batches(file, ["text"])
        ]
        assert page(0) in texts
    assert kept["place"] == kept["copy"] and len(kept["copy"][0]) > 30


def test_rows_are_selected_by_folders_and_by_nested_columns(spark, trove, tmp_path):
    filters = [{"column": "lang", "one_of": ["en"]}, {"column": "score", "min": 0.5}]
    tally = fetch(tmp_path / "a", corpus(spark, select={"filters": filters, "meta_columns": ["lang"]}))
    assert tally.left_out == {"filters": 40} and tally.documents == 20
    assert {document.meta["lang"] for document in documents(tmp_path / "a")} == {"en"}
    select = {"filters": [{"column": "metadata.score", "min": 0.5}], "meta_columns": ["metadata", "metadata.url"]}
    assert fetch(tmp_path / "b", corpus(trove, select=select)).documents == 50
    found = documents(tmp_path / "b")
    assert [document.text for document in found] == [page(number) for number in range(50, 100)]
    assert found[0].meta["metadata"] == {"url": "u50", "score": 0.5} and found[0].meta["metadata.url"] == "u50"
    assert ready.partitions_of("a=1/b=x%2Fy/c=__HIVE_DEFAULT_PARTITION__/d=01/e.parquet") == {
        "a": 1, "b": "x/y", "c": None, "d": "01"
    }  # fmt: skip


def test_json_lines_of_every_kind_in_shards_that_begin_anywhere(trove, tmp_path, small_shards):
    (trove / "00000.jsonl").write_bytes(b"\n" + (trove / "00000.jsonl").read_bytes().replace(b"\n", b"\n\n"))
    assert fetch(tmp_path, corpus(trove)).documents == 100
    assert [document.text for document in documents(tmp_path)] == [page(number) for number in range(100)]
    assert len(list((tmp_path / "data/raw/pages").iterdir())) > 20


def test_small_files_share_a_shard_and_the_bytes_do_not_depend_on_the_workers(trove, tmp_path, monkeypatch):
    size = 2 * (trove / "00000.jsonl").stat().st_size
    monkeypatch.setattr(ready, "SHARD_BYTES", size)  # of text on disk: how many tasks there are
    made = []
    for workers in (1, 2):
        fetch(tmp_path / str(workers), corpus(trove), executor=Executor(workers))
        folder = tmp_path / str(workers) / "data/raw/pages"
        made.append({path.name: sha256_file(path) for path in folder.iterdir()})
    assert made[0] == made[1] and 1 < len(made[0]) < 5


def test_only_files_that_changed_are_indexed_again(trove, tmp_path, small_shards):
    done: list[str] = []

    class Counting(Executor):
        def __call__(self, work, tasks, folder, **options):
            done[:] = [task["files"][0][0] for name, task in tasks.items() if not (folder / name).exists()]
            return super().__call__(work, tasks, folder, **options)

    fetch(tmp_path, corpus(trove), executor=Counting())
    assert len(done) == 5
    write(trove / "00001.jsonl.gz", table(range(500, 503)))
    fetch(tmp_path, corpus(trove), executor=Counting())
    assert done == ["00001.jsonl.gz"] and len(documents(tmp_path)) == 83


def test_what_changed_or_went_after_it_was_indexed_is_named(spark, tmp_path):
    fetch(tmp_path, corpus(spark))
    part = spark / "lang=en/part-00002-c000.snappy.parquet"
    whole = part.read_bytes()
    write(part, table(range(40, 60), score=[0.0] * 20))
    with pytest.raises(
        InputError, match=r"part-00002\S* row 1: changed after it was indexed. Fix: .*dvc repro -f -s down"
    ):
        documents(tmp_path)
    size = len(whole)
    line = lines(table(range(3)))
    write(spark / "same.jsonl", table(range(3)))
    part.write_bytes(whole)
    (spark / "_temporary").rename(tmp_path / "gone")
    fetch(tmp_path, corpus(spark))
    assert len(documents(tmp_path)) == 63 and part.stat().st_size == size
    (spark / "same.jsonl").write_bytes(line.replace(b"the", b"teh"))  # of the same size
    with pytest.raises(InputError, match=r"same.jsonl:1: changed after it was indexed"):
        documents(tmp_path)
    (spark / "same.jsonl").write_bytes(line)
    part.unlink()
    with pytest.raises(InputError, match=r"part-00002\S*: a file of a ready corpus cannot be read \(No such file"):
        documents(tmp_path)


def test_what_is_wrong_is_told_before_a_row_is_indexed(spark, trove, tmp_path):
    def opened(folder: Path, **changes: Any) -> None:
        ready.probe(build(CorpusSource, corpus(folder, **changes), "download.sources[0]"))

    with pytest.raises(InputError, match="no such folder. Fix: correct folder"):
        opened(tmp_path / "none")
    write_json(tmp_path / "empty/_SUCCESS", 1)
    (tmp_path / "empty/notes.csv").write_text("a,b")
    with pytest.raises(InputError, match="none of 1 files holds rows. Fix: name a folder of .parquet"):
        opened(tmp_path / "empty")
    with pytest.raises(InputError, match="column 'body' is missing"):
        opened(spark, text_column="body")
    with pytest.raises(GateError, match="gave 60 documents, its minimum is 61"):
        fetch(tmp_path, corpus(spark, min_documents=61))
    write(trove / "00009.jsonl", {"text": ["fine", 3]})
    with pytest.raises(InputError, match=r"00009.jsonl:2: column 'text' holds int"):
        fetch(tmp_path / "b", corpus(trove))
