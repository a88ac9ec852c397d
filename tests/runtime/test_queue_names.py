"""Names in DVC's queue: what doctor says of tasks that share one, and what makes a run of MLflow's page again, on real DVC."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from athanor.base.strict import read_yaml
from athanor.cli.doctor.main import Checkout, Finding
from athanor.cli.doctor.queue import same_name
from athanor.runtime import overview
from athanor.runtime.facts import leaves
from athanor.runtime.sharing import EXPERIMENT
from tests.e2e.clone import ROOT, Clone, commit, environment, small_repo
from tests.runtime.toy_pipeline import until

PARAMS = "x: {value: 1, word: cosine, off: null, items: [a, b]}\nother: {value: 1}\n"
CODE = "import sys\nsys.exit('13' in open('params.yaml').read())\n"
GRAPH = "stages:\n  a:\n    cmd: python a.py && cp params.yaml out.txt\n    deps: [a.py]\n    params: [x]\n    outs: [out.txt]\n"


@pytest.fixture
def repo(tmp_path: Path) -> Clone:
    return small_repo(tmp_path / "main", {"dvc.yaml": GRAPH, "params.yaml": PARAMS, "a.py": CODE})


def states(repo: Clone) -> list[list[str]]:
    """Task, name and state of each task."""
    rows = [line.split() for line in repo.dvc("queue", "status").stdout.splitlines()]
    return [[row[0], row[1], row[-1]] for row in rows if row and re.fullmatch("[0-9a-f]{7}", row[0])]


def work(repo: Clone) -> None:
    """Run the queued tasks with workers of our own.

    The worker of `dvc queue start` leaves when it was idle for a while, and a task queued at that moment is lost with it.
    """
    workers: list[subprocess.Popen[bytes]] = []

    def done() -> bool:
        if not workers or workers[-1].poll() is not None:  # a worker may end with a failed experiment
            command = [sys.executable, "-m", "dvc", "exp", "queue-worker", f"w{uuid.uuid4().hex}@localhost"]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            workers.append(subprocess.Popen(command, cwd=repo.path, env=environment(), **quiet))
        return {state for *_, state in states(repo)} <= {"Success", "Failed"}

    try:
        until(done, "the queue is done", pause=0.5)
    finally:
        workers[-1].terminate()
        workers[-1].wait()


def found(repo: Clone, note: bool = False) -> list[Finding]:
    return [row for row in same_name(Checkout(repo.path, (), ())) if row.note is note]


def values(repo: Clone) -> set[str]:
    """x.value of every experiment."""
    refs = repo.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").stdout.split()
    texts = [repo.run("git", "show", f"{ref}:params.yaml").stdout for ref in refs if EXPERIMENT.fullmatch(ref)]
    return {match[1] for text in texts if (match := re.search(r"value: (\d+), word", text))}


def test_tasks_of_one_name_are_named_before_and_after_they_ran_and_the_cure_keeps_each_result(repo: Clone) -> None:
    for sweep in ("2,3", "2,5"):
        repo.dvc("exp", "run", "-q", "--queue", "-n", "lr", "-S", f"x.value={sweep}")
    repo.dvc("exp", "run", "-q", "--queue", "-n", "bad", "-S", "x.value=13")
    assert [row.where for row in found(repo)] == ["lr-1", "lr-2"] and "will be lost" in found(repo)[0].what
    work(repo)
    assert [state for *_, state in states(repo)].count("Success") == 4 and values(repo) == {"2", "3"}  # DVC's loss
    (lost,) = found(repo)  # the other lr-1 made the same
    assert lost.where == "lr-2" and "is lost" in lost.what
    # The parameters count from the commit that the task was queued on, also once there is a later one.
    (repo.path / "params.yaml").write_text(PARAMS.replace("value: 1, word", "value: 5, word"))
    commit(repo, "later")
    (lost,) = found(repo)
    repo.run("bash", "-ec", lost.command)
    assert repo.run("git", "symbolic-ref", "--short", "HEAD").stdout.strip() == "main"
    repo.run("git", "reset", "-q", "--hard", "HEAD~1")
    repo.dvc("exp", "run", "-q", "--queue", "-n", "bad", "-S", "x.value=7")
    work(repo)
    assert values(repo) == {"2", "3", "5", "7"} and not found(repo)
    (failed,) = found(repo, note=True)
    repo.run("bash", "-ec", failed.command)
    assert "7" in values(repo) and not found(repo, note=True)
    # A name that its user has freed may be used again.
    repo.dvc("exp", "remove", "lr-2")
    repo.dvc("exp", "run", "-q", "--queue", "-n", "lr-2", "-S", "x.value=8")
    assert not found(repo)
    work(repo)
    assert "8" in values(repo) and not found(repo)


def test_what_mlflow_says_of_a_run_makes_its_parameters_again(repo: Clone) -> None:
    there = repo.run("git", "rev-parse", "HEAD").stdout.strip()
    wanted = {"x.value": "0.5", "x.word": "a b: c", "x.off": "True", "x.items.1": "None"}
    params = {name: value for name, value in leaves(read_yaml(repo.path / "params.yaml")).items() if name[0] == "x"}
    tags = {"athanor.key": "lr-1@1/2", "athanor.experiment": "lr-1", "mlflow.source.git.commit": there}
    text = lambda params: overview.description(repo.path, tags, params, {}, "")  # noqa: E731
    assert f"To make it again: `git checkout {there[:7]} && athanor repro`." in text(params)
    again = re.search(r"To make it again: `(.+?)`\.", text(params | wanted))
    assert again and "apply" not in again[1]
    (repo.path / "params.yaml").write_text(PARAMS.replace("other: {value: 1}", "other: {value: 2}"))
    commit(repo, "later")
    repo.run("bash", "-ec", again[1])
    made = leaves(read_yaml(repo.path / "params.yaml"))
    assert {name: made[name] for name in params} == params | wanted and made["other.value"] == "1"
    assert "`, with these parameters." in text(params | {"x.items.2": "c"})  # which -S cannot say


@pytest.mark.parametrize("same_line", [False, True])
def test_edits_that_apply_took_away_come_back(repo: Clone, same_line: bool) -> None:
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    recipe = "\n".join(re.findall(r"(?m)^    (git (?:add -u|diff --binary.*))$", page))
    params, spaced = repo.path / "params.yaml", PARAMS.replace("\n", "\n\n\n\n\n")
    params.write_text(spaced)
    commit(repo, "lines that do not touch")
    repo.dvc("exp", "run", "-q", "-n", "e", "-S", "x.value=2")
    repo.run("git", "restore", "-SW", "."), repo.dvc("checkout", "-q")
    key = "x" if same_line else "other"
    params.write_text(spaced.replace(f"{key}: {{value: 1", f"{key}: {{value: 9"))
    (repo.path / "a.py").write_text(f"{CODE}# mine\n")
    for name in ("new", "staged"):
        (repo.path / name).write_text(name)
    repo.run("git", "add", "staged")
    repo.dvc("exp", "apply", "-q", "e")
    assert "mine" not in (repo.path / "a.py").read_text()
    done = subprocess.run(["bash", "-c", recipe], cwd=repo.path, capture_output=True, text=True)
    text = params.read_text()
    assert done.returncode == same_line and "value: 2" in text and "value: 9" in text and ("<<<" in text) is same_line
    assert "mine" in (repo.path / "a.py").read_text() and (repo.path / "new").read_text() == "new"
    assert (repo.path / "staged").is_file() and "value: 2" in (repo.path / "out.txt").read_text()
