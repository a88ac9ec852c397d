"""Checks of `athanor doctor`: tasks of DVC's queue whose process was killed, and tasks that share a name.

DVC shows a killed task as Running for ever, and its table of experiments fails once the task's checkout is gone.
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

from athanor.base.artifacts import read_json, write_text
from athanor.base.errors import AthanorError
from athanor.base.strict import read_yaml
from athanor.cli.doctor.main import FIX, Checkout, Finding
from athanor.runtime.facts import git, leaves, overrides, params_at


class Task(NamedTuple):
    """result: a digest of what it made. ended: when, in seconds.

    running: as DVC shows it. verdict: where DVC keeps how it ended. trace: its checkout, else the message that queued it.
    """

    rev: str
    result: str
    ended: float
    failed: bool
    running: bool
    verdict: Path
    trace: Path

    def end(self) -> str:
        write_text(self.verdict, '{"status": "FAILURE", "result": null, "traceback": null}')
        return f"it is Failed now; dvc queue remove {self.rev[:7]}, then queue it again: it resumes from its checkpoint"


def tasks(root: Path) -> dict[tuple[str, str], list[Task]]:
    """The tasks of DVC's queue by commit and name, in the order in which they were queued."""
    exps, queued = root / ".dvc/tmp/exps", []
    for path in exps.glob("celery/broker/*/*.celery.msg"):
        # A worker takes it now, or a crash tore it.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            message, when = json.loads(path.read_bytes()), path.stat().st_mtime_ns
            if message["headers"]["task"].endswith(".run_exp"):
                queued.append(
                    (when, message["headers"]["id"], path, json.loads(base64.b64decode(message["body"]))[0][0])
                )
    found = defaultdict(list)
    for _, number, path, entry in sorted(queued):
        rev, result, ended, trace = entry["stash_rev"], "", 0.0, path
        info = exps / f"run/{rev}/{rev}.run"
        with contextlib.suppress(OSError, AthanorError):
            facts, ended = read_json(info), info.stat().st_mtime
            result, folder = facts["result_hash"] or "", Path(facts["root_dir"])
            trace = folder if folder.is_dir() else path
        verdict = exps / f"celery/result/celery-task-meta-{number}"
        over = verdict.is_file()
        running = not over and path.parent.name == "processed"
        task = Task(rev, result, ended, over and not result, running, verdict, trace)
        found[entry["baseline_rev"], entry["name"]].append(task)
    return found


def killed(checkout: Checkout) -> Iterator[Finding]:
    """Ended as `dvc queue kill` does, which would interrupt whatever has the number of the task's process now."""
    for (_, name), group in tasks(checkout.root).items():
        for task in group:
            if task.running and checkout.abandoned(task.trace):
                what = f"DVC shows task {task.rev[:7]} as Running for ever: its process was killed"
                yield Finding("task", name, what, FIX, task.end)


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
