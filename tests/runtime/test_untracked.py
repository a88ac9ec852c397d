"""Own text that neither Git nor DVC tracks: named by the stage of an experiment that misses it, with the command that helps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.runtime import presets
from athanor.runtime.untracked import choice, reminder
from tests.runtime.view import ROOT, environment

GRAPH = "stages:\n  toy:\n    cmd: python -m stages.toy\n    deps: [corpus, stages/toy.py]\n    params: [download]\n    outs: [o]\n"
STAGE = """
import sys
from athanor.runtime.process import stage_main
from athanor.sources.params import DownloadParams
from athanor.text import globs

def run(run):
    run.params("download", DownloadParams)
    print(len(globs.find(sys.argv[1:])), "files")

if __name__ == "__main__":
    stage_main("toy", run)
"""


@pytest.fixture
def main(tmp_path: Path) -> Path:
    """A commit with some text of corpus/, and text beside it that only the checkout has."""
    main = tmp_path / "main checkout"
    for name, text in {
        "dvc.yaml": GRAPH,
        "params.yaml": presets.complete(ROOT / "presets" / "micro.yaml"),
        "stages/__init__.py": "",
        "stages/toy.py": STAGE,
        "corpus/README.md": "read me",
        "corpus/old/a.md": "a text",
        ".gitignore": ".athanor\n.dvc\n",
    }.items():
        (main / name).parent.mkdir(parents=True, exist_ok=True)
        (main / name).write_text(text)
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@h", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=main, check=True)
    for name in ("corpus/new ones/deep/b.md", "corpus/new ones/c.md", "corpus/old/d.md", "corpus/talks.jsonl"):
        (main / name).parent.mkdir(parents=True, exist_ok=True)
        (main / name).write_text("another text")
    return main


def queued(main: Path, *patterns: str) -> str:
    """What the stage says in a checkout of its own, as DVC makes one."""
    temporary = main / ".dvc/tmp/exps/tmpx"
    if not temporary.is_dir():
        subprocess.run(["git", "clone", "-q", str(main), str(temporary)], check=True)
    env = environment(DVC_ROOT=str(main), ATHANOR_TRACKING="off")
    command = [sys.executable, "-m", "stages.toy", *patterns]
    return subprocess.run(command, cwd=temporary, env=env, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    "pattern, fix",
    [
        ("corpus/new ones/**/*.md", "git add 'corpus/new ones/c.md' 'corpus/new ones/deep/b.md' (or dvc add"),
        ("corpus/new ones/deep/b.md", "git add 'corpus/new ones/deep/b.md' (or dvc add"),
        ("corpus/*.jsonl", "git add corpus/talks.jsonl (or dvc add"),
    ],
)
def test_a_glob_without_files_names_those_of_the_main_checkout(main, pattern, fix):
    error = queued(main, pattern).splitlines()[-1]
    assert "no file matches" in error and f"in the main checkout {fix}" in error and "correct the glob" not in error


def test_what_is_missed_in_part_is_said_although_the_stage_goes_on(main):
    (main / "corpus/old/gone.md").touch()
    subprocess.run(["git", "add", "corpus/old/gone.md"], cwd=main, check=True)
    (main / "corpus/old/gone.md").unlink()  # in the index alone
    said = queued(main, "corpus/old/*.md")
    assert "does without corpus/new ones/ (2), corpus/old/d.md, corpus/talks.jsonl, which neither Git nor DVC" in said
    assert "error" not in said and "done in" in said and "gone.md" not in said
    (main / "corpus/x.dvc").touch()
    subprocess.run(["git", "add", "corpus"], cwd=main, check=True)
    for name in ("corpus/old/d.md", "corpus/x/*.md"):  # queued before
        assert "unless that was done since, then run or queue" in queued(main, name).splitlines()[-1]


def test_a_glob_that_matches_nowhere_is_still_a_wrong_glob(main):
    assert "correct the glob" in queued(main, "corpus/none/*.md").splitlines()[-1]


def test_who_names_a_source_hears_of_it_before_the_first_queue(main, monkeypatch):
    monkeypatch.chdir(main)
    assert reminder(Path("corpus/old")).endswith(
        "git add corpus/old/d.md (or dvc add corpus/old/d.md, if private or large)"
    )
    (main / "corpus/old.dvc").touch()
    assert reminder(Path("corpus/old")) == ""
    shutil.rmtree(main / ".git")
    assert reminder(Path("corpus/new ones")) == ""
    many = [f"corpus/x/{number}.md" for number in range(9)]
    assert choice(Path("corpus/x"), many) == "git add corpus/x (or dvc add corpus/x, if private or large)"
