"""A check of `athanor doctor`: tasks of DVC's queue that share a name.

DVC refuses a name that an experiment has, but not one that is queued. It keeps the first of the results and drops the
others without a word, so that a queue of successes has fewer experiments than tasks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml
from athanor.cli.doctor.main import Checkout, Finding
from athanor.runtime.facts import git, leaves, overrides, params_at

EXPS = Path(".dvc/tmp/exps")


class Task(NamedTuple):
    """result: a digest of what it made. ended: when, in seconds; 0 before."""

    rev: str
    result: str
    ended: float
    failed: bool


def tasks(root: Path) -> dict[tuple[str, str], list[Task]]:
    """The tasks of DVC's queue by commit and name, in the order in which they were queued."""
    queued = []
    for path in (root / EXPS / "celery/broker").glob("*/*.celery.msg"):
        # A worker takes it now, or a crash tore it.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            message, when = json.loads(path.read_bytes()), path.stat().st_mtime_ns
            if message["headers"]["task"].endswith(".run_exp"):
                queued.append((when, message["headers"]["id"], json.loads(base64.b64decode(message["body"]))[0][0]))
    found = defaultdict(list)
    for _, number, entry in sorted(queued, key=lambda row: row[:2]):
        rev, result, ended = entry["stash_rev"], "", 0.0
        info = root / EXPS / "run" / rev / f"{rev}.run"
        with contextlib.suppress(OSError, AthanorError):
            result, ended = read_json(info).get("result_hash") or "", info.stat().st_mtime
        over = (root / EXPS / "celery/result" / f"celery-task-meta-{number}").is_file()
        task = Task(rev, result, ended if result else 0.0, over and not result)
        found[entry["baseline_rev"], entry["name"]].append(task)
    return found


def same_name(checkout: Checkout) -> Iterator[Finding]:
    root = checkout.root
    here = git(root, "rev-parse", "HEAD")
    for (commit, name), group in tasks(root).items():
        if len(group) == 1 and not group[0].failed:
            continue
        made, _, subject = git(
            root, "log", "-1", "--format=%ct %s", f"refs/exps/{commit[:2]}/{commit[2:]}/{name}"
        ).partition(" ")
        # An earlier result of this name was taken off the list by its user.
        done = [task for task in group if task.result and made and task.ended >= int(made)]
        kept = next((task.result for task in done if task.result in subject), done[0].result if done else "")
        waiting = [task for task in group if not (task.result or task.failed)]
        lost = [task for task in done if task.result != kept]
        for task in [*lost, *waiting[0 if made else 1 :]]:
            what = "its result is lost" if task.result else "its result will be lost"
            command = f"dvc queue remove {task.rev[:7]}, and queue it again with another -n"
            before = leaves(read_yaml(root / "params.yaml")) if commit == here else params_at(root, commit)
            after = params_at(root, task.rev)
            if options := after and overrides(before, after):
                again = f"dvc exp run --queue -n {shlex.quote(f'{name}-{task.rev[:7]}')} {options}"
                if commit != here:
                    again = f"git checkout {commit[:7]} && {again} && git checkout -"
                command = f"dvc queue remove {task.rev[:7]} && {again}"
            why = f"task {task.rev[:7]} has the name of another one, and DVC keeps one experiment of a name: {what}"
            why += "; queue it again, with the stage if you named one (a running task: dvc queue kill it first)"
            yield Finding("queue", name, why, command)
        for task in group:
            if task.failed and made:
                what = f"task {task.rev[:7]} failed; dvc exp remove {name} would remove the experiment of this name as well"
                yield Finding("queue", name, what, f"dvc queue remove {task.rev[:7]}", note=True)
