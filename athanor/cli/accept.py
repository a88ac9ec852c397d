"""Keep the results after an edit of comments, docstrings or layout.

    python -m athanor accept [STAGE ...]

DVC sees another hash of a .py file and would run the stage again. Here the
syntax trees of the stage's code, without docstrings, are compared with those
of the run that made the outputs (`code` in metrics/runs/<stage>.json). When
they are equal the lock is brought up to date as `dvc commit -f STAGE` does it:
the outputs stay, and the run-cache gets an entry under the new hashes, so that
going to other parameters and back restores them without a run.

A stage with any other difference (parameters, inputs, command, outputs) is
refused whole. Without a STAGE, every stage with a changed .py file is tried.

Exit status: 0 accepted or nothing to accept, 1 a stage was refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.errors import AthanorError, InputError
from athanor.cli.plan.simulate import Change, WorkspaceView
from athanor.cli.summary import leaf
from athanor.runtime import dvc_view
from athanor.runtime.closure import closure, code_digest, is_code, stage_module


@dataclass(frozen=True)
class Verdict:
    """`files` were accepted unless there is a `refusal`; neither means that nothing had changed."""

    stage: str
    files: tuple[str, ...]
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.stage}: refused, {self.refusal}"
        return f"{self.stage}: accepted {', '.join(self.files)}" if self.files else f"{self.stage}: nothing to accept"


def accept(root: Path, names: Sequence[str] = ()) -> list[Verdict]:
    """A verdict for each named stage, or for each stage with a changed .py file."""
    repo = dvc_view.open_repo(root)
    with dvc_view.locked(repo):  # from the look at the files to the new lock nobody else may change them
        known = {stage.addressing: stage for stage in repo.index.stages if stage.cmd}
        for name in names:
            if name not in known:
                raise InputError(f"no stage '{name}'", where="dvc.yaml", fix=f"name one of: {', '.join(known)}")
        results = [_verdict_of(repo, root, known[name], named=bool(names)) for name in dict.fromkeys(names or known)]
        verdicts = [verdict for verdict in results if verdict is not None]
        dvc_view.commit([known[verdict.stage] for verdict in verdicts if verdict.files and not verdict.refusal])
        return verdicts


def _verdict_of(repo: Any, root: Path, stage: Any, *, named: bool) -> Verdict | None:
    """The verdict on a stage; None for one that was not named and has no changed code."""
    if stage.frozen or not any(out.hash_info for out in stage.outs):
        refusal = "it is frozen" if stage.frozen else "it has not run yet: dvc repro"
        return Verdict(stage.addressing, (), refusal) if named else None
    view = WorkspaceView(repo)
    files_now = {dep.def_path: view.future(dep) for dep in stage.deps if dep not in stage.params}
    changes = list(view.changes(stage, files_now))
    files = tuple(change.name for change in changes if change.kind == "file" and is_code(change.name))
    if not files and not (named and changes):
        return Verdict(stage.addressing, ()) if named else None
    return Verdict(stage.addressing, files, _refusal(root, stage, changes, files))


def _refusal(root: Path, stage: Any, changes: Sequence[Change], files: Sequence[str]) -> str:
    """Why the lock must not follow the workspace; "" when only the looks of code have changed."""
    others = [str(change) for change in changes if change.name not in files]
    if others:
        return f"more than code differs from dvc.lock: {'; '.join(others)}"
    facts = leaf(root, stage.addressing)
    path = f"metrics/runs/{stage.addressing.replace('-', '_')}.json"
    if facts is None or path not in {out.def_path for out in stage.outs}:
        return f"{path} is not there to tell which code made the outputs"
    if "code" not in facts:
        return f"{path} has no digest of the code (made by an older version): dvc repro"
    try:
        module = stage_module(str(stage.cmd))
        outside = sorted({name for name in files if name.endswith(".py")} - set(closure(root, module)))
        digest_now = code_digest(root, module)
    except SyntaxError as error:
        return f"one of {', '.join(files)} cannot be parsed ({error.msg})"
    except AthanorError as error:
        return str(error)
    if outside:
        return f"no part of {module}'s code: {', '.join(outside)}. Fix: python -m athanor deps --fix"
    if digest_now != facts["code"]:
        return f"the code does something else now, in one of: {', '.join(files)}. Fix: dvc repro"
    return ""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="default: every stage with a changed .py file")


def run(args: argparse.Namespace) -> int:
    verdicts = accept(Path.cwd(), args.stages)
    for verdict in verdicts:
        print(verdict, file=sys.stderr if verdict.refusal else sys.stdout)
    if not verdicts:
        print("nothing to accept: no stage that has run has changed code")
    return 1 if any(verdict.refusal for verdict in verdicts) else 0
