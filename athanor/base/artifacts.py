"""Artifacts on disk: atomic writes, canonical JSON, hashes and manifests.

Every directory that one stage hands to the next holds a `manifest.json` with
its kind, schema version, counts, file hashes and the digests of its parents.
A manifest carries no times, hosts or absolute paths, so equal content has
equal bytes and DVC can stop early. Standard library only: the training core
uses this module on machines where nothing but torch and numpy is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError

AnyPath = str | os.PathLike[str]
MANIFEST, OLD = "manifest.json", ".old"


def canonical_json(value: Any) -> str:
    """JSON text that depends on the value only: sorted keys, no NaN, newline at the end."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """SHA-256 of a JSON-serialisable value in canonical form."""
    return sha256_bytes(canonical_json(value).encode())


def sha256_file(path: AnyPath) -> str:
    with naming(Path(path)), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rounded(value: Any, digits: int = 6) -> Any:
    """Round every float in a nested value to significant digits, for metrics that are diffed.

    Non-finite floats become None, because JSON has no word for them.
    """
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    raise TypeError(f"cannot put {type(value).__name__} into a metric")


def fsync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(path: Path) -> None:
    """Flush every file and directory below `path` to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_dir(Path(folder))


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part.

    A new inode every time: an output may be a hard link into DVC's cache, and
    writing through it would corrupt the cache.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_dir(path.parent)


def write_text(path: AnyPath, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: AnyPath, value: Any) -> None:
    write_text(path, canonical_json(value))


def read_json(path: AnyPath) -> Any:
    try:
        with naming(Path(path)):
            if not stat.S_ISREG(os.stat(path).st_mode):  # nobody may write to a pipe, and a device has no end
                raise InputError("not an ordinary file", where=path, fix="remove it")
            return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("file not found", where=path, fix="run the stage that makes it: dvc repro") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON ({error})", where=path, fix="delete it and run dvc repro") from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that has none: a failed write, unlike a failed open, does not name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def new_dir(path: AnyPath) -> Iterator[Path]:
    """Build a directory under a temporary name and publish it whole.

    Yields the temporary directory. When the block ends without an error its
    files are fsynced and it takes the place of `path`; on an error it is
    removed and whatever stood at `path` before is there again. Killed between
    the two renames it leaves the old one as `.NAME.*.old`, and `athanor
    doctor --fix` puts that back.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        os.chmod(temporary, 0o755)
        with naming(path):
            yield temporary
            fsync_tree(temporary)
        aside = None
        try:
            if path.exists():
                aside = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=OLD, dir=path.parent)
                os.replace(path, aside)
            os.replace(temporary, path)
        except BaseException:
            if aside is not None and not path.exists():
                os.replace(aside, path)
            raise
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
        fsync_dir(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def link(path: AnyPath, target: AnyPath) -> None:
    """Give a finished file a second name; a copy where the file system has no links, or `target` lies on another.

    FileExistsError where `target` exists: it may be a link into DVC's cache, which a copy would write through.
    """
    try:
        os.link(path, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(path, target)


def write_manifest(
    folder: AnyPath,
    *,
    kind: str,
    version: int,
    counts: Mapping[str, Any],
    parents: Mapping[str, str] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Describe the finished files of `folder` in its manifest; returns the manifest.

    `kind` and `version` name the schema, `parents` maps a name to the manifest
    digest of an input. Every file already in the folder is listed with its
    size and SHA-256.
    """
    folder = Path(folder)
    files = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    manifest = {
        "kind": kind,
        "version": version,
        "counts": dict(counts),
        "parents": dict(parents or {}),
        "files": files,
        **facts,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: AnyPath, kind: str, version: int) -> dict[str, Any]:
    """Read a manifest and refuse another kind or schema version (InputError)."""
    path = Path(folder) / MANIFEST
    manifest = read_json(path)
    kind_and_version = (manifest.get("kind"), manifest.get("version"))
    if kind_and_version != (kind, version):
        raise InputError(
            f"expected a {kind} artifact of version {version}, found {kind_and_version[0]} version {kind_and_version[1]}",
            where=path,
            fix="run dvc repro to rebuild it with this version of the code",
        )
    return manifest


def manifest_digest(folder: AnyPath) -> str:
    """SHA-256 of a folder's manifest; stands for the folder's whole content in `parents`."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise InputError("file not found", where=path, fix="run the stage that makes it: dvc repro")
    return sha256_file(path)


def verify_files(folder: AnyPath) -> None:
    """Re-hash the files that a manifest lists; InputError names the first that differs."""
    folder = Path(folder)
    for name, facts in read_json(folder / MANIFEST)["files"].items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != facts["sha256"]:
            raise InputError("missing or changed since it was written", where=path, fix="dvc checkout --force")
