"""The results DVC has: entries of dvc.lock and of the run-cache whose objects are really in the cache.

The keys are DVC's. Its readers are not used as they are, because they repair
while they look: they delete damaged entries and objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Results:
    """Look-ups in the caches of one DVC repository."""

    def __init__(self, repo: Any) -> None:
        self.repo = repo

    def recorded(self, stage: Any, same: bool) -> dict[str, Any] | None:
        """The lock's entry when only outputs are missing, else the newest of the run-cache, as DVC does it."""
        from dvc.stage.cache import _get_cache_hash
        from dvc.stage.serialize import to_single_stage_lockfile

        if not _cacheable(stage):
            return None
        mine = to_single_stage_lockfile(stage)
        if same and all(out.hash_info for out in stage.outs):
            return mine
        folder = Path(self.repo.stage_cache._get_cache_dir(_get_cache_hash(mine, key=True)))
        entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
        return _load(entries[-1]) if entries else None

    def candidates(self, stage: Any, waits: Sequence[Any], same: bool) -> Iterator[dict[str, Any]]:
        """Results that fit all that is known already, whatever the inputs that are made anew turn out to be."""
        from dvc.stage.cache import _get_cache_hash
        from dvc.stage.serialize import to_single_stage_lockfile

        if not _cacheable(stage):
            return
        mine = to_single_stage_lockfile(stage)
        if same and all(out.hash_info for out in stage.outs):
            yield mine
        open_paths = {dep.def_path for dep in waits}
        # A cheap look first, because parsing an entry takes milliseconds; words survive YAML's line breaks.
        words = set(stage.cmd.split()) if re.fullmatch(r"[\w ./=-]+", str(stage.cmd)) else set()
        for path in Path(self.repo.stage_cache.cache_dir).glob("*/*/*"):
            if not words <= set(path.read_text(encoding="utf-8", errors="replace").split()):
                continue
            entry = _load(path)
            theirs = {dep["path"]: dep for dep in (entry or {}).get("deps", ())}
            if entry is None or not open_paths <= set(theirs):
                continue
            deps = [theirs[dep["path"]] if dep["path"] in open_paths else dep for dep in mine["deps"]]
            # DVC's own key decides whether all the rest is equal.
            if _get_cache_hash({**mine, "deps": deps}, key=True) == path.parent.name:
                yield entry

    def whole(self, entry: dict[str, Any], stage: Any) -> dict[str, Any] | None:
        """Path to output of a recorded result, or None when the cache lacks one of its objects."""
        outs = self.repo.stage_cache._create_stage(entry, wdir=stage.wdir).outs
        found = {out.fs_path: out for out in outs}
        whole = all(out.fs_path in found for out in stage.outs) and all(self.cached(out) for out in outs)
        return found if whole else None

    def cached(self, out: Any) -> bool:
        """DVC's check without its repairs: it deletes damaged objects and makes the others read-only."""
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


def _cacheable(stage: Any) -> bool:
    """Whether DVC keeps results of this stage in the run-cache at all."""
    if stage.is_callback or stage.always_changed or not all((stage.cmd, stage.deps, stage.outs)):
        return False
    local = all(item.protocol == "local" and item.def_path for item in (*stage.deps, *stage.outs))
    return local and all(out.is_in_repo and not out.persist for out in stage.outs)


def _load(path: Path) -> dict[str, Any] | None:
    """An entry of the run-cache, None for a damaged one. DVC's own reader deletes damaged entries."""
    from dvc.schema import COMPILED_LOCK_FILE_STAGE_SCHEMA
    from dvc.utils.serialize import YAMLFileCorruptedError, load_yaml
    from voluptuous import Invalid

    try:
        return COMPILED_LOCK_FILE_STAGE_SCHEMA(load_yaml(str(path)))
    except (YAMLFileCorruptedError, Invalid, OSError):
        return None
