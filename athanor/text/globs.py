"""Files that globs match, in a fixed order."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape, has_magic
from pathlib import Path

from athanor.base.artifacts import sha256_bytes, sha256_file
from athanor.base.errors import InputError

Files = list[tuple[str, Path]]  # name for provenance, path
NOT_WALKED = frozenset(("node_modules", "__pycache__", "site-packages", "__MACOSX", "$RECYCLE.BIN"))
# What Windows and its programs leave in a folder, in small letters.
LITTER = frozenset(("desktop.ini", "thumbs.db", "ehthumbs.db"))
VIRTUAL_ENVIRONMENT = "pyvenv.cfg"  # a folder that holds this is one


def find(globs: Sequence[str]) -> Files:
    """Files matched by the globs as (name for provenance, path), each file once, in a fixed order.

    The name is relative to the part of the glob before its first wildcard, so
    that an absolute glob leaves no trace of the machine. Wildcards match no
    hidden names and no LITTER, follow no links to folders, and enter no virtual environment
    and none of NOT_WALKED. A name that holds glob signs matches itself. InputError for a glob that matches nothing, and for
    a link that leads to files which no one else would see change, or to files that are not here.
    """
    files: Files = []
    resolved_paths: set[Path] = set()
    for pattern in globs:
        path = Path(pattern).expanduser()
        base = _glob_base(path)
        matches = sorted(set(_matches(base, path.parts[len(base.parts) :], base.resolve())))
        if not matches:
            fix = "correct the glob in params.yaml or add the files"
            if path.is_dir():
                fix = f"it is a folder; name the files in it, for example {pattern.rstrip('/')}/**/*.md"
            raise InputError("no file matches", where=pattern, fix=fix)
        for match in matches:
            check_name(match)
            if match.resolve() not in resolved_paths:
                resolved_paths.add(match.resolve())
                files.append((match.relative_to(base).as_posix(), match))
    return files


def check_name(path: Path) -> None:
    """InputError for a name that is not UTF-8: manifests and DVC write names as text."""
    for number, part in enumerate(path.parts, 1):
        data = os.fsencode(part)
        if data != data.decode(errors="ignore").encode():
            where = os.path.join(*path.parts[:number])
            plain = (
                chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
                for byte in os.fsencode(where)
            )
            new = os.path.join(*path.parts[: number - 1], re.sub(rb"[^ -~]+", b"_", data).decode())
            fix = f"mv $'{''.join(plain)}' {shlex.quote(new)}; all of a folder: convmv -r -f cp866 -t utf8 --notest FOLDER"
            shown = os.fsencode(where).decode(errors="backslashreplace")
            raise InputError("the name is not UTF-8", where=shown, fix=fix)


def digest_of(files: Sequence[tuple[str, Path]]) -> str:
    """One digest over names and contents."""
    return sha256_bytes("".join(f"{name}\0{sha256_file(path)}\n" for name, path in files).encode())


def _glob_base(pattern: Path) -> Path:
    """The folder before the first wildcard; names that hold glob signs, escaped (`[[]1]`) or not, are none if they are there."""
    base = Path()
    for part in pattern.parts[:-1]:
        plain = re.sub(r"\[([*?[])\]", r"\1", part)
        if has_magic(part) and escape(plain) != part and not (base / part).is_dir():
            break
        base /= part if (base / part).is_dir() else plain
    return base


def _matches(folder: Path, patterns: Sequence[str], base: Path) -> Iterator[Path]:
    """Files below `folder` that the remaining parts of a glob match; `base` is where the search began, resolved."""
    pattern, remaining = patterns[0], patterns[1:]
    if not has_magic(pattern):
        path = folder / pattern
        if remaining and path.is_dir():
            yield from _matches(path, remaining, base)
        elif not remaining and path.is_file():
            yield path
        return
    if pattern == "**":
        yield from _matches(folder, remaining or ("*",), base)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=folder, fix="allow reading it") from None
    for entry in entries:
        path = folder / entry.name
        is_match = pattern in ("**", entry.name) or fnmatchcase(entry.name, pattern)
        if not is_match or (entry.name.startswith(".") and not pattern.startswith(".")):
            continue
        if "*" in pattern and (entry.name.lower() in LITTER or entry.name.startswith("~$")):
            continue
        if entry.is_symlink() and not path.exists() and ".git/annex" in os.readlink(path):
            raise InputError(
                "a link of git-annex to a file that is not here", where=path, fix=f"git annex get '{path}'"
            )
        if not entry.is_dir():
            if pattern != "**" and not remaining and entry.is_file():
                yield path
        elif pattern == "**" or remaining:
            if pattern in ("*", "**") and (entry.name in NOT_WALKED or (path / VIRTUAL_ENVIRONMENT).exists()):
                continue
            if not entry.is_symlink():
                yield from _matches(path, patterns if pattern == "**" else remaining, base)
            elif pattern != "**" or not path.resolve().is_relative_to(base):  # else its files are found where they lie
                raise InputError(
                    "a link to a folder: DVC would not see what changes behind it",
                    where=path,
                    fix="move the folder here, copy it, or remove the link",
                )
