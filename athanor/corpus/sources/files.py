"""Documents from data files, local or fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from athanor.corpus.documents import Document
from athanor.corpus.sources import rows, select
from athanor.errors import InputError
from athanor.params.download import FilesSource, HttpSource

NAMED_FILES = 5  # of each reason, in a message


class Unreadable:
    """Files that could not be read, by reason: the error's words up to the first bracket."""

    def __init__(self) -> None:
        self.errors: dict[str, list[InputError]] = {}

    def add(self, error: InputError) -> None:
        self.errors.setdefault(error.what.partition(" (")[0], []).append(error)

    @property
    def counts(self) -> dict[str, int]:
        return {reason: len(errors) for reason, errors in sorted(self.errors.items())}

    def error(self, files: int, otherwise: str) -> InputError:
        """One error for all: itself where it is alone, else a count, and for each reason the first places and what helps."""
        found = sorted(self.errors.items(), key=lambda item: (-len(item[1]), item[0]))
        first = found[0][1][0]
        if (count := sum(self.counts.values())) == 1:
            return InputError(first.what, where=first.where, fix=f"{first.fix or 'repair the file'}{otherwise}")
        parts = []
        for reason, errors in found:
            places = ", ".join(error.where for error in errors[:NAMED_FILES]) + (", …" if errors[NAMED_FILES:] else "")
            parts.append(f"{len(errors):,} {reason} ({places}; {errors[0].fix})")
        return InputError(f"{count:,} of {files:,} files cannot be read: {'; '.join(parts)}", fix=f"as named{otherwise}")


def documents(
    source: FilesSource | HttpSource,
    files: list[tuple[str, Path]],
    val_fraction: float,
    tick: Callable[[int], None] = lambda file_bytes: None,
    leave_out: Callable[[str], None] = lambda reason: None,
    unreadable: Unreadable | None = None,
) -> Iterator[Document]:
    """Every document of the files, given as (name for provenance, path), in their order.

    `tick` is called with the size of each finished file, `leave_out` with the
    reason why a row or file is not taken. Files that cannot be read are
    collected in `unreadable`, and are one InputError at the end, unless the
    source skips them: then each is taken whole or not at all.
    """
    bad = Unreadable() if unreadable is None else unreadable
    skip = getattr(source, "on_unreadable", "refuse") == "skip"
    for name, path in files:
        try:
            if skip and rows.of_rows(path):  # read to the end first: what follows gives documents as it goes
                deque(_documents(source, name, path, val_fraction, lambda reason: None), maxlen=0)
            yield from _documents(source, name, path, val_fraction, leave_out)
        except InputError as error:
            bad.add(error)
            if skip:
                leave_out("unreadable")
        tick(path.stat().st_size)
    if bad.errors and not skip:
        otherwise = ", or leave such files out with on_unreadable: skip" if isinstance(source, FilesSource) else ""
        raise bad.error(len(files), otherwise)


def _documents(
    source: FilesSource | HttpSource, name: str, path: Path, val_fraction: float, leave_out: Callable[[str], None]
) -> Iterator[Document]:
    for number, (where, row) in enumerate(rows.read_rows(path, select.columns(source), source.max_document_bytes)):
        found = select.document(source, row, where, {"file": name, "row": number}, val_fraction)
        if isinstance(found, str):
            leave_out(found)
        else:
            yield found
