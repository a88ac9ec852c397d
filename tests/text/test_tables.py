"""Rows of CSV, TSV and JSON: as they are written by others, with what is bad in them left out alone."""

from __future__ import annotations

import gzip
import json

import pytest

from athanor.base.errors import InputError
from athanor.base.strict import build
from athanor.sources import messages, select
from athanor.sources.instruct_params import MessagesSource
from athanor.text import globs, tables
from tests.sources.world import chat, json_lines, read, source

ROWS = [{"text": "one\n\ntwo"}, {"text": 'a "b", c'}, {"text": "é；\tend"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", 'text,n\n"one\n\ntwo",1\n"a ""b"", c",2\n"é；\tend",3\n'),
        ("a.csv", '\ufeffn;text\r\n1;"one\n\ntwo"\r\n\r\n2;"a ""b"", c"\r\n3;é；\tend\r\n'),
        ("a.csv", 'sep=|\ntext|n\n"one\n\ntwo"|1\n"a ""b"", c"|2\né；\tend|3\n'),
        ("a.csv", 'n,text\r1,"one\n\ntwo"\r2,"a ""b"", c"\r3,é；\tend\r'),
        ("a.tsv", 'n\ttext\n1\t"one\n\ntwo"\n2\t"a ""b"", c"\n3\t"é；\tend"\n'),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2, ensure_ascii=False)),
        ("a.json", json.dumps({"version": 1, "data": ROWS})),
        ("a.json", "".join(json.dumps(row) + "\r\n" for row in ROWS)),
        ("a.jsonl", "\ufeff" + json.dumps(ROWS, indent=1)),
        ("a.json", "\n".join(json.dumps([row]) for row in ROWS)),
        ("a.csv", '"n, id, key";text\n1;"one\n\ntwo"\n2;"a ""b"", c"\n3;é；\tend\n'),
        ("a.tsv", 'text\n"one\n\ntwo"\n"a ""b"", c"\n"é；\tend"\n'),
        ("a.json.gz", json.dumps(ROWS)),
    ],
)
def test_rows_as_others_write_them(tmp_path, name, data):
    (tmp_path / name).write_bytes(gzip.compress(data.encode()) if name.endswith(".gz") else data.encode())
    assert [document.text for document in read(tmp_path / name)] == [row["text"] for row in ROWS]


def test_json_lines_in_a_json_file_are_never_held_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_WHOLE_BYTES", 2_000)
    json_lines(tmp_path / "a.json", [{"text": f"{n} " * 300} for n in range(20)])
    assert [document.text.split()[0] for document in read(tmp_path / "a.json")] == [str(n) for n in range(20)]


def test_tables_without_quotes_or_header(tmp_path):
    (tmp_path / "a.tsv").write_text('1\tHe said "no\t5\n2\t"Yes" is all\t6\n3\t"open\t7\n4\tlast"\t8\n')
    found = read(tmp_path / "a.tsv", text_column="2", select={"filters": [{"column": "3", "max": 7}]})
    assert [document.text for document in found] == ['He said "no', '"Yes" is all', '"open']


CUT = b'{"text": "a"}\n{"text": "b"}\n{"text": "c'
TORN = gzip.compress(b"".join(b'{"text": "%0900d"}\n' % (n**300 % 10**900) for n in range(999)))[:-2000]


@pytest.mark.parametrize(
    ("name", "data", "taken", "reason"),
    [
        ("a.jsonl", CUT, 2, "the last line is not whole"),
        ("a.jsonl", '{"text": "a"}\n{"text": "б"}\n{"text": "где-то"}'.encode()[:-5], 2, "the end is missing"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n{"text": 1}\n[]\n{"x": 1}\n{"text": "b"}\n', 2, "not a JSON object"),
        ("a.json", b'[{"text": "a"}, {"text": b}, {"text": "c"}, 7, {"text": "d"}, {"te', 3, "not valid JSON"),
        ("a.json", b'[{"text": "a"}, {"text": "b", "n": [{"i": 1}, {"i": 2}] "x": 1}, {"text": "c"}, {"text": "d"}]', 3, "not valid JSON"),
        ("a.csv", b'text,n\na,1\n"b,2\nc,3\nd,4,5\ne,6\n', 3, "not a row of a table"),
        ("a.csv", "text,n\na,1\nб,2\n".encode() + b"\xff,3\nd,4\n", 3, "not valid UTF-8"),
        ("a.jsonl", b'{"text": "' + b"x" * 2_000_000 + b'"}\n{"text": "b"}\n', 1, "a document is larger than max_document_bytes"),
        ("a.jsonl.gz", TORN, 900, "cannot be read after"),
        ("a.jsonl", CUT.decode().encode("utf-16")[:-1], 2, "not valid utf-16"),
    ],
)  # fmt: skip
def test_what_is_bad_is_left_out_alone(tmp_path, name, data, taken, reason):
    (tmp_path / name).write_bytes(data)
    made, errors = source(tmp_path / name, on_unreadable="skip", max_document_bytes=10_000), select.Unreadable()
    left_out: list[str] = []
    found = list(select.documents(made, globs.find(made.globs), 0.5, left_out.append, errors))
    assert len(found) >= taken and (taken == 900 or len(found) == taken)
    assert set(left_out) == {"malformed"} and len(errors.all) == len(left_out)
    assert any(error.what.startswith(reason) and error.where.startswith(str(tmp_path / name)) for error in errors.all)
    with pytest.raises(InputError, match="on_unreadable: skip"):
        read(tmp_path / name, max_document_bytes=10_000)


def test_a_file_without_one_good_row_and_one_of_another_kind_are_unreadable(tmp_path):
    json_lines(tmp_path / "a.jsonl", [{"x": 1}] * 3)
    json_lines(tmp_path / "b.jsonl", [{"x": 1}] * 3000 + [{"text": "a"}])
    json_lines(
        tmp_path / "c.jsonl", [{"text": "a"}] + [{"x": 1}] * 3000
    )  # read, as some of it is in the corpus already
    made, errors = source(tmp_path / "*", on_unreadable="skip"), select.Unreadable()
    left_out: list[str] = []
    assert len(list(select.documents(made, globs.find(made.globs), 0.5, left_out.append, errors))) == 1
    assert sorted(left_out) == ["malformed"] * 3000 + ["unreadable"] * 2


def talks(path, **changes):
    left_out: list[str] = []
    made = build(MessagesSource, {"type": "messages", "name": "talks", "files": str(path)} | changes, "x")
    found = messages.conversations(made, 0.0, leave_out=left_out.append)
    return [[message.content for message in each.messages] for each in found], left_out


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("qa.csv", "Frage;Antwort\nWer?;Übermorgen früh.\nWo?;7\n"),
        ("qa.tsv", "Antwort\tFrage\nÜbermorgen früh.\tWer?\n7\tWo?\n"),
        ("qa.json", '[{"Frage": "Wer?", "Antwort": "Übermorgen früh."}, {"Frage": "Wo?", "Antwort": "7"}]'),
    ],
)
def test_tables_of_questions_are_conversations(tmp_path, name, data):
    (tmp_path / name).write_text(data, encoding="utf-8")
    shape = {"shape": "prompt", "columns": ["Frage", "Antwort"]}
    assert (
        talks(tmp_path / name, **shape)
        == talks(tmp_path, **shape)
        == ([["Wer?", "Übermorgen früh."], ["Wo?", "7"]], [])
    )
    (tmp_path / name).write_text(data, encoding="cp1252")
    assert talks(tmp_path / name, encoding="cp1252", **shape)[0][0] == ["Wer?", "Übermorgen früh."]
    with pytest.raises(InputError, match="encoding: "):
        talks(tmp_path / name, **shape)


def test_one_bad_row_counts_and_does_not_stop_the_others(tmp_path):
    """A row without the column stopped everything, whatever `max_malformed_fraction`."""
    good = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]}
    json_lines(tmp_path / "a.jsonl", [good, {"id": "x7"}, good, '{"cut'])
    shape = {"shape": "conversations", "columns": ["conversations"]}
    assert talks(tmp_path / "a.jsonl", max_malformed_fraction=0.5, **shape) == (
        [["Hi?", "Hello."]] * 2,
        ["malformed"] * 2,
    )
    with pytest.raises(
        InputError, match=r"2 of 4 rows are malformed, the first: .*a.jsonl:2: column 'conversations' is missing"
    ):
        talks(tmp_path / "a.jsonl", max_malformed_fraction=0.4, **shape)


def test_a_system_column_is_the_system_message(tmp_path):
    """It was accepted and never read."""
    turns = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]
    own = [{"from": "system", "value": "Be long."}, *turns]
    rows_ = [
        {"conversations": turns, "system": "Be brief."},
        {"conversations": own, "system": "x"},
        {"conversations": turns},
    ]
    json_lines(tmp_path / "a.jsonl", rows_)
    found, _ = talks(tmp_path / "a.jsonl", shape="conversations", columns=["conversations"])
    assert found == [["Be brief.", "Hi?", "Hello."], ["Be long.", "Hi?", "Hello."], ["Hi?", "Hello."]]
    dropped = {"select": {"drop_system": True}}
    assert (
        talks(tmp_path / "a.jsonl", shape="conversations", columns=["conversations"], **dropped)[0]
        == [["Hi?", "Hello."]] * 3
    )


def test_the_other_shape_is_named(tmp_path):
    json_lines(tmp_path / "a.jsonl", [chat("Hi?", "Hello.")])
    with pytest.raises(
        InputError, match="none of 1 rows can be read, the first: .*has no 'from'. Fix: shape: messages"
    ):
        talks(tmp_path / "a.jsonl", shape="conversations", columns=["messages"])


def test_links_of_git_annex_are_told_with_what_brings_the_file(tmp_path):
    (tmp_path / "a.md").write_text("text")
    (tmp_path / "b.md").symlink_to(".git/annex/objects/x/SHA256E-s9--0.md")
    with pytest.raises(InputError, match=r"b\.md: a link of git-annex to a file that is not here. Fix: git annex get"):
        globs.find([f"{tmp_path}/*.md"])
