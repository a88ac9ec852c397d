"""Checks of `athanor doctor` on DVC experiments: the workspace's HEAD, the queue, temporary checkouts."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from athanor.artifacts import read_json, write_text
from athanor.commands import slots
from athanor.commands.doctor.main import FIX, Finding
from athanor.commands.doctor.processes import Place, Process
from athanor.errors import AthanorError
from athanor.params.strict import read_yaml
from athanor.pipeline.facts import flatten, git

EXEC = "refs/exps/exec/"
ACTIVE = ("EXEC_BASELINE", "EXEC_MERGE", "EXEC_BRANCH")  # DVC removes them at the end; EXEC_HEAD it leaves
PACKED = ".dvc/tmp/repro.dat"  # DVC's arguments, committed into every experiment's stash
STASH_SECONDS = 30  # between DVC's `git stash` and its detaching of HEAD


# -- an experiment in the workspace -------------------------------------------


def head(place: Place) -> Iterator[Finding]:
    """HEAD that a killed `dvc exp run` left detached, and the refs it left behind."""
    root = place.root
    if place.dvc or not git(root, "rev-parse", "-q", "--verify", "HEAD"):
        return
    refs = dict(line.split() for line in git(root, "for-each-ref", "--format=%(refname) %(objectname)").splitlines())
    left = [EXEC + name for name in ACTIVE if EXEC + name in refs]
    left += [name for name in refs if name.startswith("refs/exps/temp/")]
    if git(root, "symbolic-ref", "-q", "HEAD"):
        if left and place.trusted:
            what = f"{len(left)} refs of a killed experiment; dvc exp list goes by them"
            yield Finding("head", ".git", what, FIX, lambda: _clear(place, left))
    else:
        yield from _detached(place, refs, left)
    if "refs/exps/stash" in refs:
        what = "an experiment that was killed before it began; the next dvc exp run would run it as well"
        yield Finding("head", "refs/exps/stash", what, "git update-ref -d refs/exps/stash")


def _detached(place: Place, refs: dict[str, str], left: list[str]) -> Iterator[Finding]:
    root, now = place.root, git(place.root, "rev-parse", "HEAD")
    baseline = refs.get(EXEC + "EXEC_BASELINE", "")
    log = [line.split("\t", 1) for line in git(root, "reflog", "--format=%gd\t%gs", "--date=unix", "HEAD").splitlines()]
    stashed = not baseline and _stashed_by_dvc(root, now, log)
    if not (baseline or stashed or log and log[0][1].startswith("dvc: ")):
        return  # the user's own doing
    tips = [name.removeprefix("refs/heads/") for name in refs if name.startswith("refs/heads/")]
    tips = [name for name in tips if refs[f"refs/heads/{name}"] == (baseline or now)]
    came_from = [match[1] for _, text in log if (match := re.match(r"checkout: moving from (\S+) to ", text))]
    branch = next((name for name in came_from if name in tips), tips[0] if len(tips) == 1 else "")
    # A commit past the baseline is the experiment's own when one of DVC's refs holds it.
    saved = now in (baseline or now, *(sha for name, sha in refs.items() if name.startswith("refs/exps/")))
    if not branch or not saved:
        why = "no single branch has its baseline as tip" if not branch else "HEAD holds commits of no experiment"
        command = "git switch BRANCH, or keep the commits: git switch -c NEW"
        yield Finding("head", "HEAD", f"detached by a killed experiment, and {why}", command)
        return
    what = f"detached by a killed dvc exp run; branch {branch} is at its baseline, files stay as they are"
    repair = (lambda: _attach(place, branch, now, left, stashed)) if place.trusted else None
    yield Finding("head", "HEAD", what, FIX if repair else f"git symbolic-ref HEAD refs/heads/{branch}", repair)


def _stashed_by_dvc(root: Path, now: str, log: list[list[str]]) -> bool:
    """Killed while it packed the experiment: HEAD detached by hash right after a stash of the same commit."""
    if not log or not re.search(rf"moving from \S+ to {now}$", log[0][1]):
        return False
    stash = git(root, "show", "-s", "--format=%P\t%ct", "refs/stash").split("\t")
    detached = re.search(r"\{(\d+)\}", log[0][0])
    if len(stash) != 2 or not detached or not stash[0].startswith(now):
        return False
    return 0 <= int(detached[1]) - int(stash[1]) <= STASH_SECONDS


def _attach(place: Place, branch: str, now: str, left: list[str], stashed: bool) -> str:
    """What DVC does at the end of an experiment: HEAD names the branch again, the files are left alone."""
    root = place.root
    git(root, "symbolic-ref", "-m", f"athanor doctor: back to {branch}", "HEAD", f"refs/heads/{branch}")
    if git(root, "symbolic-ref", "--short", "-q", "HEAD") != branch:
        raise AthanorError("Git could not set HEAD")
    if git(root, "rev-parse", "HEAD") != now:
        git(root, "reset", "-q")  # the index is that of the experiment's commit; a mixed reset keeps every file
    done = f"HEAD is {branch} again"
    if stashed:
        done += f", {_unstash(root)}"
    note = _clear(place, left)
    changed = git(root, "diff", "--name-only", "HEAD", "--", "params.yaml")
    kept = ""
    if changed:
        kept = "; params.yaml has the experiment's values and your own edits: to go on, the same dvc exp run again"
    return f"{done}{f', {note}' if left else ''}{kept}"


def _unstash(root: Path) -> str:
    """Edits that DVC put into Git's stash come back when they are not in the files already."""
    if not git(root, "status", "--porcelain", "--untracked-files=no"):
        git(root, "stash", "pop", "-q", "--index")
        if git(root, "status", "--porcelain", "--untracked-files=no"):
            return "your edits are back from git stash"
    return "your edits as they were before are also in git stash (git stash show -p; git stash drop)"


def _clear(place: Place, names: list[str]) -> str:
    """Remove refs; what only EXEC_MERGE holds goes into Git's stash first."""
    root, merge = place.root, EXEC + "EXEC_MERGE"
    done = f"{len(names)} refs removed"
    if merge in names:
        base = git(root, "rev-parse", f"{merge}^1")
        files = [name for name in git(root, "diff", "--name-only", "-z", base, merge).split("\0") if name]
        files = [name for name in files if name not in (PACKED, "dvc.lock")]
        if files and git(root, "diff", "--name-only", merge, "--", *files):
            git(root, "stash", "store", "-m", "athanor doctor: files of a killed experiment", merge)
            if git(root, "rev-parse", "refs/stash") != git(root, "rev-parse", merge):
                raise AthanorError("git stash store failed; the refs stay")
            done += ", the files it began with are in git stash"
    for name in names:
        git(root, "update-ref", "-d", name)
    shutil.rmtree(root / ".dvc" / "tmp" / "exps" / "run" / "workspace", ignore_errors=True)
    return done


# -- the queue ------------------------------------------------------------------


class Task(NamedTuple):
    """A message that a queue worker took."""

    id: str
    name: str
    revision: str  # the commit in DVC's stash that holds the experiment
    baseline: str
    taken: float

    @property
    def label(self) -> str:
        return self.name or self.revision[:7]


def queue(place: Place) -> Iterator[Finding]:
    """Tasks that DVC shows as running while no process works on them."""
    celery = place.root / ".dvc" / "tmp" / "exps" / "celery"
    for task in _taken(celery / "broker" / "processed"):
        result = celery / "result" / f"celery-task-meta-{task.id}"
        if result.is_file() or not place.trusted or place.named(task.revision) or _idle_workers(place, task.taken):
            continue
        again = _again(place.root, task)
        command = f"{FIX}, then dvc queue remove {task.label} and {again}"
        what = "shown as Running, but its worker has ended"
        yield Finding("queue", f"task {task.label}", what, command, lambda t=task, r=result: _fail(place, t, r))


def waiting(place: Place) -> Iterator[Finding]:
    """Queued experiments that nobody will run: DVC's worker may leave when one fails, and the others stay behind."""
    names = [task.label for task in _taken(place.root / ".dvc" / "tmp" / "exps" / "celery" / "broker" / "in")]
    if names and not any(process.words and "queue-worker" in process.words for process in place.workers):
        what = f"{len(names)} queued ({', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}) and no worker runs"
        yield Finding("queue", "dvc queue", what, "dvc queue start", note=True)


def _taken(folder: Path) -> Iterator[Task]:
    for path in sorted(folder.glob("*.msg")):
        try:
            message = read_json(path)
            if not message["headers"].get("task", "").endswith(".run_exp"):
                continue
            args, kwargs, _ = json.loads(base64.b64decode(message["body"]))
            entry = kwargs.get("entry_dict") or args[0]
        except (AthanorError, ValueError, KeyError, TypeError, IndexError):
            continue  # another kind of message
        # A worker takes a message by moving it here, which sets the change time.
        taken = path.stat().st_ctime
        yield Task(message["headers"]["id"], entry["name"] or "", entry["stash_rev"], entry["baseline_rev"], taken)


def _idle_workers(place: Place, taken: float) -> list[Process]:
    """Workers that may be setting this task up or collecting it: there when it was taken, running no experiment now."""
    workers = [process for process in place.workers if process.words and "queue-worker" in process.words]
    busy = len(place.named("exec-run"))
    return [process for process in workers if process.started <= taken + 1][busy:]


def _fail(place: Place, task: Task, result: Path) -> str:
    """The record that `dvc queue kill` leaves for a task whose worker is gone."""
    write_text(
        result,
        json.dumps(
            {
                "status": "FAILURE",
                "result": None,
                "traceback": None,
                "children": None,
                "date_done": datetime.now(UTC).isoformat(),
                "task_id": task.id,
            }
        ),
    )
    process = place.root / ".dvc" / "tmp" / "exps" / "run" / task.revision / f"{task.revision}.json"
    if process.is_file():
        write_text(process, json.dumps({**read_json(process), "returncode": -1}))
    return f"marked as Failed; dvc queue remove {task.label} and {_again(place.root, task)} runs it again from its slot"


def _again(root: Path, task: Task) -> str:
    """The command that queues the same experiment again."""
    before, after = (dict(flatten(_params(root, commit))) for commit in (task.baseline, task.revision))
    changed = {key: _word(after[key]) for key in after if key not in before or after[key] != before[key]}
    queued = f"dvc exp run --queue{f' -n {task.name}' if task.name else ''}"
    # Lists, and texts that a shell or Hydra would read otherwise, are better looked at than quoted.
    numbered = any(part.isdigit() for key in changed for part in key.split("."))
    odd = any(not re.fullmatch(r"[\w./+-]+", word) for word in changed.values())
    commits = f"{task.baseline[:7]} {task.revision[:7]}"
    if numbered or odd or set(before) - set(after):
        queued += f" with its -S (dvc params diff {commits})"
    else:
        queued = " ".join([queued, *(f"-S {key}={word}" for key, word in changed.items())])
    edited = set(git(root, "diff", "--name-only", task.baseline, task.revision).splitlines())
    return queued + (f" after its edits (git diff {commits})" if edited - {"params.yaml", "dvc.lock", PACKED} else "")


def _word(value: Any) -> str:
    """A value as YAML and Hydra write it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _params(root: Path, commit: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(git(root, "show", f"{commit}:params.yaml") or "{}")
        file.flush()
        return read_yaml(file.name)


# -- temporary checkouts ----------------------------------------------------------


def temp_dirs(place: Place) -> Iterator[Finding]:
    """Checkouts of --temp and queued experiments that no process works in."""
    exps = place.root / ".dvc" / "tmp" / "exps"
    for folder in sorted((*exps.glob("tmp*"), *(exps / "standalone").glob("tmp*"))):
        # While DVC prepares one or collects from it, its own process stands elsewhere.
        setting_up = place.dvc and place.owned(folder)
        if not folder.is_dir() or not place.trusted or place.below(folder) or setting_up:
            continue
        size = slots.size(sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()))
        where = folder.relative_to(place.root).as_posix()
        what = f"checkout of a killed experiment, {size}; its slot is kept elsewhere"
        yield Finding("temp-dir", where, what, FIX, lambda f=folder, s=size: _remove(exps, f, s))


def _remove(exps: Path, folder: Path, size: str) -> str:
    for info in (*exps.glob("run/*/*.run"), *exps.glob("standalone/run/*/*.run")):
        if read_json(info).get("root_dir") == str(folder) and not _listed(exps, info.parent.name):
            shutil.rmtree(info.parent)
    shutil.rmtree(folder)
    return f"removed, {size} freed"


def _listed(exps: Path, revision: str) -> bool:
    """Whether a task of the queue still refers to this experiment: `dvc queue logs` reads its folder."""
    return any(task.revision == revision for task in _taken(exps / "celery" / "broker" / "processed"))
