"""Whether what a stage works with is as it was: the bytes that it reads, its code and its parameters while it runs.

DVC takes a file whose time, size and inode are as before for unchanged, so a bit that flips on the disk goes unseen,
and the damaged bytes would be recorded as the good ones. The manifest of each artifact has the SHA-256 of its files.

And DVC hashes code and parameters after the command. It would record those that were edited meanwhile as what made the
outputs, and call them up to date for ever.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import MANIFEST, read_json, sha256_file
from athanor.base.errors import InputError
from athanor.runtime.closure import file_digests
from athanor.runtime.facts import Graph, flatten

MAX_BYTES = 64 << 30  # of one stage; of more, files are drawn at random, others at each start
THREADS = 4  # hashing gives Python's lock back
FIX = "python -m athanor doctor --deep --fix, then the same command again"


@dataclass(frozen=True)
class ManifestFile:
    """A file with its size and hash from the manifest of its artifact."""

    path: Path
    bytes: int
    sha256: str

    def problem(self) -> str:
        """What is wrong with the file on the disk; nothing when it is as it was written."""
        try:
            if self.path.stat().st_size != self.bytes:
                return f"has {self.path.stat().st_size} bytes, {self.bytes} were written"
            return "" if sha256_file(self.path) == self.sha256 else "its bytes are not those that were written"
        except OSError as error:
            return f"cannot be read ({error.strerror})"


def listed(path: Path) -> Iterator[ManifestFile]:
    """The files at or below `path` that are listed in the manifest of the artifact that `path` is, or is part of."""
    for folder in (path, *path.parents):
        if (folder / MANIFEST).is_file():
            manifest = read_json(folder / MANIFEST)
            for name, entry in manifest.get("files", {}).items() if isinstance(manifest, dict) else ():
                file = folder / name
                if isinstance(entry, dict) and "sha256" in entry and (file == path or path in file.parents):
                    yield ManifestFile(file, entry["bytes"], entry["sha256"])
            return


def problems(files: Iterable[ManifestFile]) -> Iterator[tuple[ManifestFile, str]]:
    """The files that are not as they were written, each with what is wrong."""
    listed_files = list(files)
    with ThreadPoolExecutor(THREADS) as pool:
        yield from (
            (file, problem)
            for file, problem in zip(listed_files, pool.map(ManifestFile.problem, listed_files), strict=True)
            if problem
        )


def check(graph: Graph, stage: str, say: Callable[[str], None]) -> dict[str, float]:
    """InputError naming the first file that a stage depends on and that is not as it was written, and who wrote it.

    Returns how much was compared, and the seconds it took.
    """
    started = time.monotonic()
    files = list({file.path: file for dep in graph.dependencies(stage) for file in listed(Path(dep))}.values())
    total = sum(file.bytes for file in files)
    if total > MAX_BYTES:
        random.Random(time.time_ns()).shuffle(files)
    chosen, checked_bytes = [], 0
    for file in files:
        if checked_bytes < MAX_BYTES:
            chosen.append(file)
            checked_bytes += file.bytes
    for file, problem in problems(chosen):
        maker = graph.maker(file.path)
        author = f" by stage {maker}" if maker else ""
        raise InputError(f"{problem}{author}: damaged on the disk, or edited", where=str(file.path), fix=FIX)
    if checked_bytes < total:
        share = f"{checked_bytes / 2**30:.0f} of {total / 2**30:.0f} GiB"
        say(f"compared {share} of the inputs with their SHA-256, others next time; athanor doctor --deep compares all")
    return (
        {}
        if not files
        else {"inputs_checked_bytes": checked_bytes, "inputs_check_seconds": round(time.monotonic() - started, 3)}
    )


@dataclass(frozen=True)
class InputSnapshot:
    """The code of a stage when its process began.

    `files` has the SHA-256 of each file, `code` the digest of its syntax tree, for which comments do not count.
    """

    root: Path
    module: str
    files: Mapping[str, str]
    code: Mapping[str, str]

    @classmethod
    def now(cls, root: Path, module: str) -> InputSnapshot:
        code = file_digests(root, module)
        return cls(root, module, {name: sha256_file(root / name) for name in code}, code)

    def check(self, before: Mapping[str, Any], after: Mapping[str, Any], sections: Iterable[str]) -> None:
        """InputError naming the file, or the parameter of `sections`, that is another now."""
        files = [name for name, known in self.files.items() if _sha256(self.root / name) != known]
        if files and file_digests(self.root, self.module) != self.code:
            raise _edited_error(", ".join(files))
        for section in sections:
            old, new = (dict(flatten({section: values.get(section)})) for values in (before, after))
            for name in [name for name in {**old, **new} if old.get(name) != new.get(name)]:
                raise _edited_error(f"{name} ({old.get(name)} -> {new.get(name)})")


def _sha256(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


def _edited_error(what: str) -> InputError:
    return InputError(
        "edited while the stage ran, so DVC would record it as what made these results",
        where=what,
        fix="run dvc repro again; a finished training is only written out with the edit undone, or with `athanor slots adopt`",
    )
