"""Turn the rows of a data set or of files into documents: which rows are taken, their text, and what is kept beside it."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.base.work import ignore
from athanor.sources import seams
from athanor.sources.licences import permitted_value
from athanor.sources.params import Filter, RowSource, template_columns
from athanor.text import rows
from athanor.text.documents import NEIGHBOURHOOD, Document, content_id, split_of
from athanor.text.globs import Files
from athanor.text.rows import MalformedRow, check_text

MALFORMED_BASIS = 10_000  # rows that the share is taken of while fewer are read: one odd row at the start is no share


def text_columns(source: RowSource) -> tuple[str, ...]:
    template = getattr(source, "text_template", None)
    return template_columns(template) if template is not None else (str(source.text_column),)


def columns(source: RowSource) -> tuple[str, ...]:
    """Every column that the source reads, those of the text first."""
    names = list(text_columns(source))
    if (select := source.select) is not None:
        names += [rule.column for rule in select.filters] + list(select.meta_columns)
        names += [select.license_column] if select.license_column is not None else []
    return tuple(dict.fromkeys(names))


def document(
    source: RowSource, row: Mapping[str, Any], where: str, meta: Mapping[str, Any], val_fraction: float
) -> Document | str:
    """The row as a document, or the reason for leaving it out: filters, license or short.

    The split follows the content, so that equal texts fall on one side.
    MalformedRow when the row cannot be read.
    """
    license_, selected_meta = source.license, {}
    if (select := source.select) is not None:
        if not passes(select.filters, row):
            return "filters"
        if select.license_column is not None:
            permitted_license = permitted_value(row.get(select.license_column), select.licenses)
            if permitted_license is None:
                return "license"
            license_ = permitted_license
        selected_meta = {name: _plain(row.get(name), where, name) for name in select.meta_columns}
    text = _text(source, row, where)
    if len(text) < source.min_chars or not text.strip():
        return "short"
    split = split_of(content_id(text), val_fraction)
    return Document(text, source.name, source.kind, license_, split, {**selected_meta, **meta})


def passes(filters: Sequence[Filter], row: Mapping[str, Any]) -> bool:
    return all(_holds(rule, row.get(rule.column)) for rule in filters)


def _holds(rule: Filter, value: Any) -> bool:
    if rule.one_of is not None:
        return (value if isinstance(value, str) else json.dumps(value, default=str)) in rule.one_of
    if isinstance(value, str):  # as all are in CSV
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return False
    return (rule.min is None or value >= rule.min) and (rule.max is None or value <= rule.max)


def _text(source: RowSource, row: Mapping[str, Any], where: str) -> str:
    """The text of a row; "" when the text, or a column of its template, is empty."""
    texts = {}
    for column in text_columns(source):
        if column not in row:
            raise MalformedRow(f"column '{column}' is missing", where=where, fix=f"found: {', '.join(sorted(row))}")
        texts[column] = check_text(row[column], where, column, source.max_document_bytes)
        if not texts[column].strip():
            return ""
    template = getattr(source, "text_template", None)
    if template is None:
        return next(iter(texts.values()))
    text = re.sub(r"\{([^{}]*)\}", lambda match: texts[match[1]], template)
    return check_text(text, where, "text_template", source.max_document_bytes)


def _plain(value: Any, where: str, column: str) -> Any:
    """A value that JSON can hold, whatever the data set's type."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return check_text(value, where, column, 2**31)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, column) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, column) for item in value]
    return str(value)


def check_malformed(name: str, count: int, rows: int, fraction: float, first_error: str, *, ended: bool) -> None:
    """InputError when more rows than the tolerated share cannot be read; it names the first of them."""
    if count > fraction * (rows if ended else max(rows, MALFORMED_BASIS)):
        raise InputError(
            f"{count:,} of {rows:,} rows are malformed, the first: {first_error}",
            where=f"source '{name}'",
            fix=f"correct the rows, or their shape and columns in params.yaml, or raise max_malformed_fraction ({fraction:g})",
        )


NAMED_FILES = 5  # of each reason, in a message
MAX_BAD_ROWS = 1000  # at the beginning of a file: it is another kind of file


class Unreadable:
    """Files that could not be read, by reason: the error's words up to the first bracket."""

    def __init__(self) -> None:
        self.errors: dict[str, list[InputError]] = {}

    @property
    def all(self) -> list[InputError]:
        return [error for errors in self.errors.values() for error in errors]

    def add(self, error: InputError) -> None:
        self.errors.setdefault(error.what.partition(" (")[0], []).append(error)

    @property
    def counts(self) -> dict[str, int]:
        return {reason: len(errors) for reason, errors in sorted(self.errors.items())}

    def groups(self) -> list[tuple[str, list[InputError]]]:
        """Errors by reason and what helps, those of most files first."""
        groups: dict[tuple[str, str], list[InputError]] = {}
        for reason, errors in self.errors.items():
            for error in errors:  # files in several encodings have a fix each
                groups.setdefault((reason, error.fix.partition("«")[0]), []).append(error)
        found = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        return [(reason, errors) for (reason, _), errors in found]

    def check(self, source: RowSource, files: int) -> None:
        """InputError for the files, of so many, that cannot be read, unless the source skips them."""
        if self.errors and getattr(source, "on_unreadable", "refuse") != "skip":
            otherwise = ", or leave such files out with on_unreadable: skip" if hasattr(source, "on_unreadable") else ""
            raise self.error(files, otherwise)

    def error(self, files: int, otherwise: str) -> InputError:
        """One error for all: itself where it is alone, else a count, and for each reason the first places and what helps."""
        first = self.groups()[0][1][0]
        if (count := sum(self.counts.values())) == 1:
            return InputError(first.what, where=first.where, fix=f"{first.fix or 'repair the file'}{otherwise}")
        descriptions = []
        for reason, errors in self.groups():
            locations = ", ".join(error.where for error in errors[:NAMED_FILES]) + (
                ", …" if errors[NAMED_FILES:] else ""
            )
            descriptions.append(f"{len(errors):,} {reason} ({locations}; {errors[0].fix})")
        return InputError(
            f"{count:,} of {files:,} files cannot be read: {'; '.join(descriptions)}", fix=f"as named{otherwise}"
        )


def documents(
    source: RowSource,
    files: Files,
    val_fraction: float,
    leave_out: Callable[[str], None] = ignore,
    unreadable: Unreadable | None = None,
) -> Iterator[Document]:
    """Every document of the files, given as (name for provenance, path), in their order.

    `leave_out` is called with the reason why a row or file is not taken. Files that cannot be read are
    collected in `unreadable`, and are one InputError at the end, unless the
    source skips them. Single rows that cannot be read are then left out as well.
    """
    errors = Unreadable() if unreadable is None else unreadable
    skip = getattr(source, "on_unreadable", "refuse") == "skip"
    for name, path in files:
        try:
            yield from _documents(source, name, path, val_fraction, leave_out, errors if skip else None)
        except InputError as error:
            errors.add(error)
            if skip:
                leave_out("unreadable")
    errors.check(source, len(files))


def _documents(
    source: RowSource,
    name: str,
    path: Path,
    val_fraction: float,
    leave_out: Callable[[str], None],
    bad_rows: Unreadable | None,
) -> Iterator[Document]:
    """The documents of a file; rows that cannot be read go to `bad_rows`, unless it is None or no row can be read."""
    bad, good = [], 0
    found = rows.read_all_rows(
        path, columns(source), source.max_document_bytes, encoding=getattr(source, "encoding", rows.UTF_8)
    )
    for number, (where, row) in enumerate(found):
        try:
            if isinstance(row, InputError):
                raise row
            outcome = document(source, row, where, {"file": name, "row": number}, val_fraction)
            if isinstance(outcome, Document) and path.suffix.lower() != ".pdf":  # whose fonts may lack characters
                rows.check_mojibake(outcome.text, where)
        except InputError as error:
            bad.append(error.with_traceback(None))  # which would hold the row
            if bad_rows is None or (len(bad) >= MAX_BAD_ROWS and not good):
                break
            continue
        good += 1
        if isinstance(outcome, str):
            leave_out(outcome)
        else:
            yield from parts(outcome, getattr(source, "max_chars", None), val_fraction)
    if bad and (bad_rows is None or not good):
        raise bad[0]
    for error in bad:
        bad_rows.add(error)
        leave_out("malformed")


def parts(document: Document, max_chars: int | None, val_fraction: float) -> Iterator[Document]:
    """The document itself; or a long one in pieces, those of one neighbourhood on one side of the split.

    The key of a neighbourhood follows the content of the whole text, so that equal texts fall on one side.
    """
    if max_chars is None or len(document.text) <= max_chars:
        yield document
        return
    whole = document.id
    for number, piece in enumerate(seams.pieces(document.text, max_chars, document.kind == "code")):
        key = f"{whole}:{piece.neighbourhood}"
        split = split_of(key, val_fraction)
        meta = {**document.meta, "part": number, NEIGHBOURHOOD: key}
        if text := piece.text.strip("\n"):
            yield replace(document, text=text, split=split, meta=meta)
