"""Addresses of files in object stores and in hub data sets, as params.yaml may hold them."""

from __future__ import annotations

import re

from athanor.base.errors import ParamsError


def check_address(url: str) -> None:
    """ParamsError for an address that holds a secret, that a store does not have, or whose content may change its name."""
    where, scheme = "urls", url.partition("://")[0]
    if re.match(r"\w+://[^/]*@", url) or "?" in url:
        fix = "leave it out; keys and accounts come from the environment, and ? is no wildcard here"
        raise ParamsError("holds a login or a query", where=where, fix=fix)
    if not re.match(r"(s3|gs|az|hf)://[^/\s]+/.", url):
        fix = "use type http" if scheme in ("http", "https") else "begin it with s3://BUCKET/, gs://, az:// or hf://"
        raise ParamsError(f"'{url}' is no address of files in a store", where=where, fix=fix)
    if re.search(r"\*\*[^/]|[^/]\*\*", url):
        raise ParamsError(f"'{url}' has ** in a name", where=where, fix="write it as a folder: /**/")
    if scheme == "hf" and not re.match(r"hf://datasets/[^@]+@[0-9a-f]{40}/", url):
        fix = "hf://datasets/OWNER/NAME@COMMIT/FILES, the commit as 40 hex digits"
        raise ParamsError(f"'{url}' pins no data set", where=where, fix=fix)


def without_query(url: str) -> str:
    """The address without what follows its path: a query may hold a secret of any name."""
    return url.partition("#")[0].partition("?")[0]


def is_local(dataset: str) -> bool:
    """True for a path (it starts with `/`, `./`, `../` or `~`), False for a hub id such as `owner/name`.

    Told from the spelling alone: whether a directory of that name happens to
    exist must not change what a params file means.
    """
    return dataset.startswith(("/", "./", "../", "~"))


def check_revision(dataset: str, revision: str | None) -> None:
    """ParamsError unless `revision` is a full commit hash or null: a branch or tag moves, and with it the corpus."""
    if revision is not None and not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ParamsError(
            f"'{revision}' does not pin the hub data set {dataset}",
            where="revision",
            fix="use the 40 hex digits of a commit, or null and run `python -m athanor pin`",
        )
