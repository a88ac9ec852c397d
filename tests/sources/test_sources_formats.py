"""Files of a person's own: each kind that is read gives its text, and what cannot be read is told all at once."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from athanor.base.errors import InputError
from athanor.sources import select
from athanor.text import globs, rows
from tests.sources.world import read, source

PAGE = """<!DOCTYPE html><html><head><title>T</title><style>x {}</style><script>bad()</script></head><body>
<nav>menu</nav><div role="main"><h1>Heads<a class="headerlink" href="#x">¶</a></h1>
<p>One <b>bold</b> word, snake_case, and a <a href="https://host/secret">link</a>.</p><ul><li>first</li></ul>
<pre><code>def f(x):
    if x &lt; 1:
        return 1</code></pre></div><footer>foot</footer></body></html>"""
PAGE_TEXT = """# Heads

One **bold** word, snake_case, and a link.

- first

```
def f(x):
    if x < 1:
        return 1
```"""
CODE = "\tif x:\n\t\treturn 1\n"


def notebook(cells, **meta):
    made = [{"cell_type": kind, "source": source, "outputs": [{"data": "0" * 99}]} for kind, source in cells]
    return json.dumps({"cells": made, "metadata": meta, "nbformat": 4, "nbformat_minor": 5})


def pdf(*pages):
    """A PDF of one line of text on each page."""
    count = len(pages)
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(count))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {count}>>"]
    font = "<</Font<</F<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
    for number, text in enumerate(pages):
        stream = f"BT /F 12 Tf 72 700 Td ({text}) Tj ET"
        page = f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources{font}/Contents {4 + 2 * number} 0 R>>"
        objects += [page, f"<</Length {len(stream)}>>\nstream\n{stream}\nendstream"]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    head = f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n{table}trailer<</Size {len(places) + 1}/Root 1 0 R>>\n"
    return out + f"{head}startxref\n{len(out)}\n%%EOF".encode()


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.py", CODE, CODE),
        ("a.rs.gz", gzip.compress(CODE.encode()), CODE),
        ("Makefile", "all:\n\tmake\n", "all:\n\tmake\n"),
        ("a.rst", "Title\n=====\n\n.. code::\n\n   x\n", "Title\n=====\n\n.. code::\n\n   x\n"),
        ("a.html", PAGE, PAGE_TEXT),
        ("a.htm.zst", zstandard.compress(PAGE.encode()), PAGE_TEXT),
        ("a.html", "no tag", "no tag"),
        ("a.ipynb", notebook([("markdown", ["# T\n", "x"]), ("code", CODE), ("code", " ")]), f"# T\nx\n\n```python\n{CODE}\n```"),
        ("a.ipynb", notebook([("code", "'''```'''")], kernelspec={"language": "R"}), "````R\n'''```'''\n````"),
        ("a.pdf", pdf("First page", "second page"), "First page\nsecond page"),
    ],
)  # fmt: skip
def test_what_a_person_brings_is_read(tmp_path, name, data, text):
    """`kind: code` refused .py files; pages, notebooks and PDF had to be converted by hand."""
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    (document,) = read(tmp_path / "*", kind="code", select=None)
    assert document.text == text
    assert (document.source, document.kind, document.meta) == ("mine", "code", {"file": name, "row": 0})
    assert read(tmp_path / "*", kind="code") == [document]


BAD = {
    "a.html": (b"<p>\xff", "not valid UTF-8"),
    "b.ipynb": (b"{", "not a readable notebook"),
    "c.ipynb": (b'{"worksheets": []}', "not a notebook of format 4"),
    "d.pdf": (b"%PDF-1.4 and no more", "not a readable PDF"),
    "e.pdf": (pdf("", ""), "a PDF without text, perhaps scanned pages"),
    "f.docx": (b"PK", "not a readable archive"),
    "g.png": (b"PNG", "unknown file type '.png'"),
    "h.html": (b"<div>" * 3000, "not a readable page"),
    "i.py": (b"x = 1\0", "holds zero bytes: not text"),
    "j.jsonl": (b'{"text"\n', "not valid JSON"),
    "k.html": (b"<p>" + b"x" * 1000, "a document is larger than max_document_bytes"),
    "l.txt.zst": (zstandard.compress(random.Random(0).randbytes(900).hex().encode())[:-9], "cannot be read"),
}
LIMIT = {"max_document_bytes": 900}


@pytest.mark.parametrize("name", BAD)
def test_each_reason_is_told_with_the_file(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name][0])
    with pytest.raises(InputError) as caught:
        read(tmp_path / "*", **LIMIT if name[0] == "k" else {})
    assert (
        BAD[name][1] in str(caught.value) and name in str(caught.value) and "on_unreadable: skip" in str(caught.value)
    )


def test_all_files_that_cannot_be_read_are_told_at_once(tmp_path):
    """One error for each run of the stage cost a run for each bad file."""
    for number in range(7):
        (tmp_path / f"old{number}.txt").write_bytes("Käse, Öl und Brötchen für früher".encode("latin-1"))
    (tmp_path / "other.txt").write_bytes("Старый город у моря просыпается медленно, когда серый свет".encode("cp1251"))
    (tmp_path / "z.png").write_bytes(b"PNG")
    (tmp_path / "fine.txt").write_text("fine")
    with pytest.raises(InputError) as caught:
        read(tmp_path / "*")
    told = str(caught.value)
    assert told.startswith("9 of 10 files cannot be read: 7 not valid UTF-8 (") and "1 unknown file type '.png'" in told
    assert "old4.txt:1, …; encoding: cp1252" in told and "old5" not in told
    assert "other.txt:1; encoding: cp1251 for the source in params.yaml reads «Старый" in told


def test_what_is_skipped_is_counted_and_takes_nothing_with_it(tmp_path):
    for name, (data, _) in BAD.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "fine.txt").write_text("fine")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"body": 1}\n{"text": "two"}\n{"text": "cu')
    made, left_out, unreadable = source(str(tmp_path / "*"), on_unreadable="skip", **LIMIT), [], select.Unreadable()
    found = list(select.documents(made, globs.find(made.globs), 0.5, leave_out=left_out.append, unreadable=unreadable))
    assert [document.text for document in found] == ["fine", "one", "two"]
    assert left_out == ["unreadable"] * len(BAD) + ["malformed"] * 2
    assert sum(unreadable.counts.values()) == len(BAD) + 2 and unreadable.counts["column 'text' is missing"] == 1


def test_walks_skip_what_is_not_the_persons(tmp_path):
    for name in ("src/a.py", "node_modules/x/b.js", "env/lib/c.py", ".git/d.py", "src/__pycache__/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "env" / "pyvenv.cfg").write_text("home = /usr")
    assert [name for name, _ in globs.find([str(tmp_path / "**" / "*.*")])] == ["src/a.py"]
    assert [name for name, _ in globs.find([str(tmp_path / "node_modules" / "**" / "*")])] == ["x/b.js"]  # named


@pytest.mark.parametrize("cut", [0.5, 0.999])
@pytest.mark.parametrize("frames", [1, 3])
def test_truncated_zst_between_lines_is_an_error(tmp_path, frames, cut):
    """A cut that broke no line gave a shorter corpus, and nobody was told."""
    one = zstandard.compress(b'{"text": "' + b"x" * 118 + b'"}\n' * 1)
    many = zstandard.compress(b"".join(b'{"text": "%0117d"}\n' % number for number in range(8000)))
    whole = one * (frames - 1) + many
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    assert len(read(tmp_path / "a.jsonl.zst")) == 8000 + frames - 1
    (tmp_path / "a.jsonl.zst").write_bytes(whole[: len(whole) - int(len(many) * (1 - cut)) - 1])
    with pytest.raises(InputError, match="a.jsonl.zst: cannot be read .*[Tt]runcated"):
        read(tmp_path / "a.jsonl.zst")


def memory_of_reading(path, **limits):
    """(error or number of documents, MB that reading took at its peak), in a process of its own."""
    code = f"""
import resource
from athanor.text import globs, rows
from athanor.base.errors import InputError
import pyarrow.parquet
before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
try:
    for _ in rows.read_rows(__import__("pathlib").Path({str(path)!r}), ["text"], {limits.get("limit", 64_000_000)}):
        found += 1
except InputError as error:
    found = str(error)
print((found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    return eval(done.stdout)  # noqa: S307


def test_a_parquet_bomb_is_refused_before_it_takes_memory(tmp_path):
    """620 bytes took a gigabyte before the size of a document was asked."""
    pq.write_table(pa.table({"text": ["a" * 4_000_000] * 64}), tmp_path / "d.parquet", compression="zstd")
    found, took = memory_of_reading(tmp_path / "d.parquet")
    assert found == 64 and took < 150
    pq.write_table(
        pa.table({"text": ["a" * 80_000_000, "b"]}), tmp_path / "p.parquet", compression="zstd", use_dictionary=False
    )
    found, took = memory_of_reading(tmp_path / "p.parquet", limit=1_000_000)
    assert "row group 0: a document is larger than max_document_bytes (1,000,000)" in found and took < 40


@pytest.mark.parametrize(
    ("size", "packed", "bomb"), [(300 << 20, 1 << 15, True), (300 << 20, 1 << 20, False), (1 << 20, 9, False)]
)
def test_a_column_that_unpacks_to_much_more_is_no_text(size, packed, bomb):
    column = types.SimpleNamespace(
        path_in_schema="text", total_uncompressed_size=size, total_compressed_size=packed, has_dictionary_page=False
    )
    group = types.SimpleNamespace(num_columns=1, num_rows=1000, column=lambda number: column)
    if bomb:
        with pytest.raises(InputError, match="32,768 bytes of a column unpack to 314,572,800"):
            rows._batch_rows(group, ["text"], "a.parquet", 64_000_000)
    else:
        assert 1 < rows._batch_rows(group, ["text"], "a.parquet", 64_000_000) <= 256


def test_honest_large_rows_stay_bounded(tmp_path):
    """256 rows were held at once, whatever their size."""
    part = random.Random(0).randbytes(1_000_000).hex()
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("text", pa.string())])) as writer:
        for number in range(3):
            writer.write_table(pa.table({"text": [f"{number}.{row}{part}" for row in range(32)]}))
    found, took = memory_of_reading(tmp_path / "a.parquet")
    assert found == 96 and took < 250
