"""An experiment from a commit without a DVC remote: told in time, and what docs/experiments.md says brings its data across."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from athanor.cli.doctor.checks import data, experiments
from athanor.cli.doctor.main import Checkout
from athanor.runtime.sharing import cache_folder, warning
from tests.e2e.clone import ROOT, Clone, commit, small_repo

PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
COMMAND = "grep x params.yaml > out.txt; echo 1 > kept.txt"
GRAPH = f"stages: {{a: {{cmd: {COMMAND}, params: [x], outs: [out.txt, kept.txt: {{cache: false}}]}}}}"


@pytest.fixture
def repo(tmp_path: Path) -> Clone:
    """README's order at fault: an experiment first, then the remote, then a push of both."""
    repo = small_repo(tmp_path / "main", {"dvc.yaml": GRAPH, "params.yaml": "x: 1\n"})
    repo.dvc("exp", "run", "-q", "-n", "lower-lr", "-S", "x=2")
    repo.run("git", "restore", "-SW", "params.yaml", "dvc.lock")
    repo.dvc("checkout", "-q")
    return repo


def commands() -> list[str]:
    section = PAGE.partition("### An experiment that was pushed without its data")[2].partition("\n#")[0]
    return re.findall(r"(?m)^    (.+)$", section)


def test_it_is_told_before_and_healed_after_with_the_commands_of_the_page(repo, tmp_path, monkeypatch):
    found = lambda clone=repo, check=experiments: list(check(Checkout(clone.path, (), ())))  # noqa: E731
    (note,) = found()
    assert note.where == "lower-lr" and note.command.startswith("dvc remote add") and note.note
    baseline = repo.run("git", "rev-parse", "HEAD").stdout.strip()
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", baseline)
    assert "names no DVC remote" in warning(repo.path, repo.path) and warning(repo.path, repo.path) == ""
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", f"{baseline}~0")  # as another commit
    assert "names no DVC remote" in warning(repo.path, repo.path)
    shutil.rmtree(repo.path / ".athanor")

    repo.dvc("remote", "add", "-d", "store", str(tmp_path / "store"))
    commit(repo, "remote")
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", repo.run("git", "rev-parse", "HEAD").stdout.strip())
    assert warning(repo.path, repo.path) == ""
    assert found()[0].command.startswith("DVC_GLOBAL_CONFIG_DIR=")
    repo.run("git", "init", "-q", "--bare", "-b", "main", "../share.git")
    repo.run("git", "remote", "add", "share", "../share.git")
    assert found(check=data)[0].note
    repo.run("git", "push", "-q", "share", "main")
    repo.run("git", "clone", "-q", "../share.git", "../another")
    another = Clone(tmp_path / "another")
    repo.dvc("exp", "apply", "-q", "lower-lr")
    repo.run("git", "restore", ".dvc/config")
    repo.dvc("push", "-q")  # what was applied
    (problem,), (same,) = found(check=data), found(another, data)
    assert not problem.note and same.command.startswith("dvc push where")
    repo.run("bash", "-ec", problem.command.partition(" where")[0])
    (another.path / "kept.txt").unlink()  # Git has it
    assert not found(another, data) and "2" in (repo.path / "out.txt").read_text()
    another.run("git", "restore", "kept.txt")
    repo.dvc("exp", "push", "share", "lower-lr")  # it says that it was pushed

    there, *here = commands()
    repo.run("git", "clone", "-q", "../share.git", "../clone")
    clone = Clone(tmp_path / "clone")
    clone.dvc("pull", "-q")
    clone.dvc("exp", "pull", "origin", "lower-lr")
    assert clone.dvc("exp", "apply", "lower-lr", check=False).returncode != 0
    assert found(clone)[0].command.startswith("git restore .dvc/config && dvc pull; if that fails, then DVC_GLOBAL")
    repo.run("bash", "-ec", there)
    clone.run("bash", "-ec", "git restore .dvc/config && dvc pull -q")
    assert not found(clone)
    assert (clone.path / "out.txt").read_text() == "x: 2\n"

    for command in here:
        another.run("bash", "-ec", command)
    assert (another.path / "out.txt").read_text() == "x: 2\n" and another.dvc("status").stdout.startswith("Data and")
    repo.dvc("exp", "run", "-q", "-n", "later", "-S", "x=3")
    assert not found()


def test_a_cache_is_where_dvc_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[cache]\n    dir = ~/a b  # ours\n")
    assert cache_folder(tmp_path) == tmp_path / "a b"


def test_the_page_of_dvc_plots_says_without_a_network_why_it_is_empty():
    from configparser import ConfigParser

    from dvc_render.html import HTML

    config = ConfigParser()
    config.read(ROOT / ".dvc/config")
    page = HTML((ROOT / ".dvc" / config["plots"]["html_template"]).read_text(encoding="utf-8"))
    text = page.with_scripts("<script src=vega></script>").with_element("<div>chart</div>").embed()
    assert text.index("<script src=vega>") < text.index('"vegaEmbed" in window') < text.index("<div>chart</div>")
    assert "{" not in re.sub(r"<style>.*?</style>", "", text, flags=re.S)
