"""The packages source: prose and code of the installed Python packages, by licence.

Read with `ast` and never imported, as the standard library is. A package is
what its RECORD lists, so that files of unknown origin are not taken for its
own. Order: distribution name, then path; the installed versions and the hash
of every file read are the source's provenance.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.sources import licences, python_documents, stdlib
from athanor.sources.params import PackagesSource
from athanor.sources.stdlib import Module
from athanor.text.documents import Document

SELF = "athanor"  # its sources hold the battery's questions
TESTS = frozenset("test tests testing _testing conftest benchmarks".split())
VENDORED = frozenset("_vendor _vendored vendor vendored third_party thirdparty extern externals _extern".split())
TEST_FILE = re.compile(r"(test_.*|.*_test|.*_tests|tests?|conftest)\.py$")
GENERATED_FILE = re.compile(r".*_pb2(_grpc)?\.py$|_?version\.py$|.*_parsetab\.py$|lextab\.py$")
GENERATED = re.compile(
    rb"@generated|do not edit|auto-?generated|(file|code|module) (is|was) generated|^# generated ", re.IGNORECASE | re.M
)
HEADER_BYTES = 1500  # where a generated file says so
MAX_FILE_BYTES = 1_000_000  # a longer module is a table of data


@dataclass(frozen=True)
class Package:
    """An installed distribution that may be read; `files` are its modules as (path in it, path), in order."""

    name: str  # normalised
    version: str
    license: str
    readme: str
    files: tuple[tuple[str, Path], ...]


def root() -> Path:
    """The site-packages of the running interpreter, and none of those that the environment adds."""
    return Path(sysconfig.get_paths()["purelib"])


def find(source: PackagesSource, base: Path) -> tuple[list[Package], dict[str, str]]:
    """The packages below `base` that may be read, in order, and why others may not (name to reason)."""
    packages: dict[str, Package] = {}
    refused: dict[str, str] = {}
    excluded = {normalised(name) for name in (*source.exclude, SELF)}
    distributions = importlib.metadata.distributions(path=[str(base)])
    installed = [(normalised(distribution.metadata["Name"] or ""), distribution) for distribution in distributions]
    for name, distribution in sorted(installed, key=lambda pair: (pair[0], pair[1].version)):
        stated = licences.of_package(distribution.metadata)
        license_ = licences.permitted(stated, source.licenses)
        if not name or name in excluded:
            refused[name or "without a name"] = "excluded"
        elif license_ is None:
            refused[name] = f"license {stated[:60]}"
        elif not (files := _modules(distribution)):
            refused[name] = "no modules"
        else:
            packages[name] = Package(name, distribution.version, license_, _readme(distribution.metadata), files)
    if not packages:
        fix = "allow more licenses, or install the packages into the interpreter that runs the stage"
        raise InputError(f"no package can be read ({len(refused)} left out)", where=base, fix=fix)
    return list(packages.values()), refused


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _modules(distribution: importlib.metadata.Distribution) -> tuple[tuple[str, Path], ...]:
    paths = sorted({PurePosixPath(str(file)) for file in distribution.files or [] if str(file).endswith(".py")})
    files = [(path.as_posix(), Path(str(distribution.locate_file(path)))) for path in paths if ".." not in path.parts]
    return tuple((name, path) for name, path in files if _is_wanted(PurePosixPath(name)) and path.is_file())


def _is_wanted(path: PurePosixPath) -> bool:
    folders = {folder.lower() for folder in path.parts[:-1]}
    if folders & (TESTS | VENDORED) or any(folder.endswith((".dist-info", ".data")) for folder in folders):
        return False
    return not TEST_FILE.match(path.name) and not GENERATED_FILE.match(path.name)


def _readme(metadata: Any) -> str:
    """The long description: the body of METADATA, or the field of older versions of it."""
    text = metadata.get_payload() or metadata.get("Description") or ""
    text = re.sub(r"\n(        |       \|)", "\n", text.replace("\r\n", "\n")).strip()
    return "" if text == "UNKNOWN" else text


def read(
    source: PackagesSource,
    val_fraction: float,
    base: Path,
    facts: Facts,
    tick: Tick = ignore,
    expect: Tick = ignore,
) -> Iterator[Document]:
    """The documents of the packages below `base`; where they come from is added to `facts`.

    A file that cannot be read as Python of this version is counted and left
    out: packages ship templates and code for other versions.
    """
    packages, refused = find(source, base)
    expect(sum(path.stat().st_size for package in packages for _, path in package.files))
    left_out: Counter[str] = Counter()
    provenance: Facts = {}
    facts |= {"packages": provenance, "packages_left_out": dict(sorted(refused.items())), "files_left_out": left_out}
    size = 0

    def is_full() -> bool:
        return source.max_bytes is not None and size >= source.max_bytes

    def counting(documents: Iterable[Document]) -> Iterator[Document]:
        nonlocal size
        for document in documents:
            if len(document.text) >= source.min_chars:
                size += len(document.text.encode())
            yield document

    for package in packages:
        if is_full():
            break
        digest, files = hashlib.sha256(), 0
        yield from counting(readme_documents(package, source, val_fraction))
        for name, path in package.files:
            if is_full():
                break
            data = path.read_bytes()
            tick(len(data))
            reason, documents = unwanted(data), []
            if reason is None:
                try:
                    text, tree = stdlib.parse(data, name)
                    module = Module(stdlib.module_name(name), name, text, tree, package.license, package.name)
                    documents = python_documents.module_documents(module, source, val_fraction)
                except (InputError, LookupError, RecursionError, UnicodeError):  # such as a template that ends in .py
                    reason = "not readable"
            yield from counting(documents)
            if reason is None:
                files += 1
                digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
            else:
                left_out[reason] += 1
        versions = {"version": package.version, "license": package.license}
        provenance[package.name] = {**versions, "files": files, "files_sha256": digest.hexdigest()}


def unwanted(data: bytes) -> str | None:
    """Why a module is not worth reading, or None."""
    if len(data) > MAX_FILE_BYTES:
        return "too large"
    return "generated" if GENERATED.search(data[:HEADER_BYTES]) else None


def readme_documents(package: Package, source: PackagesSource, val_fraction: float) -> Iterator[Document]:
    key, limits = f"readme:{package.name}", (source.max_prose_chars, source.min_chars)
    meta = {"module": key, "package": package.name}
    texts = python_documents.packed([package.readme], *limits)
    return python_documents.numbered(texts, source.prose_name, "prose", package.license, key, val_fraction, meta)
