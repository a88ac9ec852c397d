"""The result before a training on corrections, kept as a DVC experiment."""

from __future__ import annotations

import os
import subprocess
import tempfile
from itertools import count
from pathlib import Path

from athanor.catalog.discover import export_of, recorded
from athanor.runtime.dvc_lock import LOCK as DVC_LOCK
from athanor.runtime.facts import git

ROWS = "corpus/corrections.jsonl"
KEPT, RETURN = "before-corrections", "to return to it: dvc exp apply"
BACK = (  # `git -c` does not reach DVC
    "the result before is the experiment {0} (to compare: athanor compare {0}; "
    f"{RETURN} {{0}}, where git config knows your user.name and user.email)"
)


def keep(root: Path) -> str:
    """Make a DVC experiment of the checkout's result, unless one has the same export, and say which; or why not.

    Not by `dvc exp save`: that records each stage as run with the parameters and inputs of now, so that `dvc repro`
    would pass over those that have changed since, and fails where an output is missing.
    """
    lock = root / DVC_LOCK
    head, export = git(root, "rev-parse", "HEAD"), export_of(lock.read_text("utf-8")) if lock.is_file() else None
    if not head or not export:
        return f"no result is kept: {f'{DVC_LOCK} has no finished one' if head else 'there is no commit yet'}"
    experiments = {name: out for name, _, _, out in recorded(root)}
    if same := next((name for name, out in experiments.items() if out == export), ""):
        return BACK.format(same)
    name = next(name for n in count(1) if (name := KEPT + (f"-{n}" if n > 1 else "")) not in experiments)
    with tempfile.TemporaryDirectory() as folder:

        def run(*words: str) -> str:
            command = ["git", "-c", "user.name=athanor", "-c", "user.email=athanor@localhost", *words]
            environment = {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"}  # what is staged stays as it is
            return subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout

        try:
            run("read-tree", "HEAD")
            run("add", "--update", ".")
            new = run(
                "ls-files", "-z", "--others", "--exclude-standard", "--", DVC_LOCK, "params.yaml", "metrics", ROWS
            )
            run("add", "--", *new.split("\0")[:-1])
            commit = run("commit-tree", "-p", head, "-m", name, run("write-tree").strip()).strip()
            run("update-ref", f"refs/exps/{head[:2]}/{head[2:]}/{name}", commit, "")
        except subprocess.CalledProcessError as error:
            return f"no result is kept: {' '.join(error.stderr.split())}"
    return BACK.format(name)
