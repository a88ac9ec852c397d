"""athanor preset: complete params files, put in place without losing edits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.runtime import presets

ROOT = Path(__file__).resolve().parents[2]


def preset(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv = ['athanor', 'preset', *sys.argv[1:]]; from athanor.cli.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *words]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    shutil.copy(ROOT / "presets" / "default.yaml", tmp_path / "params.yaml")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words], cwd=folder, check=True)


def test_list_and_use(folder):
    listed = preset(folder, "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in (ROOT / "presets").glob("*.yaml"))
    assert preset(folder, "use", "micro").returncode == 0
    assert (folder / "params.yaml").read_text() == presets.complete(folder / "presets" / "micro.yaml")
    wrong = preset(folder, "use", "mirco")
    assert wrong.returncode == 1 and "did you mean 'micro'?" in wrong.stderr


@pytest.mark.parametrize("committed", [False, True])
def test_edits_are_not_overwritten_unless_git_has_them(folder, committed):
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    path = folder / "params.yaml"
    mine = path.read_text().replace("layers: 4", "layers: 3")
    path.write_text(mine)
    if committed:
        git(folder, "commit", "-qam", "mine")
    done = preset(folder, "use", "micro")
    if committed:
        assert done.returncode == 0
        return
    assert done.returncode == 1 and "Fix: commit it; or" in done.stderr and path.read_text() == mine
    assert preset(folder, "use", "micro", "--force").returncode == 0
    assert path.read_text() == presets.complete(folder / "presets" / "micro.yaml")


def test_without_a_commit_edits_are_kept_as_a_preset_and_the_message_says_how(folder):
    path = folder / "params.yaml"
    path.write_text(path.read_text().replace("layers: 4", "layers: 3"))
    done = preset(folder, "use", "micro")
    assert done.returncode == 1 and "Fix: keep it as a preset: cp params.yaml presets/mine.yaml;" in done.stderr
    shutil.copy(path, folder / "presets" / "mine.yaml")
    assert preset(folder, "use", "micro").returncode == 0 and "layers: 2" in path.read_text()
    assert preset(folder, "use", "mine").returncode == 0 and "layers: 3" in path.read_text()


def test_a_broken_preset_changes_nothing(folder):
    (folder / "presets" / "mine.yaml").write_text("download: {sources: []}\n")
    before = (folder / "params.yaml").read_bytes()
    assert preset(folder, "use", "mine").returncode == 1
    assert (folder / "params.yaml").read_bytes() == before
