"""Parameters that choose rows of a data set."""

from __future__ import annotations

import re
from dataclasses import dataclass

from athanor.base.errors import ParamsError


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A row is kept when the value of `column` is in a range, or one of the words of `one_of`.

    A row without a value is left out. Words are compared with the value as
    JSON writes it: `true`, `3`, but text without quotes.
    """

    column: str
    min: float | None = None
    max: float | None = None
    one_of: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (self.one_of is None) == (self.min is None and self.max is None):
            raise ParamsError("set min, max or both, or one_of alone", where="column", fix="set the others to null")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows of a data set become documents, and which columns besides the text are kept.

    All `filters` must hold. `meta_columns` are stored in the document's meta
    (labels and scores that classifiers learn from, addresses).
    `license_column` holds the licence of each row, an SPDX expression or a
    list of ids of which all apply; with `licenses`, a row under any other
    licence, or none, is counted and left out; null takes all.
    """

    filters: tuple[Filter, ...] = ()
    meta_columns: tuple[str, ...] = ()
    license_column: str | None = None
    licenses: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.licenses is not None and self.license_column is None:
            raise ParamsError("needs a license_column", where="licenses", fix="name the column, or set it to null")
        check_licenses(self.licenses)


def check_licenses(licenses: tuple[str, ...] | None) -> None:
    for license_ in licenses or ():
        if not re.fullmatch(r"[A-Za-z0-9.+-]+( WITH [A-Za-z0-9.+-]+)?", license_):
            raise ParamsError(f"'{license_}' is no SPDX id", where="licenses", fix="for example MIT or Apache-2.0")
