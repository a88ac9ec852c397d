"""The python source: one pass over the standard library that feeds prose, code and whoever else wants the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from athanor.corpus.documents import Document
from athanor.corpus.sources import python_code, python_prose, stdlib
from athanor.corpus.sources.stdlib import Module
from athanor.params.download import PythonSource


@dataclass
class Library:
    """Documents of one source, in the order of the modules, and where they came from."""

    prose: list[Document] = field(default_factory=list)
    code: list[Document] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)


def total_bytes(base: Path) -> int:
    return sum(path.stat().st_size for path in stdlib.source_files(base))


def read(
    source: PythonSource | None,
    val_fraction: float,
    base: Path,
    *,
    tick: Callable[[int], None] = lambda file_bytes: None,
    visit: Callable[[Module], None] = lambda module: None,
) -> Library:
    """Scan the library below `base` once.

    Modules are shown to `visit` one by one and not kept, for their trees are
    big. Without a source only `visit` is served.
    """
    library = Library(provenance=stdlib.provenance(stdlib.source_files(base), base))
    for module in stdlib.scan(base, tick):
        visit(module)
        if source is not None:
            limits = (val_fraction, source.max_prose_chars, source.min_chars)
            library.prose += python_prose.documents(module, source.prose_name, *limits)
            limits = (val_fraction, source.max_code_chars, source.min_chars)
            library.code += python_code.documents(module, source.code_name, *limits)
    if source is not None:
        library.prose += python_prose.topic_documents(
            stdlib.topics(base), source.prose_name, val_fraction, source.max_prose_chars, source.min_chars
        )
    return library
