"""Planted secrets: a small run of tools/canaries.py, and that it does find what was not kept back."""

from __future__ import annotations

import base64
import gzip
import sqlite3
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tools import canaries
from tools.canaries import contents, forms


def test_planted_secrets_are_in_nothing_that_is_written(tmp_path, capsys):
    status = canaries.main(["--quick", str(tmp_path / "world")])
    said = capsys.readouterr().out
    assert status == 0 and " 0 found in " in said, said
    assert int(said.split()[0]) >= 40


LONG = "x" * 10_000


def _database(path, text):
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (a TEXT)")
    db.execute("INSERT INTO t VALUES (?)", (LONG + text + LONG,))
    db.commit()
    db.close()


WRITERS = {
    "plain": lambda path, text: path.write_text(text),
    "gzip": lambda path, text: path.write_bytes(gzip.compress(text.encode())),
    "zlib": lambda path, text: path.write_bytes(zlib.compress(text.encode())),
    "zstd": lambda path, text: path.write_bytes(zstandard.compress(b"first") + zstandard.compress(text.encode())),
    "parquet": lambda path, text: pq.write_table(pa.table({"a": [{"b": [text]}]}), path, compression="zstd"),
    "metadata": lambda path, text: pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"k": text}), path),
    "sqlite": _database,
}


@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("form", ["plain", "base64 0", "base64 1", "base64 2"])
def test_a_secret_is_found_in_every_form(tmp_path, how, form):
    planted = canaries.Planted()
    text = planted.new("one")
    if form != "plain":
        text = base64.b64encode(b"u" * int(form[-1]) + text.encode() + b":p").decode()
    path = tmp_path / "file"
    WRITERS[how](path, f"before {text} after")
    parts = list(contents(path, path.read_bytes()))
    assert any(secret in part for part in parts for secret in forms(planted.cores))
