"""Files of object stores and of hub data sets by fsspec: listed, then fetched in blocks by tasks of the executor.

The listing in the slot says what identifies each object's content (its ETag, generation or blob). An object that
is another one later is refused, whichever of a run's processes meets it: part of a corpus may not be of another day.
A part file belongs to address, size and identity, and is continued by whoever does its task next.

Retries and rate limits are those of the client libraries. What they say of an error is reduced to its code, because
it may repeat a key that the environment does not name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

from athanor.base.artifacts import digest, naming, read_json, sha256_file, write_json
from athanor.base.errors import InputError
from athanor.base.work import Facts, MapShards, check_stop
from athanor.sources.params import RemoteSource
from athanor.text import rows
from athanor.text.globs import Files

BLOCK_BYTES = 16 << 20  # of one request: what a kill or a lost connection costs
LISTING, FILES, PARTS = "listing.json", "files", "parts"
IDENTITIES = ("ETag", "generation", "etag", "blob_id")  # of s3, gs, az and hf
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}
ACCESS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for a store that is not Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
    "hf": "HF_TOKEN",
}


@dataclass(frozen=True)
class RemoteObject:
    url: str
    bytes: int
    identity: str

    @property
    def key(self) -> str:
        return digest(astuple(self))[:16]

    @property
    def file_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.url.rpartition("/")[2])[-100:]


def slot(source: RemoteSource) -> tuple[str, str, Facts]:
    """Name, module and inputs of the folder for the source's progress."""
    return "remote", __name__, {"type": source.type, "urls": list(source.urls)}


def probe(source: RemoteSource, folder: Path) -> list[RemoteObject]:
    """Objects that are not in `folder` yet; InputError where an object cannot be had, or is not the one of an earlier run."""
    return [item for item in list_objects(source, folder) if not (folder / FILES / item.key).is_dir()]


def fetch(source: RemoteSource, folder: Path, map_shards: MapShards) -> tuple[Files, list[Facts]]:
    """Bring every object into `folder`; returns (address, path) in a fixed order, and the provenance of each."""
    objects = list_objects(source, folder)
    write_json(folder / LISTING, [astuple(item) for item in objects])
    tasks = {item.key: (item, folder) for item in objects}
    for stale in (folder / FILES).glob("*"):  # of an object that was another one in an earlier listing
        if stale.name not in tasks:
            shutil.rmtree(stale)
    (folder / PARTS).mkdir(exist_ok=True)
    sizes = {item.key: item.bytes for item in objects}
    received = map_shards(receive, tasks, folder / FILES, desc=source.name, sizes=sizes)
    shutil.rmtree(folder / PARTS)
    files = [(item.url, folder / FILES / item.key / item.file_name) for item in objects]
    return files, [asdict(item) | received[item.key] for item in objects]


def list_objects(source: RemoteSource, folder: Path) -> list[RemoteObject]:
    """The objects that the addresses match now, in a fixed order; InputError if they are not those of an earlier run."""
    found: dict[str, RemoteObject] = {}
    for pattern in source.urls:
        matches = _matches(pattern)
        if not matches:
            fix = "correct the address in params.yaml; all files of a folder are FOLDER/**/*.parquet"
            raise InputError("no object matches", where=pattern, fix=fix)
        found |= {item.url: item for item in matches}
    objects = list(found.values())
    for item in objects if source.on_unreadable == "refuse" else []:
        try:
            rows.file_kind(Path(item.url))
        except InputError as error:
            raise InputError(error.what, where=item.url, fix=error.fix) from None
    if (path := folder / LISTING).is_file():
        before = {url: RemoteObject(url, *others) for url, *others in read_json(path)}
        changed = sorted(url for url in {**before, **found} if before.get(url) != found.get(url))
        if changed:
            url = changed[0]
            how = "is gone" if url not in found else "has changed" if url in before else "is new"
            others = f", and so are {len(changed) - 1:,} others" if changed[1:] else ""
            raise _changed(url, f"{how} since an earlier run listed it{others}", folder)
    return objects


def receive(task: tuple[RemoteObject, Path], out: Path) -> Facts:
    """Bring one object into `out`; whoever was killed at it left a part, which is continued."""
    item, folder = task
    part = folder / PARTS / item.key  # not in `out`, which goes with a killed worker
    part.touch()
    with naming(part), open(part, "r+b") as file:  # not "ab": a worker that was given up may write the same bytes there
        start, end = file.seek(0, os.SEEK_END), -1
        while end < item.bytes:
            end = min(start + BLOCK_BYTES, item.bytes)
            block = _block(item, start, end, folder)
            _check_same(item, folder)  # before it is kept
            start += file.write(block)
            file.flush()
            os.fsync(file.fileno())  # its length is what a resumed run believes
            check_stop()
    checksum = sha256_file(part)
    os.replace(part, out / item.file_name)
    return {"sha256": checksum}


def _block(item: RemoteObject, start: int, end: int, folder: Path) -> bytes:
    try:
        with _asking(item.url) as (store, path):
            block = store.cat_file(path, start=start, end=end) if start < end else b""
        if len(block) == end - start:
            return block
        what = f"{len(block):,} of {end - start:,} bytes came"
        raise InputError(what, where=item.url, fix="run again: what was received is kept")
    except InputError:
        _check_same(item, folder)  # a range that is not there is one of a shorter object
        raise


def _check_same(item: RemoteObject, folder: Path) -> None:
    with _asking(item.url) as (store, path):
        now = _object(item.url, store.info(path))
    if now != item:
        raise _changed(item.url, "has changed since it was listed", folder)


def _changed(url: str, what: str, folder: Path) -> InputError:
    fix = f"put it back; or delete {folder / LISTING} to take what is there now, equal objects are not fetched again"
    return InputError(what, where=url, fix=fix)


def _matches(pattern: str) -> list[RemoteObject]:
    """Objects that an address matches, by name. Not by `glob`, which leaves out folders that it may not read."""
    from fsspec.utils import glob_translate

    scheme = pattern.partition("://")[0]
    with _asking(pattern) as (store, path):
        parts = path.split("/")
        plain = next((number for number, part in enumerate(parts) if has_magic(part)), None)
        infos = {path: store.info(path)} if plain is None else store.find("/".join(parts[:plain]), detail=True)
    matching = re.compile(glob_translate(path)).match
    names = sorted(name for name, info in infos.items() if info["type"] == "file" and (plain is None or matching(name)))
    return [_object(f"{scheme}://{name}", infos[name]) for name in names]


def _object(url: str, info: Facts) -> RemoteObject:
    identity = next((str(info[name]) for name in IDENTITIES if info.get(name)), "")
    return RemoteObject(url, info["size"], identity.strip('"'))


@contextlib.contextmanager
def _asking(url: str) -> Iterator[tuple[Any, str]]:
    """The store of an address, and the address there; its errors in one line without the client's words."""
    scheme = url.partition("://")[0]
    store, fix = None, f"set {ACCESS[scheme]}"
    try:
        store = _store(scheme)
        yield store, store._strip_protocol(url)
    except ImportError:
        import fsspec

        what = f"{scheme}:// needs the package {PACKAGES[scheme]} (extra {scheme})"
        raise InputError(what, where=url, fix=f"pip install {PACKAGES[scheme]} fsspec=={fsspec.__version__}") from None
    except FileNotFoundError:
        what, fix = "no such bucket or object", f"correct the address in params.yaml, or {fix}"
        raise InputError(what, where=url, fix=fix) from None
    except PermissionError as error:
        key = (
            "without a key" if getattr(store, "storage_options", {}).get("anon") else "with the key of the environment"
        )
        raise InputError(f"access {key} is refused ({_code(error)})", where=url, fix=fix) from None
    except Exception as error:
        fix = f"check the network and {fix}; what was received is kept, run again"
        raise InputError(f"cannot be read ({_code(error)})", where=url, fix=fix) from None


def _store(scheme: str) -> Any:
    """The file system of a scheme, as the environment configures it. Only s3 has to be asked for access without a key."""
    import fsspec

    return fsspec.filesystem(
        scheme, use_listings_cache=False, **({"anon": True} if scheme == "s3" and _no_key() else {})
    )


@functools.cache  # where there is none, a machine of the cloud is asked for a role's, which takes seconds
def _no_key() -> bool:
    import fsspec
    from botocore.session import Session

    settings = fsspec.config.conf.get("s3", {})  # FSSPEC_S3_...
    return not {"anon", "key", "profile"} & settings.keys() and Session().get_credentials() is None


def _code(error: Exception) -> str:
    """What kind of error it is: the code of a store's answer, or the name of its type."""
    first = error.__cause__ or error
    response = getattr(first, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code or getattr(response, "status_code", None) or type(first).__name__)
