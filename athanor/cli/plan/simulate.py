"""What `dvc repro` would do, without doing it, propagated through the graph.

`dvc repro --dry` looks at each stage with what lies in the workspace now: a
stage behind one that would run is told to be up to date. Here every stage is
looked at with what the stages before it would leave. Hashing, the lock and the
keys of the run-cache are DVC's own; only its decisions are repeated.

Nothing is written but DVC's store of known file hashes, and no lock is taken,
so it works while another process runs `dvc repro`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.cli.summary import leaf
from athanor.runtime import dvc_view
from athanor.runtime.closure import file_digests, is_code, stage_module
from athanor.runtime.facts import flatten
from athanor.runtime.run import CODE

KEEP, RESTORE, RUN, FOLLOWS = "keep", "restore", "run", "follows"
ABSENT = "(absent)"
MAX_NAMES = 4


@dataclass(frozen=True)
class Change:
    """One difference from the lock; old and new of files are hashes.

    `kind`: command, parameter, file, input (what a stage makes), output, or
    always for a stage that runs every time.
    """

    kind: str
    name: str
    what: str
    old: Any = None
    new: Any = None

    def __str__(self) -> str:
        if self.kind == "parameter":
            return f"parameter {self.name}: {_short(self.old)} -> {_short(self.new)}"
        if self.kind == "command":
            return f"command: {self.old} -> {self.new}"
        return self.what if self.kind == "always" else f"{self.kind} {self.name} {self.what}"


@dataclass(frozen=True)
class Step:
    """What happens to one stage.

    keep: nothing. restore: DVC takes the outputs out of its cache. run: the
    command runs for certain. follows: an input is made anew; the command runs
    unless the input comes out with bytes that DVC has a result for.
    """

    stage: str
    action: str
    unrecorded: bool  # dvc.lock has no entry for it
    changes: tuple[Change, ...]
    waits: tuple[str, ...]  # inputs that an earlier stage makes anew
    inputs: dict[str, str | None]  # data dependencies to their hash as it will be; None when it cannot be known yet
    params: dict[str, Any]  # the parameters it declares
    command: str
    outputs_bytes: int | None  # as of the lock
    note: str = ""

    @property
    def runs(self) -> bool:
        return self.action in (RUN, FOLLOWS)

    def reasons(self) -> list[str]:
        """In words, parameters first; long lists are cut."""
        if self.unrecorded:
            lines = ["first run"] if self.runs else ["not in dvc.lock"]
        else:
            code = [c for c in self.changes if c.kind == "file" and is_code(c.name) and c.what == "changed"]
            others = sorted((c for c in self.changes if c not in code), key=lambda change: change.kind != "parameter")
            lines = [*map(str, others), *([f"code changed: {_names([c.name for c in code])}"] if code else [])]
        return lines + ([f"made anew before it: {_names(self.waits)}"] if self.waits else [])


class Unknown:
    """In place of a hash: the bytes are not there yet."""


UNKNOWN = Unknown()


def simulate(repo: Any, targets: Sequence[str] = ()) -> list[Step]:
    """A step for each stage that `dvc repro TARGETS` looks at, in its order.

    Data tracked by .dvc files has a step only when something happens to it.
    """
    with dvc_view.one_line_errors():
        view = View(repo)
        steps = [(stage, view.step(stage)) for stage in dvc_view.in_order(repo, targets)]
    return [step for stage, step in steps if stage.cmd or step.action != KEEP]


class View:
    """The workspace as the stages looked at so far would leave it."""

    def __init__(self, repo: Any) -> None:
        self.repo, self.root = repo, Path(repo.root_dir)
        self.made: dict[str, Any] = {}  # path of an output that changes, to the restored output or None
        self.makers = {out.fs_path for stage in repo.index.stages for out in stage.outs if stage.cmd}

    def step(self, stage: Any) -> Step:
        first = bool(stage.cmd) and not any(item.hash_info for item in (*stage.outs, *stage.deps))
        data = [dep for dep in stage.deps if dep not in stage.params]
        future = {dep.def_path: self.future(dep) for dep in data}
        changes = tuple(self.changes(stage, future))
        waits = [dep for dep in data if future[dep.def_path] is UNKNOWN]
        action, note = self._action(stage, changes, future, waits)
        sizes = [out.meta.size for out in stage.outs if out.meta.size]
        hashes = {
            dep.def_path: None if future[dep.def_path] is UNKNOWN else _value(future[dep.def_path])
            for dep in data
            if self._is_made(dep.fs_path)
        }
        frozen = bool(stage.frozen)
        shown = () if frozen and not note else changes
        return Step(
            stage.addressing,
            action,
            first,
            shown,
            () if frozen else tuple(dep.def_path for dep in waits),
            hashes,
            {name: value for dep in stage.params for name, value in (dep.hash_info.value or {}).items()},
            str(stage.cmd or ""),
            sum(sizes) if sizes else None,
            note,
        )

    def _action(
        self, stage: Any, changes: Sequence[Change], future: dict[str, Any], waits: Sequence[Any]
    ) -> tuple[str, str]:
        """The action and a note; enters what the stage will make into `made`."""
        if stage.frozen:
            bad = [change.name for change in changes if change.kind == "output"]
            return KEEP, f"frozen, but output {bad[0]} is not as recorded: dvc repro stops there" if bad else "frozen"
        if not changes and not waits:
            return KEEP, ""
        absent = [change.name for change in changes if change.kind in ("file", "input") and change.new == ABSENT]
        if absent:
            self.made |= dict.fromkeys((out.fs_path for out in stage.outs if stage.cmd), None)
            return RUN, f"{absent[0]} does not exist: dvc repro stops at this stage"
        if not stage.cmd:  # data tracked by a .dvc file
            lost = any(change.what == "is missing" for change in changes)
            return RUN, "dvc repro stops here: dvc checkout" if lost else "only recorded as it is now"
        same = not [change for change in changes if change.kind != "output"]
        self._take_over(stage, future)
        results = dvc_view.results(self.repo, stage, waits, same)
        if waits:
            possible = any(dvc_view.whole(self.repo, entry, stage) for entry in results)
            return FOLLOWS if not changes or possible else RUN, ""
        entry = next(results, None)
        restored = dvc_view.whole(self.repo, entry, stage) if entry is not None else None
        for out in stage.outs:
            self.made[out.fs_path] = restored[out.fs_path] if restored else None
        return RESTORE if restored else RUN, ""

    # -- what differs from the lock ------------------------------------------

    def changes(self, stage: Any, future: dict[str, Any]) -> Iterator[Change]:
        """Everything known to differ; what cannot be known yet is left out."""
        if stage.is_callback or stage.always_changed:
            yield Change("always", "", "runs every time")
        if stage.changed_stage():
            yield Change("command", "cmd", "changed", dvc_view.locked_command(stage), stage.cmd)
        for dep in stage.deps:
            if dep in stage.params:
                yield from param_changes(dep)
            else:
                edited = self._edited(stage, dep) if is_code(dep.def_path) else []
                for change in self._dep_change(dep, future[dep.def_path]):
                    yield from (dataclasses.replace(change, name=name) for name in edited or [change.name])
        for out in stage.outs:
            what = self._out_state(out)
            if what:
                yield Change("output", out.def_path, what, out.hash_info.value)

    def _dep_change(self, dep: Any, new: Any) -> Iterator[Change]:
        kind = "input" if self._is_made(dep.fs_path) else "file"
        if new is UNKNOWN:
            return
        if new is None:
            yield Change(kind, dep.def_path, "is missing", dep.hash_info.value, ABSENT)
        elif new[0] != dep.hash_info:
            what = "is new" if not dep.hash_info else "changed"
            yield Change(kind, dep.def_path, what, dep.hash_info.value, new[0].value)

    def _edited(self, stage: Any, folder: Any) -> list[str]:
        """The files of a folder of code that differ from those of the run that made the outputs, as far as it is known.

        None where only comments differ, or files that the stage does not use.
        """
        facts = leaf(self.root, stage.addressing)
        try:
            before = read_json(self.root / ".athanor" / "runs" / (facts or {})["run"] / CODE)
            now = file_digests(self.root, stage_module(str(stage.cmd)))
        except (AthanorError, SyntaxError, KeyError):
            return []
        inside = [name for name in {**before, **now} if name.startswith(f"{folder.def_path}/")]
        return sorted(name for name in inside if before.get(name) != now.get(name))

    def _is_made(self, path: str) -> bool:
        return any(_inside(path, out) or _inside(out, path) for out in self.makers)

    def _out_state(self, out: Any) -> str:
        if out.hash_info and out.use_cache and not dvc_view.cached(out):
            return "is not in the cache"
        state = out.workspace_status().get(str(out), "")
        return {"deleted": "is missing", "modified": "was modified", "new": "is not recorded"}.get(state, state)

    def future(self, dep: Any) -> Any:
        """(hash, meta) that a dependency will have; None when it will not exist, UNKNOWN when a stage makes it anew."""
        for path, out in self.made.items():
            if _inside(dep.fs_path, path):
                if out is None:
                    return UNKNOWN
                if dep.fs_path == path:
                    return out.hash_info, out.meta
                return dvc_view.inner_hash(out, dep.fs_path)
            if _inside(path, dep.fs_path):
                return UNKNOWN
        return dvc_view.current_hash(dep) if dep.exists else None

    def _take_over(self, stage: Any, future: dict[str, Any]) -> None:
        """Put what will be into the stage's dependencies, for the key of the run-cache; outputs count as unknown."""
        for dep in stage.deps:
            if dep in stage.params:
                dep.hash_info = dep.get_hash()
            elif future[dep.def_path] is not UNKNOWN:
                dep.hash_info, dep.meta = future[dep.def_path]
        for out in stage.outs:
            self.made[out.fs_path] = None


def param_changes(dep: Any) -> Iterator[Change]:
    """Leaves of one parameters file that differ from the lock; by DVC's rule, so 1 and 1.0 are equal."""
    status = dep.workspace_status()
    if not status:
        return
    if not dep.exists:
        yield Change("file", dep.def_path, "is missing", None, ABSENT)
        return
    old, new = dep.hash_info.value or {}, dep.read_params()
    prefix = "" if dep.def_path == dep.DEFAULT_PARAMS_FILE else f"{dep.def_path}:"
    changed = status[str(dep)]
    for name in changed if isinstance(changed, dict) else new:
        before, after = (dict(flatten({name: side[name]})) if name in side else {} for side in (old, new))
        both = dict.fromkeys((*after, *before))
        leaves = [key for key in both if before.get(key, ABSENT) != after.get(key, ABSENT)]
        for key in leaves:
            yield Change("parameter", prefix + key, "changed", before.get(key, ABSENT), after.get(key, ABSENT))
        if not leaves:  # an empty list or mapping has no leaves
            yield Change("parameter", prefix + name, "changed", old.get(name, ABSENT), new.get(name, ABSENT))


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _value(found: Any) -> str | None:
    return None if found is None else found[0].value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
