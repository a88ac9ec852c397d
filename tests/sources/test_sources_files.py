"""Local files: every format, every compression, every defect told with its place."""

from __future__ import annotations

import glob
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from athanor.base.artifacts import sha256_file
from athanor.base.errors import GateError, InputError, ParamsError
from athanor.base.strict import build
from athanor.runtime.executor import Executor
from athanor.sources import file_tasks, select
from athanor.sources.params import DownloadParams
from athanor.sources.raw_shards import RawWriter, check_size
from athanor.text import globs
from athanor.text.documents import Document, ShardWriter, read_documents, read_sources, split_of, write_shards
from tests.sources.world import json_lines, read, source

TEXTS = ["one\n\ntwo  \r\n\tthree", "U+2028 \u2028 and <|doc|>", "é" * 10, "\ttab first"]


def jsonl(texts):
    return "".join(json.dumps({"text": text, "other": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt", "a.md.gz", "a.txt.zst"])
def test_texts_come_back_exactly(tmp_path, name):
    texts = TEXTS if "jsonl" in name or "parquet" in name else TEXTS[:1]
    data = jsonl(texts) if "jsonl" in name else texts[0].encode()
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts, "x": [1] * len(texts)}), tmp_path / name)
    else:
        packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get((tmp_path / name).suffix, lambda raw: raw)(data)
        (tmp_path / name).write_bytes(packed)
    found = read(tmp_path / "*")
    assert [document.text for document in found] == texts
    assert [document.meta for document in found] == [{"file": name, "row": row} for row in range(len(texts))]
    assert all(document.split == split_of(document.id, 0.5) for document in found)


def test_order_and_names_do_not_depend_on_where_the_files_lie(tmp_path):
    for folder in ("x", "y/deeper"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "b.txt").write_text("b")
        (tmp_path / folder / "sub" / "a.txt").write_text("a")
    first, second = (read(tmp_path / folder / "**" / "*.txt") for folder in ("x", "y/deeper"))
    assert first == second and [document.meta["file"] for document in first] == ["b.txt", "sub/a.txt"]
    doubled = read(tmp_path / "x" / "**" / "*.txt", str(tmp_path / "x" / "b.txt"))
    assert len(doubled) == 2


def test_a_line_of_fifty_megabytes(tmp_path):
    text = "a long line " * 4_400_000
    (tmp_path / "big.jsonl").write_bytes(jsonl([text, "small"]))
    found = read(tmp_path / "big.jsonl", max_document_bytes=64 << 20, max_chars=None)
    assert [document.text for document in found] == [text, "small"]
    with pytest.raises(InputError, match=r"big.jsonl:1: a document is larger than max_document_bytes \(1,048,576\)"):
        read(tmp_path / "big.jsonl", max_document_bytes=1 << 20)
    (tmp_path / "big.txt").write_text(text)
    assert read(tmp_path / "big.txt", max_document_bytes=64 << 20, max_chars=None)[0].text == text
    with pytest.raises(InputError, match="big.txt: a document is larger"):
        read(tmp_path / "big.txt", max_document_bytes=1 << 20)


def test_size_limit_is_exact_and_escapes_do_not_count(tmp_path):
    json_lines(tmp_path / "a.jsonl", [{"text": "\x00" * 100}])
    assert len(read(tmp_path / "a.jsonl", max_document_bytes=100)[0].text) == 100
    with pytest.raises(InputError, match="larger"):
        read(tmp_path / "a.jsonl", max_document_bytes=99)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"x" * 100)
    assert read(tmp_path / "a.txt", max_document_bytes=100)[0].text == "x" * 100
    with pytest.raises(InputError, match="larger"):
        read(tmp_path / "a.txt", max_document_bytes=99)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"fine\nfine\nbad \xff\n", r"a.txt:3: not valid UTF-8 \(byte 0xff\)"),
        (
            "a.txt",
            "Käse".encode("latin-1"),
            r"a.txt:1: .*byte 0xe4.*encoding: cp1252 .* if «Käse» is right, encoding: cp850 if «Kõse»",
        ),
        (
            "a.txt",
            "text".encode("utf-16-le"),
            r"a.txt: utf-16-le, not UTF-8.* encoding: utf-16-le for the source .* reads «text»",
        ),
        ("a.txt", b"PK\0\1", "a.txt:1: holds zero bytes: not text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl:2: not valid UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "a.jsonl:2: not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "a"}\n', "a.jsonl:2: column 'text' is missing.*found: body"),
        ("a.jsonl", b'{"text": 7}\n', "a.jsonl:1: column 'text' holds int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: column 'text' holds a lone surrogate \(U\+D800\)"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(jsonl(["a" * 99]), mtime=0)[:-9], "a.jsonl.gz: cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', "a.jsonl:2: the last line is not whole.*fetch the file again"),
        ("a.json", b'[{"text": "a"},\n {"text": "b"},\n {"te', r"a.json:3 \(item 3\): not valid JSON"),
        (
            "a.json",
            b'{"name": "app", "version": 1}',
            "a.json: column 'text' is missing.*found: name, version.*text_column: name",
        ),
        ("a.csv", b"q,a\n1,2\n", r"a.csv:1: column 'text' is missing.*found: a, q.*text_template"),
        ("a.csv", b'text,n\n"one,1\ntwo,2\n', "a.csv:2: not a row of a table.*twice"),
        ("a.csv", b"text,n\none,1,2\n", "a.csv:2: 3 fields, and the header has 2"),
        (
            "a.txt",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "a.txt: a Git LFS pointer.*git lfs pull",
        ),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        ("a.pdf", b"/annex/objects/SHA256E-s9--0.pdf\n", "a.pdf: a git-annex pointer.*git annex get"),
        ("a.xlsx", b"PK", r"a.xlsx: unknown file type '.xlsx'. Fix: save it as .csv"),
        ("a.jsonl.zst", b"no zstandard", "a.jsonl.zst: cannot be read"),
        ("a.parquet", b"PAR1 but no more", "a.parquet: cannot be read"),
    ],
)
def test_defects_are_told_with_their_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "*")


def test_a_folder_of_notes_as_it_is(tmp_path):
    """Byte order marks, Windows line ends, empty files, spaces and umlauts, hidden files, links within the folder."""
    notes = {
        "a.md": b"\xef\xbb\xbfmarked", "Über uns/b c.md": b"---\ntitle: x\n---\n\ntext", "d.markdown": b"one\r\ntwo",
        "empty.md": b"", ".hidden.md": b"h", ".git/x.md": b"h", ".obsidian/y.md": b"h", "z.png": b"\x00",
    }  # fmt: skip
    for name, data in notes.items():
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_bytes(data)
    patterns = [str(tmp_path / "notes" / "**" / f"*.{end}") for end in ("md", "markdown")]
    made, left_out = source(*patterns), []
    found = list(select.documents(made, globs.find(made.globs), 0.5, leave_out=left_out.append))
    texts = {document.meta["file"]: document.text for document in found}
    assert texts == {"a.md": "marked", "Über uns/b c.md": "---\ntitle: x\n---\n\ntext", "d.markdown": "one\r\ntwo"}
    assert left_out == ["short"]
    # Two loops would be walked for ever, each way through them another name of the same files.
    for name, target in {"loop": ".", "again": "Über uns/..", "Über uns/up": "..", "file.md": "a.md"}.items():
        (tmp_path / "notes" / name).symlink_to(target)
    names = [name for name, _ in globs.find(patterns)]
    assert names == ["a.md", "empty.md", "Über uns/b c.md", "d.markdown"]


def test_a_link_out_of_the_folder_is_not_followed_in_silence(tmp_path):
    """DVC does not look behind it, so a change there would re-run nothing."""
    for folder in ("notes", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.md").write_text("text")
    (tmp_path / "notes" / "out").symlink_to("../elsewhere")
    with pytest.raises(InputError, match=r"notes/out: a link to a folder: DVC would not see"):
        globs.find([str(tmp_path / "notes" / "**" / "*.md")])
    with pytest.raises(InputError, match=r"notes/out: a link to a folder"):
        globs.find([str(tmp_path / "notes" / "*" / "*.md")])
    assert [name for name, _ in globs.find([str(tmp_path / "notes" / "*.md")])] == ["notes.md"]
    assert [name for name, _ in globs.find([str(tmp_path / "notes" / "out" / "*.md")])] == ["elsewhere.md"]  # named


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "**/*", "**/*.md", "*/*.md", "a/**", "**/b/*.md", "**/**/c.md", "a/b/c.md", "[ab]/?.md", ".*/*.md"],
)
def test_globs_match_what_pythons_do(tmp_path, pattern):
    for name in ("x.md", "a/y.md", "a/b/c.md", "b/z.md", ".h/q.md", "a/.h.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    wanted = {Path(match) for match in glob.glob(str(tmp_path / pattern), recursive=True)}
    assert {path for _, path in globs.find([str(tmp_path / pattern)])} == {path for path in wanted if path.is_file()}


def test_a_folder_is_no_glob(tmp_path):
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(InputError, match=r"no file matches. Fix: it is a folder; .*/\*\*/\*.md"):
        globs.find([str(tmp_path)])


def test_questions_and_answers_by_template(tmp_path):
    asked = [{"q": "Why?", "a": "Because.", "x": 1}, {"q": "And?", "a": " "}, {"q": "{a}", "a": "braces"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, asked)))
    found = read(tmp_path / "a.jsonl", text_template="Q: {q}\n\nA: {a}")
    assert [document.text for document in found] == ["Q: Why?\n\nA: Because.", "Q: {a}\n\nA: braces"]
    with pytest.raises(InputError, match="a.jsonl:1: column 'b' is missing.*found: a, q, x"):
        read(tmp_path / "a.jsonl", text_template="{b}")
    with pytest.raises(ParamsError, match=r"sources\[0\].text_template: names no column"):
        source("a.jsonl", text_template="no column")


def write_source(raw, name, documents, **limits):
    with RawWriter(raw / name, limits["min_chars"]) as writer:
        for document in documents:
            writer.add(document)
    check_size(SimpleNamespace(**limits), name, writer.tally)
    return writer.tally


def test_gate_on_size_and_count_of_what_is_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["long enough", "no", "", "  \n        "]))
    documents = [Document(text, "mine", "prose", "MIT", "train") for text in ("long enough", "no", "", "  \n       ")]
    tally = write_source(tmp_path, "mine", documents, min_chars=5, min_documents=1, min_bytes=11)
    assert (tally.documents, tally.bytes, tally.left_out) == (1, 11, {"short": 3})
    assert [d.text for d in read_sources(tmp_path)] == ["long enough"]
    with pytest.raises(GateError, match=r"source 'mine' gave 1 documents, its minimum is 2 \(left out: 3 short\)"):
        write_source(tmp_path, "mine", documents, min_chars=5, min_documents=2, min_bytes=1)
    with pytest.raises(GateError, match="gave 11 bytes, its minimum is 12"):
        write_source(tmp_path, "mine", documents, min_chars=5, min_documents=1, min_bytes=12)
    with pytest.raises(GateError, match="gave 0 documents"):
        write_source(tmp_path, "empty", [], min_chars=1, min_documents=1, min_bytes=1)


def test_shards_hold_the_documents_in_order(tmp_path):
    documents = [Document(f"document {number}", "mine", "prose", "MIT", "train") for number in range(25)]
    with ShardWriter(tmp_path / "mine", shard_bytes=90) as writer:
        for document in documents:
            writer.add(document)
    assert write_shards(tmp_path / "again", documents, shard_bytes=90) == writer.count == 25
    names = [path.name for path in sorted((tmp_path / "mine").iterdir())]
    assert names == [f"{number:05d}.parquet" for number in range(len(names))] and len(names) > 2
    assert [d.text for d in read_sources(tmp_path)] == 2 * [d.text for d in documents]
    for name in names:
        assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_validation_gets_the_share_that_was_asked_for(share):
    splits = [split_of(f"module{number}", share) for number in range(20_000)]
    assert splits.count("val") / len(splits) == pytest.approx(share, rel=0.1)


def rows_of_repositories():
    """Rows as a code data set has them."""
    given = ["mit", ["MIT", "apache-2.0"], "GPL-3.0-only", "MIT OR GPL-2.0-only", None]
    given += [["MIT", "GPL-2.0-only"], "no SPDX ("]
    return [
        {"body": f"text of row {number}", "license": license, "stars": number, "lang": "en" if number != 1 else "de"}
        for number, license in enumerate(given)
    ]


def selection(**changes):
    return {"filters": [], "meta_columns": [], "license_column": None, "licenses": None} | changes


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_of_other_licences_are_counted_and_left_out(tmp_path, form):
    rows_ = rows_of_repositories()
    if form == "jsonl":
        json_lines(tmp_path / "a.jsonl", rows_)
    else:
        rows_ = [row for row in rows_ if not isinstance(row["license"], list)]
        pq.write_table(pa.Table.from_pylist(rows_), tmp_path / "a.parquet")
    chosen = selection(license_column="license", licenses=["MIT", "Apache-2.0"], meta_columns=["stars"])
    made = source(tmp_path / "*", text_column="body", select=chosen)
    left_out = []
    found = list(select.documents(made, globs.find(made.globs), 0.5, leave_out=left_out.append))
    expected = [(0, "MIT"), (1, "Apache-2.0 AND MIT"), (3, "MIT")]
    assert [(d.meta["stars"], d.license) for d in found] == [e for e in expected if form == "jsonl" or e[0] != 1]
    assert left_out == ["license"] * (len(rows_) - len(found))
    everything = source(tmp_path / "*", text_column="body", select=selection(license_column="license"))
    kept = list(select.documents(everything, globs.find(made.globs), 0.5))
    assert len(kept) == len(rows_) and {"unknown", "GPL-3.0-only"} < {d.license for d in kept}


def test_filters(tmp_path):
    json_lines(tmp_path / "a.jsonl", rows_of_repositories())

    def stars(*filters):
        chosen = selection(filters=list(filters), meta_columns=["stars"])
        made = source(tmp_path / "*", text_column="body", select=chosen)
        return [d.meta["stars"] for d in select.documents(made, globs.find(made.globs), 0.5)]

    none = {"min": None, "max": None, "one_of": None}
    assert stars(none | {"column": "stars", "min": 2.0, "max": 4.0}) == [2, 3, 4]
    assert stars(none | {"column": "lang", "one_of": ["en", "fr"]}, none | {"column": "stars", "max": 2.0}) == [0, 2]
    assert stars(none | {"column": "stars", "one_of": ["3"]}) == [3]
    assert stars(none | {"column": "lang", "min": 0.0}) == []  # text is in no range
    for bad in ({}, {"min": 1.0, "one_of": ["a"]}):
        with pytest.raises(ParamsError, match="set min, max or both, or one_of alone"):
            stars(none | {"column": "stars"} | bad)
    with pytest.raises(ParamsError, match="licenses: needs a license_column"):
        source("x", select=selection(licenses=["MIT"]))


def test_source_names_are_unique_and_usable():
    one = dict(vars(source("a.txt")))
    for other in ("mine", "Mine"):  # one file on a Mac
        with pytest.raises(ParamsError, match="two sources are named 'mine'"):
            build(DownloadParams, {"val_fraction": 0.1, "sources": [one, one | {"name": other}]}, "download")
    with pytest.raises(ParamsError, match="'a/b' is no usable file name"):
        build(DownloadParams, {"val_fraction": 0.1, "sources": [one | {"name": "a/b"}]}, "download")
    with pytest.raises(ParamsError, match="'all' means every source together"):
        build(DownloadParams, {"val_fraction": 0.1, "sources": [one | {"name": "all"}]}, "download")
    with pytest.raises(ParamsError, match="did you mean 'files'"):
        build(DownloadParams, {"val_fraction": 0.1, "sources": [one | {"type": "file"}]}, "download")


def test_files_are_read_by_tasks_that_change_nothing_but_where_shards_end(tmp_path, monkeypatch):
    for number in range(9):
        json_lines(tmp_path / f"{number}.jsonl", [{"text": f"text {number}.{row}"} for row in range(20)])
    (tmp_path / "3.jsonl").write_text("{torn\n")
    (tmp_path / "7.jsonl").write_text("{torn\n")

    def write(name, workers=1, **changes):
        made = source(tmp_path / "*.jsonl", **changes)
        tally, unreadable = file_tasks.write(made, globs.find(made.globs), 0.5, tmp_path / name, Executor(workers))
        files = sorted((tmp_path / name).iterdir())
        return tally, unreadable.counts, [d for path in files for d in read_documents(path)], [*map(sha256_file, files)]

    one = write("one", on_unreadable="skip")
    monkeypatch.setattr(file_tasks, "SHARD_BYTES", 600)
    two, alone = write("two", workers=2, on_unreadable="skip"), write("alone", on_unreadable="skip")
    assert one[:3] == two[:3] and two == alone and len(one[3]) == 1 and len(two[3]) > 3
    assert one[0].documents == 140 and one[0].left_out == {"unreadable": 2}
    with pytest.raises(InputError, match=r"2 of 9 files cannot be read: 2 not valid JSON \(.*3.jsonl:1, .*7.jsonl:1"):
        write("refused", workers=2)
