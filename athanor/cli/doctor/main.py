"""What crashes left behind, and the command that repairs it.

    python -m athanor doctor [--fix] [--deep] [--json]

Works from files and the process table: it takes no lock that DVC waits for,
imports nothing of DVC and starts no DVC command, so that it can be asked while
a stage trains and when DVC itself is broken. `--fix` repairs what is safe: it
never deletes a result, a journal or a slot, and touches nothing that a living
process may own. `--deep` also hashes every file that dvc.lock names, in the
workspace and in the cache; with `--fix` the damaged ones go, and DVC makes them again.

Exit status: 0 healthy, 1 a problem is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from athanor.base.errors import AthanorError, InputError
from athanor.runtime.machine import anchor

FIX = "python -m athanor doctor --fix"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    kind: a stable word for scripts. command: what repairs it.
    repair: does so and returns what it did, given only when that is safe now.
    note: worth knowing, but nothing is wrong.
    """

    kind: str
    where: str
    what: str
    command: str = FIX
    repair: Callable[[], str] | None = None
    note: bool = False
    fixed: str | None = None

    def __str__(self) -> str:
        if self.fixed is not None:
            return f"fixed    {self.where}: {self.what}. Done: {self.fixed}"
        return f"{'note   ' if self.note else 'problem'}  {self.where}: {self.what}. Fix: {self.command}"


Check = Callable[[], Iterable[Finding]]


def examine(root: Path, deep: bool = False) -> list[Finding]:
    """Every finding in the checkout at `root`; a check that cannot be made is a finding, too."""
    from athanor.cli.doctor import checks, files
    from athanor.cli.doctor.processes import look

    scraps = files.scraps(root)  # before the processes: what has no living owner then never gets one
    checkout = look(root)
    rules: list[tuple[str, Check]] = [
        ("process", lambda: checks.unseen(checkout)),
        ("lock", lambda: checks.locks(checkout)),
        ("record", lambda: checks.torn_records(checkout)),
        ("head", lambda: files.experiment(checkout)),
        ("temp-dir", lambda: files.temp_dirs(checkout)),
        ("leftover", lambda: files.leftovers(checkout, scraps)),
        ("journal", lambda: checks.journals(checkout)),
        ("store", lambda: checks.moved_store(checkout)),
        ("untracked", lambda: checks.untracked(checkout)),
        ("space", lambda: checks.space(checkout)),
        ("profile", lambda: checks.hardware_profile(root)),
    ]
    if deep:
        rules.append(("cache", lambda: files.damaged(checkout)))
    findings: list[Finding] = []
    for kind, check in rules:
        try:
            findings += check()
        except (OSError, ValueError, KeyError, TypeError, sqlite3.Error, AthanorError) as error:
            what = f"could not be checked: {type(error).__name__}: {error}".replace("\n", " ")
            findings.append(Finding(kind, str(root), what, "mend that file, then ask again"))
    return findings


def fix(findings: Iterable[Finding]) -> list[Finding]:
    """Repair what is safe; returns the findings with what was done to them."""
    done = []
    for finding in findings:
        if finding.repair is not None:
            try:
                finding = dataclasses.replace(finding, fixed=finding.repair())
            except (OSError, AthanorError) as error:
                finding = dataclasses.replace(finding, what=f"{finding.what} (the repair failed: {error})")
        done.append(finding)
    return done


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fix", action="store_true", help="repair what is safe")
    parser.add_argument(
        "--deep", action="store_true", help="also hash all that dvc.lock names, in the workspace and in the cache"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(args: argparse.Namespace) -> int:
    root = anchor()
    if not (root / "dvc.yaml").is_file():
        raise InputError("no dvc.yaml here", where=str(root), fix="run it in the checkout")
    findings = examine(root, args.deep)
    if args.fix:
        findings = fix(findings)
    problems = [finding for finding in findings if finding.fixed is None and not finding.note]
    if args.json:
        shown = ("kind", "where", "what", "command", "note", "fixed")
        rows = [{name: getattr(finding, name) for name in shown} for finding in findings]
        print(json.dumps({"healthy": not problems, "findings": rows}, indent=2))
    else:
        for finding in findings:
            print(finding)
        print(f"{len(problems)} problems" if problems else "healthy")
    return 1 if problems else 0
