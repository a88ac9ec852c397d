"""Licences: SPDX expressions against an allow-list, and what a package's metadata says in its many ways."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from email.message import Message
from typing import Any

UNKNOWN = "unknown"
BSD = "LicenseRef-BSD"  # "BSD" alone names no version; an allow-list has to say that it takes such

# What stands in the License field and in classifiers, lower case, without "license" and punctuation, as SPDX ids.
NAMES = dict(
    line.strip().split(" = ")
    for line in """
    0bsd = 0BSD
    apache = Apache-2.0
    apache 2 = Apache-2.0
    apache 2 0 = Apache-2.0
    apache version 2 0 = Apache-2.0
    apache software = Apache-2.0
    apache software 2 0 = Apache-2.0
    boost software 1 0 = BSL-1.0
    bsd = LicenseRef-BSD
    bsd style = LicenseRef-BSD
    bsd 2 clause = BSD-2-Clause
    simplified bsd = BSD-2-Clause
    bsd 3 clause = BSD-3-Clause
    3 clause bsd = BSD-3-Clause
    new bsd = BSD-3-Clause
    modified bsd = BSD-3-Clause
    cc0 1 0 = CC0-1.0
    cc0 1 0 universal cc0 1 0 public domain dedication = CC0-1.0
    gpl 2 0 = GPL-2.0-only
    gplv2 = GPL-2.0-only
    gplv3 = GPL-3.0-only
    gnu general public = LicenseRef-GPL
    gnu general public gpl = LicenseRef-GPL
    gnu general public v2 gplv2 = GPL-2.0-only
    gnu general public v2 or later gplv2+ = GPL-2.0-or-later
    gnu general public v3 gplv3 = GPL-3.0-only
    gnu general public v3 or later gplv3+ = GPL-3.0-or-later
    gnu lesser general public v2 or later lgplv2+ = LGPL-2.0-or-later
    gnu lesser general public v3 lgplv3 = LGPL-3.0-only
    gnu lesser general public v3 or later lgplv3+ = LGPL-3.0-or-later
    gnu library or lesser general public lgpl = LicenseRef-LGPL
    gnu affero general public v3 = AGPL-3.0-only
    isc = ISC
    isc iscl = ISC
    mit = MIT
    mit no attribution mit 0 = MIT-0
    mpl 2 0 = MPL-2.0
    mozilla public 2 0 mpl 2 0 = MPL-2.0
    psf = PSF-2.0
    psf 2 0 = PSF-2.0
    python software foundation = PSF-2.0
    the unlicense unlicense = Unlicense
    unlicense = Unlicense
    zlib = Zlib
    zlib/libpng = Zlib
    zope public = ZPL-2.1
    zpl 2 1 = ZPL-2.1
    """.strip().splitlines()
)


def permitted(expression: str, allowed: Collection[str]) -> str | None:
    """The licence under which a text may be used, in the allow-list's spelling; None when it may not be.

    Of alternatives (OR) the first allowed one is chosen, of joint terms (AND)
    all must be allowed, and an exception (WITH) is a licence of its own.
    What is no SPDX expression is not allowed.
    """
    known = {name.casefold(): name for name in allowed}
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    try:
        licence = _alternatives(tokens, known)
    except (IndexError, ValueError):
        return None
    return None if tokens else licence


def permitted_value(value: Any, allowed: Collection[str] | None) -> str | None:
    """`permitted` for a cell of a data set: an expression, or a list of ids of which all apply. None allows all."""
    items = [value] if isinstance(value, str) else value
    usable = isinstance(items, Sequence) and len(items) > 0
    if not usable or not all(isinstance(item, str) and item.strip() for item in items):
        return UNKNOWN if allowed is None else None
    names = sorted({item.strip() for item in items})
    if allowed is not None:
        names = [permitted(name, allowed) for name in names]
    return None if None in names else " AND ".join(sorted({str(name) for name in names}))


# Each takes its tokens off the list; IndexError or ValueError where the syntax is wrong.


def _alternatives(tokens: list[str], known: dict[str, str]) -> str | None:
    alternatives = [_joint_terms(tokens, known)]
    while _consume(tokens, "OR"):
        alternatives.append(_joint_terms(tokens, known))
    return next((name for name in alternatives if name is not None), None)


def _joint_terms(tokens: list[str], known: dict[str, str]) -> str | None:
    terms = [_term(tokens, known)]
    while _consume(tokens, "AND"):
        terms.append(_term(tokens, known))
    return None if None in terms else " AND ".join(dict.fromkeys(map(str, terms)))


def _term(tokens: list[str], known: dict[str, str]) -> str | None:
    token = tokens.pop(0)
    if token == "(":
        licence = _alternatives(tokens, known)
        if tokens.pop(0) != ")":
            raise ValueError("no closing bracket")
        return licence
    if token.upper() in ("AND", "OR", "WITH", ")"):
        raise ValueError("no licence")
    return known.get((f"{token} with {tokens.pop(0)}" if _consume(tokens, "WITH") else token).casefold())


def _consume(tokens: list[str], word: str) -> bool:
    """Remove the next token if it is this word; returns whether it was."""
    return tokens[:1] != [] and tokens[0].upper() == word and bool(tokens.pop(0))


def of_package(metadata: Message) -> str:
    """SPDX expression of a Python package, or "unknown".

    License-Expression decides where it stands (PEP 639). Otherwise the License
    field and the classifiers must all be understood and hold together, for
    they are written apart and one of them may tell half.
    """
    if expression := (metadata.get("License-Expression") or "").strip():
        return expression
    classifiers = metadata.get_all("Classifier") or []
    names = [line.split("::")[-1] for line in classifiers if line.startswith("License ::")]
    classifier_ids = [
        _spdx_id(end) for end in names if end.strip().casefold() not in ("osi approved", "other/proprietary license")
    ]
    if any("proprietary" in end.casefold() for end in names):
        return UNKNOWN
    field = " ".join((metadata.get("License") or "").split())
    field_id = _spdx_id(field) if len(field) <= 80 else _spdx_id(field[:40].split("Copyright")[0])
    if field and field_id is None and not classifier_ids and re.search(r"\b(AND|OR)\b", field):
        return field  # an expression from before there was a field for it
    if field_id is None and len(field) <= 80 and field and not classifier_ids:
        return field if re.fullmatch(r"[A-Za-z0-9.+-]+", field) else UNKNOWN
    ids = list(dict.fromkeys(name for name in [field_id, *classifier_ids] if name is not None))
    if None in classifier_ids or not ids:
        return UNKNOWN
    if BSD in ids and any(name.startswith("BSD-") for name in ids):
        ids.remove(BSD)  # the other statement says which BSD licence it is
    return " AND ".join(ids)


def _spdx_id(text: str) -> str | None:
    words = re.sub(r"[^a-z0-9+/]+", " ", text.casefold())
    filler_words = ("license", "licence", "the", "v", "osi", "approved")
    words = " ".join(word for word in words.split() if word not in filler_words)
    return NAMES.get(words)
