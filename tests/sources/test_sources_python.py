"""The python source on a small made-up library, and on the real one."""

from __future__ import annotations

import ast

import pytest

from athanor.base.errors import InputError
from athanor.sources import python_documents, stdlib
from athanor.sources.params import PythonSource
from athanor.text.documents import content_id

SOURCE = PythonSource("python", "docs", "code", 3000, 6000, 40, 1, 1)
LONG_COMMENT = 3 * "# Every queue keeps a lock of its own here, because the order of two locks cannot be told.\n"
MODULE = f'''# Copyright (c) somebody
# All rights reserved.
# Permission is hereby granted, free of charge.
# Another line of the licence.
"""Queues for people.

They wait in line, and the one who came first is the first to go.
"""
import os

{LONG_COMMENT}class Queue(
    object,
):
    """A line of people.

    It never gets shorter on Mondays.
    """

    # short remark
    def put(self, item, *, block=True):
        """Put an item into the line.

        Waits until there is room.
        """
        text = """
# not a comment
"""
        return text

    @property
    def size(self):
        "How many wait."
        return 0

def first(line):
    r"""Return who is first.

    Mind the \\d."""; return line[0]

TABLE = [{", ".join(map(str, range(1000)))}]
'''


@pytest.fixture
def library(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text if isinstance(text, bytes) else text.encode())

    write("people/__init__.py", MODULE)
    latin = "# -*- coding: latin-1 -*-\n'''Gr\xfc\xdfe: a module in another encoding, with \f a form feed.'''\n"
    write("people/latin.py", latin.encode("latin-1"))
    write("pydoc_data/topics.py", f"topics = {{'with': {'The with statement wraps a block. ' * 20!r}}}\n")
    for skipped in ("test/a.py", "site-packages/a.py", "idlelib/a.py", "x/_vendor/a.py", "config-3/a.py", "site.py"):
        write(skipped, "raise SystemExit('must not be read' ")
    write("_sysconfigdata__linux.py", "this is no python")
    write("encodings/cp037.py", "'''A table of characters that nobody wants to read in prose.'''\nx = 1\n" * 20)
    return tmp_path


class Made:
    """What one reading of a library hands on."""

    def __init__(self, base, source=SOURCE, val_fraction=0.5, **visitors):
        self.prose, self.code = [], []
        for document in python_documents.read(source, val_fraction, base, **visitors):
            (self.prose if document.kind == "prose" else self.code).append(document)
        self.provenance = stdlib.provenance(stdlib.source_files(base), base)


def read(base):
    return Made(base)


def test_reads_only_what_belongs_to_the_library(library):
    modules = [module.name for module in stdlib.scan(library)]
    assert modules == ["people", "people.latin"]
    assert "Grüße" in next(m for m in stdlib.scan(library) if m.name == "people.latin").text


def test_prose_names_what_it_describes_and_leaves_licences_out(library):
    text = "\n".join(d.text for d in read(library).prose if d.meta["module"] == "people")
    for part in (
        "module people\n\nQueues for people.",
        "class people.Queue\n\nA line of people.",
        "people.Queue.put(item, *, block=True)\n\nPut an item into the line.",
        "Every queue keeps a lock of its own",
    ):
        assert part in text
    assert "Copyright" not in text and "short remark" not in text and "not a comment" not in text


def test_code_keeps_summaries_and_leaves_the_rest_to_prose(library):
    text = "".join(d.text for d in read(library).code if d.meta["module"] == "people")
    tree = ast.parse(text)
    assert ast.get_docstring(tree) == "Queues for people."
    assert "Waits until there is room" not in text and "Mondays" not in text and "keeps a lock" not in text
    assert 'r"""Return who is first."""; return line[0]' in text
    assert '"""\n# not a comment\n"""' in text and "# short remark" in text
    assert "Copyright" not in text and "997, 998" not in text  # licence and data table


def test_documents_never_mix_modules_and_split_by_module(library):
    documents = [*read(library).prose, *read(library).code]
    sides = {}
    for document in documents:
        assert sides.setdefault(document.meta["module"], document.split) == document.split
    assert {document.license for document in documents} == {"PSF-2.0"}


def test_a_long_class_is_cut_between_members_under_its_header(library):
    module = next(m for m in stdlib.scan(library) if m.name == "people")
    pieces = list(python_documents.code_texts(module, 300, 10))
    assert len(pieces) > 1 and all(len(piece) <= 300 for piece in pieces)
    for piece in pieces:
        ast.parse(piece)
    methods = [piece for piece in pieces if "def size" in piece]
    assert methods and all("class Queue(\n    object,\n):" in piece for piece in methods)
    assert "".join(pieces).count("def put") == 1


def test_long_prose_is_cut_between_paragraphs():
    text = "\n\n".join(f"Paragraph {number} has some words." for number in range(50))
    pieces = list(python_documents.paragraphs_up_to(text, 200))
    assert all(len(piece) <= 200 for piece in pieces) and "\n\n".join(pieces) == text


def test_provenance_follows_content(library):
    before = read(library).provenance
    assert read(library).provenance == before and before["interpreter"].startswith("CPython 3.")
    (library / "people" / "latin.py").write_text("x = 1\n")
    assert read(library).provenance["files_sha256"] != before["files_sha256"]


def test_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no standard library source files.*Fix:"):
        list(stdlib.scan(tmp_path))


def test_broken_module_is_an_error_that_names_it(library):
    (library / "broken.py").write_text("def f(:\n")
    with pytest.raises(InputError, match="broken.py.*cannot be parsed"):
        read(library)


def test_the_real_library():
    source = PythonSource("python", "docs", "code", 3000, 6000, 200, 1, 1)
    details = []  # lines from docstrings' later paragraphs

    def visit(module):
        for entry in stdlib.entries(module):
            later = [line.strip() for paragraph in entry.doc.split("\n\n")[1:] for line in paragraph.split("\n")]
            details.extend(line for line in later if len(line) > 60 and not line.startswith(">>>"))

    made = Made(stdlib.root(), source, 0.05, visit=visit)
    prose, code = (sum(len(d.text.encode()) for d in documents) for documents in (made.prose, made.code))
    assert prose > 2_000_000 and code > 5_000_000
    modules = {d.meta["module"] for d in [*made.prose, *made.code]}
    assert {"json.decoder", "topic:with", "shutil"} <= modules
    assert not any(m.startswith(("test.", "idlelib", "lib2to3", "_sysconfigdata", "site")) for m in modules - {"site"})
    assert "site" not in modules
    for document in made.code[::3]:
        ast.parse(document.text)
    for documents in (made.prose, made.code):
        assert len({content_id(d.text) for d in documents}) >= 0.99 * len(documents)
        share = sum(len(d.text) for d in documents if d.split == "val") / sum(len(d.text) for d in documents)
        assert 0.01 < share < 0.12
    # What the docstrings say after their summaries is in the prose and (but for what code repeats) not in the code.
    prose_text, code_text = ("\n".join(d.text for d in documents) for documents in (made.prose, made.code))
    sample = sorted(set(details))[::40]
    assert len(sample) > 100
    assert sum(line in prose_text for line in sample) > 0.97 * len(sample)
    assert sum(line in code_text for line in sample) < 0.03 * len(sample)
