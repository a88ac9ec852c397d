"""Everything that this project uses of DVC's internals, so that what a new version of DVC may break is in one module.

`athanor plan`, `compare`, `pin` and the chat server ask DVC's own functions for hashes, locks, keys of the
run-cache and names of experiments, so that they decide as DVC does. DVC is imported when it is asked: that
takes a second. Its readers of the caches are not used as they are, because they repair while they look: they delete
damaged entries and objects, and make the others read-only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.runtime import dvc_lock
from athanor.runtime.sharing import cache_folder


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """DVC's errors as ours, in one line."""
    from dvc.exceptions import DvcException

    try:
        yield
    except DvcException as error:
        text = " ".join(str(error).split())
        fix = (
            "git init && git add -A && git commit -m start" if "is not a git repository" in text else "see: dvc status"
        )
        raise InputError(text, where="dvc", fix=fix) from None


def open_repo(root: Path) -> Any:
    """DVC's view of the checkout; InputError where it has none. DVC's own messages are kept off the terminal."""
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.ERROR)
    with one_line_errors():
        try:
            repo = Repo(str(root))
        except NotDvcRepoError as error:
            raise InputError(str(error), where=str(root), fix="run this in the checkout") from None
        repo.index.check_graph()
        return repo


def busy(folder: Path) -> str:
    """The DVC process that is at work in the checkout with this `.dvc/tmp`, or ""."""
    import psutil

    try:
        locks = json.loads((folder / "rwlock").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    live = [holder for holder in locks.get("write", {}).values() if psutil.pid_exists(holder["pid"])]
    return f"{live[0]['cmd']} (PID {live[0]['pid']})" if live else ""


def in_order(repo: Any, targets: Sequence[str]) -> list[Any]:
    """The stages that `dvc repro TARGETS` looks at, in its order."""
    from dvc.repo.reproduce import collect_stages, get_active_graph, plan_repro

    return plan_repro(get_active_graph(repo.index.graph), collect_stages(repo, targets or ["dvc.yaml"]))


# -- dependencies and outputs ------------------------------------------------------------------------------------------


def locked_command(stage: Any) -> str | None:
    if not getattr(stage, "name", None):
        return None
    return dvc_lock.stages(Path(stage.dvcfile._lockfile.path)).get(stage.name, {}).get("cmd")


def current_hash(dep: Any) -> tuple[Any, Any]:
    """(hash, meta) of a dependency as it is in the workspace."""
    meta, hash_info = dep._get_hash_meta()
    return hash_info, meta


def inner_hash(out: Any, path: str) -> tuple[Any, Any] | None:
    """(hash, meta) of a file or folder below a recorded output; None when it holds no such thing."""
    from dvc_data.hashfile.meta import Meta

    obj = out.get_obj(filter_info=path)
    return None if obj is None else (obj.hash_info, Meta())


def cached(out: Any) -> bool:
    """Whether the cache has every object of an output, undamaged."""
    from dvc_data.hashfile.hash import hash_file

    odb, obj = out.cache, out.get_obj() if out.hash_info else None
    if obj is None:
        return False
    for oid in [*(child.value for _, _, child in obj), obj.oid] if out.hash_info.isdir else [obj.oid]:
        path = odb.oid_to_path(oid)
        if not os.path.exists(path):
            return False
        if not odb.is_protected(path):
            _, actual = hash_file(path, odb.fs, odb.hash_name, odb.state)
            if actual.value.split(".")[0] != oid.split(".")[0]:
                return False
    return True


def fetch(root: Path, missing: Mapping[str, str]) -> None:
    """Bring files, path to MD5, from the remote into the cache; InputError when one cannot be had.

    Not by revision: `Repo.fetch(revs=...)` looks for a remote with a relative path below `/` (DVC 3.67.1).
    """
    from dvc.exceptions import DvcException
    from dvc_data.hashfile.hash_info import HashInfo

    cache, why = cache_folder(root) / "files/md5", "the remote does not have it"
    try:
        open_repo(root).cloud.pull([HashInfo("md5", md5) for md5 in missing.values()])
    except DvcException as error:
        why = " ".join(str(error).split())
    for path, md5 in missing.items():
        if not (cache / md5[:2] / md5[2:]).is_file():
            fix = "dvc push (for an experiment dvc exp push) where it was made"
            raise InputError(f"not in DVC's cache, and not to be fetched: {why}", where=path, fix=fix)


# -- results that were recorded ----------------------------------------------------------------------------------------


def results(repo: Any, stage: Any, waits: Sequence[Any], same: bool) -> Iterator[dict[str, Any]]:
    """Entries of dvc.lock and of the run-cache that fit all that is known already of a stage.

    `same`: only outputs differ from the lock. `waits` are inputs that are made anew, so every entry fits that differs in
    nothing else; without them there is at most one, the lock's or the newest of the run-cache, as DVC takes it.
    """
    from dvc.stage.cache import _get_cache_hash
    from dvc.stage.serialize import to_single_stage_lockfile

    if not _cacheable(stage):
        return
    own_entry = to_single_stage_lockfile(stage)
    if same and all(out.hash_info for out in stage.outs):
        yield own_entry
        if not waits:
            return
    if not waits:
        folder = Path(repo.stage_cache._get_cache_dir(_get_cache_hash(own_entry, key=True)))
        paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
        yield from filter(None, map(_load, paths[-1:]))
        return
    open_paths = {dep.def_path for dep in waits}
    # A cheap look first, because parsing an entry takes milliseconds; words survive YAML's line breaks.
    words = set(stage.cmd.split()) if re.fullmatch(r"[\w ./=-]+", str(stage.cmd)) else set()
    for path in Path(repo.stage_cache.cache_dir).glob("*/*/*"):
        if not words <= set(path.read_text(encoding="utf-8", errors="replace").split()):
            continue
        entry = _load(path)
        entry_deps = {dep["path"]: dep for dep in (entry or {}).get("deps", ())}
        if entry is None or not open_paths <= set(entry_deps):
            continue
        deps = [entry_deps[dep["path"]] if dep["path"] in open_paths else dep for dep in own_entry["deps"]]
        # DVC's own key decides whether all the rest is equal.
        if _get_cache_hash({**own_entry, "deps": deps}, key=True) == path.parent.name:
            yield entry


def whole(repo: Any, entry: dict[str, Any], stage: Any) -> dict[str, Any] | None:
    """Path to output of a recorded result, or None when the cache lacks one of its objects."""
    outs = {out.fs_path: out for out in repo.stage_cache._create_stage(entry, wdir=stage.wdir).outs}
    return outs if all(out.fs_path in outs for out in stage.outs) and all(map(cached, outs.values())) else None


def _cacheable(stage: Any) -> bool:
    """Whether DVC keeps results of this stage in the run-cache at all."""
    if stage.is_callback or stage.always_changed or not all((stage.cmd, stage.deps, stage.outs)):
        return False
    local = all(item.protocol == "local" and item.def_path for item in (*stage.deps, *stage.outs))
    return local and all(out.is_in_repo and not out.persist for out in stage.outs)


def _load(path: Path) -> dict[str, Any] | None:
    """An entry of the run-cache, None for a damaged one."""
    from dvc.schema import COMPILED_LOCK_FILE_STAGE_SCHEMA
    from dvc.utils.serialize import YAMLFileCorruptedError, load_yaml
    from voluptuous import Invalid

    try:
        return COMPILED_LOCK_FILE_STAGE_SCHEMA(load_yaml(str(path)))
    except (YAMLFileCorruptedError, Invalid, OSError):
        return None


# -- experiments, params.yaml ------------------------------------------------------------------------------------------


def experiment(root: Path, name: str) -> tuple[str, list[str]]:
    """The commit of an experiment, "" when there is none of this name; and the names that there are."""
    from dvc.repo.experiments.exceptions import AmbiguousExpRefInfo
    from dvc.repo.experiments.utils import exp_refs, resolve_name
    from scmrepo.git import Git

    with contextlib.closing(Git(str(root))) as scm:
        refs = list(exp_refs(scm))
        try:
            ref = resolve_name(scm, name)[name]
        except AmbiguousExpRefInfo:
            matching = sorted(str(info) for info in refs if info.name == name)
            raise InputError(
                "several experiments have this name", where=name, fix=f"use {' or '.join(matching)}"
            ) from None
        return str(scm.get_ref(str(ref))) if ref else "", [info.name for info in refs]


REMOVED = object()


def edited_yaml(text: str, values: Mapping[tuple[str | int, ...], Any]) -> str:
    """YAML with values put in at their paths, or taken out (`REMOVED`), in the layout in which DVC writes; comments and
    order are kept."""
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    data = parse_yaml_for_update(text, "params.yaml")
    for (*path, last), value in values.items():
        inner = data
        for key in path:
            inner = inner[key]
        if value is REMOVED:
            del inner[last]
        else:
            inner[last] = value
    # The blank line after a section belongs to its last value: another one has none, and a new key comes after it.
    apart = set(re.findall(r"\n\n(\w+:)", text))
    return re.sub(
        r"\n\n?((?: .*\n)+)(?=(\w+:))", lambda at: f"\n{at[1]}\n" if at[2] in apart else at[0], dumps_yaml(data)
    )
