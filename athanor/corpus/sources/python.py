"""The python source: one pass over the standard library that feeds prose, code and whoever else wants the modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from athanor.corpus.documents import Document
from athanor.corpus.sources import python_code, python_prose, stdlib
from athanor.corpus.sources.stdlib import Module
from athanor.params.download import PackagesSource, PythonSource

Add = Callable[[Document], None]


def total_bytes(base: Path) -> int:
    return sum(path.stat().st_size for path in stdlib.source_files(base))


def read(
    source: PythonSource | None,
    val_fraction: float,
    base: Path,
    prose: Add = lambda document: None,
    code: Add = lambda document: None,
    *,
    tick: Callable[[int], None] = lambda file_bytes: None,
    visit: Callable[[Module], None] = lambda module: None,
) -> dict[str, Any]:
    """Scan the library below `base` once; returns where its documents came from.

    Documents go to `prose` and `code` as they are made, modules to `visit` one
    by one: none is kept, for trees are big. Without a source only `visit` is served.
    """
    for module in stdlib.scan(base, tick):
        visit(module)
        if source is not None:
            module_documents(module, source, val_fraction, prose, code)
    if source is not None:
        limits = (val_fraction, source.max_prose_chars, source.min_chars)
        for document in python_prose.topic_documents(stdlib.topics(base), source.prose_name, *limits):
            prose(document)
    return stdlib.provenance(stdlib.source_files(base), base)


def module_documents(
    module: Module, source: PythonSource | PackagesSource, val_fraction: float, prose: Add, code: Add
) -> None:
    """Hand on the documents of one module. All of them are made first: a module that fails gives none."""
    limits = (val_fraction, source.max_prose_chars, source.min_chars)
    documentation = list(python_prose.documents(module, source.prose_name, *limits))
    limits = (val_fraction, source.max_code_chars, source.min_chars)
    sources = list(python_code.documents(module, source.code_name, *limits))
    for add, documents in ((prose, documentation), (code, sources)):
        for document in documents:
            add(document)
