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
            return f"parameter {self.name}: {_short_value(self.old)} -> {_short_value(self.new)}"
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
    pending_inputs: tuple[str, ...]  # inputs that an earlier stage makes anew
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
            return ["first run"] if self.runs else ["not in dvc.lock"]
        code = [c for c in self.changes if c.kind == "file" and is_code(c.name) and c.what == "changed"]
        others = sorted((c for c in self.changes if c not in code), key=lambda change: change.kind != "parameter")
        lines = [*map(str, others), *([f"code changed: {_short_list([c.name for c in code])}"] if code else [])]
        return lines + ([f"made anew before it: {_short_list(self.pending_inputs)}"] if self.pending_inputs else [])


class Unknown:
    """Stands for the hash of bytes that do not exist yet."""


UNKNOWN = Unknown()


def simulate(repo: Any, targets: Sequence[str] = ()) -> list[Step]:
    """A step for each stage that `dvc repro TARGETS` looks at, in its order.

    Data tracked by .dvc files has a step only when something happens to it.
    """
    with dvc_view.one_line_errors():
        view = WorkspaceView(repo)
        steps = [(stage, view.step(stage)) for stage in dvc_view.in_order(repo, targets)]
    return [step for stage, step in steps if stage.cmd or step.action != KEEP]


class WorkspaceView:
    """The workspace as the stages looked at so far would leave it."""

    def __init__(self, repo: Any) -> None:
        self.repo, self.root = repo, Path(repo.root_dir)
        self.pending_outputs: dict[str, Any] = {}  # path of an output that changes, to the restored output or None
        self.stage_outputs = {out.fs_path for stage in repo.index.stages for out in stage.outs if stage.cmd}

    def step(self, stage: Any) -> Step:
        unrecorded = bool(stage.cmd) and not any(item.hash_info for item in (*stage.outs, *stage.deps))
        data = [dep for dep in stage.deps if dep not in stage.params]
        future = {dep.def_path: self.future(dep) for dep in data}
        changes = tuple(self.changes(stage, future))
        pending_inputs = [dep for dep in data if future[dep.def_path] is UNKNOWN]
        action, note = self._action(stage, changes, future, pending_inputs)
        sizes = [out.meta.size for out in stage.outs if out.meta.size]
        hashes = {
            dep.def_path: None if future[dep.def_path] is UNKNOWN else _hash_value(future[dep.def_path])
            for dep in data
            if self._is_stage_output(dep.fs_path)
        }
        frozen = bool(stage.frozen)
        shown_changes = () if frozen and not note else changes
        return Step(
            stage.addressing,
            action,
            unrecorded,
            shown_changes,
            () if frozen else tuple(dep.def_path for dep in pending_inputs),
            hashes,
            {name: value for dep in stage.params for name, value in (dep.hash_info.value or {}).items()},
            str(stage.cmd or ""),
            sum(sizes) if sizes else None,
            note,
        )

    def _action(
        self, stage: Any, changes: Sequence[Change], future: dict[str, Any], pending_inputs: Sequence[Any]
    ) -> tuple[str, str]:
        """The action and a note; enters what the stage will make into `pending_outputs`."""
        if stage.frozen:
            outs = [change.name for change in changes if change.kind == "output"]
            return (
                KEEP,
                f"frozen, but output {outs[0]} is not as recorded: dvc repro stops there" if outs else "frozen",
            )
        if not changes and not pending_inputs:
            return KEEP, ""
        absent = [change.name for change in changes if change.kind in ("file", "input") and change.new == ABSENT]
        if absent:
            self.pending_outputs |= dict.fromkeys((out.fs_path for out in stage.outs if stage.cmd), None)
            return RUN, f"{absent[0]} does not exist: dvc repro stops at this stage"
        if not stage.cmd:  # data tracked by a .dvc file
            is_missing = any(change.what == "is missing" for change in changes)
            return RUN, "dvc repro stops here: dvc checkout" if is_missing else "only recorded as it is now"
        only_outputs_differ = not [change for change in changes if change.kind != "output"]
        self._set_expected_hashes(stage, future)
        results = dvc_view.results(self.repo, stage, pending_inputs, only_outputs_differ)
        if pending_inputs:
            possible = any(dvc_view.whole(self.repo, entry, stage) for entry in results)
            return FOLLOWS if not changes or possible else RUN, ""
        entry = next(results, None)
        restored = dvc_view.whole(self.repo, entry, stage) if entry is not None else None
        for out in stage.outs:
            self.pending_outputs[out.fs_path] = restored[out.fs_path] if restored else None
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
                for change in self._dep_change(dep, future[dep.def_path]):
                    edited = self._edited_files(stage, dep) if is_code(dep.def_path) else []
                    yield from (dataclasses.replace(change, name=name) for name in edited or [change.name])
        for out in stage.outs:
            what = self._output_state(out)
            if what:
                yield Change("output", out.def_path, what, out.hash_info.value)

    def _dep_change(self, dep: Any, new: Any) -> Iterator[Change]:
        kind = "input" if self._is_stage_output(dep.fs_path) else "file"
        if new is UNKNOWN:
            return
        if new is None:
            yield Change(kind, dep.def_path, "is missing", dep.hash_info.value, ABSENT)
        elif new[0] != dep.hash_info:
            what = "is new" if not dep.hash_info else "changed"
            yield Change(kind, dep.def_path, what, dep.hash_info.value, new[0].value)

    def _edited_files(self, stage: Any, folder: Any) -> list[str]:
        """The files of a folder of code that differ from those of the run that made the outputs, as far as it is known.

        Empty where only comments differ, or files that the stage does not use.
        """
        facts = leaf(self.root, stage.addressing)
        try:
            before = read_json(self.root / ".athanor" / "runs" / (facts or {})["run"] / CODE)
            current = file_digests(self.root, stage_module(str(stage.cmd)))
        except (AthanorError, SyntaxError, KeyError):
            return []
        in_folder = [name for name in {**before, **current} if name.startswith(f"{folder.def_path}/")]
        return sorted(name for name in in_folder if before.get(name) != current.get(name))

    def _is_stage_output(self, path: str) -> bool:
        return any(_is_inside(path, out) or _is_inside(out, path) for out in self.stage_outputs)

    def _output_state(self, out: Any) -> str:
        if out.hash_info and out.use_cache and not dvc_view.cached(out):
            return "is not in the cache (dvc pull gets what the remote has; what it lacks: dvc push where it was made)"
        state = out.workspace_status().get(str(out), "")
        return {"deleted": "is missing", "modified": "was modified", "new": "is not recorded"}.get(state, state)

    def future(self, dep: Any) -> Any:
        """The (hash, meta) a dependency will have; None when it will not exist, UNKNOWN when a stage makes it anew."""
        for path, out in self.pending_outputs.items():
            if _is_inside(dep.fs_path, path):
                if out is None:
                    return UNKNOWN
                if dep.fs_path == path:
                    return out.hash_info, out.meta
                return dvc_view.inner_hash(out, dep.fs_path)
            if _is_inside(path, dep.fs_path):
                return UNKNOWN
        return dvc_view.current_hash(dep) if dep.exists else None

    def _set_expected_hashes(self, stage: Any, future: dict[str, Any]) -> None:
        """Give the stage's dependencies their expected hashes, for the run-cache's key; mark its outputs unknown."""
        for dep in stage.deps:
            if dep in stage.params:
                dep.hash_info = dep.get_hash()
            elif future[dep.def_path] is not UNKNOWN:
                dep.hash_info, dep.meta = future[dep.def_path]
        for out in stage.outs:
            self.pending_outputs[out.fs_path] = None


def param_changes(dep: Any) -> Iterator[Change]:
    """The parameters of one file that differ from the lock, by DVC's rule: 1 and 1.0 are equal."""
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
        all_names = dict.fromkeys((*after, *before))
        leaves = [key for key in all_names if before.get(key, ABSENT) != after.get(key, ABSENT)]
        for key in leaves:
            yield Change("parameter", prefix + key, "changed", before.get(key, ABSENT), after.get(key, ABSENT))
        if not leaves:  # an empty list or mapping has no leaves
            yield Change("parameter", prefix + name, "changed", old.get(name, ABSENT), new.get(name, ABSENT))


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _short_list(names: Sequence[str]) -> str:
    hidden_count = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {hidden_count} more" if hidden_count > 0 else "")


def _hash_value(expected: Any) -> str | None:
    return None if expected is None else expected[0].value


def _short_value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
