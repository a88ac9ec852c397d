"""Real text without network and without repetition: the standard library, the installed packages, local Markdown.

The layout is that of the download stage (data/raw/<source>/NNNNN.parquet,
data/battery), so that the clean stage runs on it as it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from athanor.base.artifacts import new_dir, read_manifest, write_manifest
from athanor.base.errors import InputError
from athanor.base.strict import load_section
from athanor.sources import python_documents, stdlib
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import battery_items
from athanor.sources.packages import root as site_packages
from athanor.text.conversations import write_rows
from athanor.text.documents import Document, content_id, read_sources, split_of, write_shards

VAL_FRACTION = 0.04
PROSE_CHARS, CODE_CHARS, MIN_CHARS = 3000, 6000, 200
SKIPPED = frozenset("test tests testing _testing _vendor vendored vendor __pycache__".split())
MAX_FILE_BYTES = 1_000_000  # a longer module is a table of data


def make(folder: Path, megabytes: float, params: Path) -> dict[str, Any]:
    """Fill folder/data/raw and folder/data/battery, unless they are there; returns the manifest of data/raw."""
    raw = folder / "data" / "raw"
    if not (raw / "manifest.json").is_file():
        documents: dict[str, list[Document]] = {}
        seen: set[str] = set()
        size = 0
        for document in _everything():
            if size >= megabytes * 1e6:
                break
            if len(document.text) >= MIN_CHARS and (key := content_id(document.text)) not in seen:
                seen.add(key)
                documents.setdefault(document.source, []).append(document)
                size += len(document.text.encode())
        if size < megabytes * 1e6:
            fix = "ask for fewer megabytes, or install more packages into this environment"
            raise InputError(f"only {size / 1e6:.1f} MB of text are there", where=str(site_packages()), fix=fix)
        write(raw, documents)
    write_battery(folder, params)
    return read_manifest(raw, "raw", 1)


def sample(whole: Path, folder: Path, megabytes: float, params: Path) -> dict[str, Any]:
    """The documents of lowest content hash of another such folder, up to so many megabytes."""
    raw = folder / "data" / "raw"
    if not (raw / "manifest.json").is_file():
        sizes = sorted((document.id, len(document.text.encode())) for document in read_sources(whole / "data" / "raw"))
        chosen, total = set(), 0
        for key, size in sizes:
            if total >= megabytes * 1e6:
                break
            chosen.add(key)
            total += size
        documents: dict[str, list[Document]] = {}
        for document in read_sources(whole / "data" / "raw"):
            if document.id in chosen:
                documents.setdefault(document.source, []).append(document)
        write(raw, documents)
    write_battery(folder, params)
    return read_manifest(raw, "raw", 1)


def write(raw: Path, documents: dict[str, list[Document]]) -> None:
    counts = {}
    with new_dir(raw) as folder:
        for name, found in sorted(documents.items()):
            write_shards(folder / name, found)
            counts[name] = {"documents": len(found), "bytes": sum(len(item.text.encode()) for item in found)}
        write_manifest(folder, kind="raw", version=1, counts=counts)


def write_battery(folder: Path, params: Path) -> None:
    target = folder / "data" / "battery"
    if (target / "manifest.json").is_file():
        return
    items = battery_items(load_section(params, "battery", BatteryParams))
    with new_dir(target) as held_out:
        write_rows(held_out / "items.jsonl", items)
        write_manifest(held_out, kind="battery", version=1, counts=dict(Counter(item.category for item in items)))


def total_bytes(manifest: dict[str, Any]) -> int:
    return sum(count["bytes"] for count in manifest["counts"].values())


def _everything() -> Iterator[Document]:
    yield from _markdown(site_packages())
    yield from _readmes()
    base = stdlib.root()
    for module in stdlib.scan(base):
        yield from _module(module, "python")
    for name, text in stdlib.topics(base).items():
        key, texts = f"topic:{name}", python_documents.packed([text.strip("\n")], PROSE_CHARS, MIN_CHARS)
        of = ("python-docs", "prose", stdlib.LICENSE, key, VAL_FRACTION, {"module": key})
        yield from python_documents.numbered(texts, *of)
    yield from _packages(site_packages())


def _packages(base: Path) -> Iterator[Document]:
    """Modules of the installed packages, mixed by the hash of their paths so that any part is like the whole."""
    paths = []
    for path in base.rglob("*.py"):
        relative = path.relative_to(base)
        if SKIPPED.isdisjoint(relative.parts) and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            paths.append((hashlib.blake2b(relative.as_posix().encode()).hexdigest(), relative))
    for _, relative in sorted(paths):
        try:
            text, tree = stdlib.parse((base / relative).read_bytes(), relative.as_posix())
        except (InputError, LookupError, RecursionError):
            continue  # packages ship templates and code for other versions of Python
        name = stdlib.module_name(relative.as_posix())
        yield from _module(stdlib.Module(name, relative.as_posix(), text, tree), "package")


def _module(module: stdlib.Module, name: str) -> Iterator[Document]:
    of = (module.license, module.name, VAL_FRACTION, module.meta)
    prose = python_documents.prose_texts(module, PROSE_CHARS, MIN_CHARS)
    yield from python_documents.numbered(prose, f"{name}-docs", "prose", *of)
    code = python_documents.code_texts(module, CODE_CHARS, MIN_CHARS)
    yield from python_documents.numbered(code, f"{name}-code", "code", *of)


def _markdown(base: Path) -> Iterator[Document]:
    for path in sorted([*base.rglob("*.md"), *base.rglob("*.rst")]):
        try:
            yield _local(path.read_text(encoding="utf-8"), path.relative_to(base).as_posix())
        except (OSError, UnicodeDecodeError):
            continue


def _readmes() -> Iterator[Document]:
    for item in sorted(importlib.metadata.distributions(), key=lambda item: str(item.metadata["Name"])):
        metadata: Any = item.metadata
        yield _local(str(metadata.get_payload() or metadata.get("Description") or ""), str(metadata["Name"]))


def _local(text: str, key: str) -> Document:
    return Document(text, "markdown", "prose", "unknown", split_of(key, VAL_FRACTION), {"path": key})
