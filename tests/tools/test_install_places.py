"""`make setup` in the folder of a ZIP file, beside files that shadow modules, and in a checkout that was moved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.clone import ROOT, environment
from tools import install

WHO = {f"GIT_{role}_{what}": "t@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def unpacked(tmp_path):
    """What `make setup` needs of a checkout, without .git."""
    for name in (
        "tools/install.py",
        "athanor/hardware/cards.py",
        "athanor/runtime/start.py",
        "requirements.txt",
        "dvc.yaml",
    ):
        (tmp_path / "Mü ller" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "Mü ller" / name)
    return tmp_path / "Mü ller"


def setup(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    # With a chip that does not exist, so that nothing is installed where it would be.
    env = {**os.environ, "CHIP": "none", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = [sys.executable, "tools/install.py"]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, **options)  # type: ignore[call-overload]


def test_a_zip_is_seen_before_anything_is_installed(unpacked):
    done = setup(unpacked, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and not (unpacked / ".venv").exists()
    assert done.stderr.count("\n") == 1 and "is not a git repository (a ZIP file?)" in done.stderr
    typed = done.stderr.partition("Fix: ")[2].partition(", then")[0]
    subprocess.run(typed, shell=True, cwd=unpacked, env=environment(**WHO), check=True)
    assert setup(unpacked, stdin=subprocess.DEVNULL).stderr.startswith("CHIP=none: ")  # the check that comes next


@pytest.mark.parametrize("answer", ["y", "", "n"])
def test_on_a_terminal_git_init_is_offered(unpacked, monkeypatch, answer):
    monkeypatch.setattr(install, "ROOT", unpacked)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(unpacked.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in WHO:
        monkeypatch.delenv(name, raising=False)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda words: answer)
    if answer == "y":
        install.want_git()
    else:
        with pytest.raises(SystemExit, match="nothing was installed"):
            install.want_git()
    log = subprocess.run(["git", "log", "--format=%an"], cwd=unpacked, capture_output=True, text=True)
    assert log.stdout == ("athanor\n" if answer == "y" else "")  # Git knew no name


def test_a_path_with_accents_is_named_until_doctor_has_cured_it(unpacked, monkeypatch, capsys):
    monkeypatch.setattr(install, "ROOT", unpacked)
    install.warn_of_accents()
    assert "fails; the cure: athanor doctor" in capsys.readouterr().out
    (unpacked / ".dvc").mkdir()
    (unpacked / ".dvc/config.local").write_text("[cache]\n    dir = /home/x/.cache/athanor-1\n")
    install.warn_of_accents()
    assert not capsys.readouterr().out


def test_a_file_with_the_name_of_a_module_is_named_first(unpacked):
    (unpacked / "copy.py").write_text("raise SystemExit('imported')\n")
    done = setup(unpacked)
    assert done.returncode == 1 and done.stderr.startswith("copy.py: has the name of a module of Python")


def at(folder: Path, monkeypatch) -> Path:
    """The folder of programs of the checkout there."""
    bin = folder / ".venv/bin"
    for name, path in {"VENV": bin.parent, "PYTHON": bin / "python", "LAUNCHER": bin / "athanor"}.items():
        monkeypatch.setattr(install, name, path)
    return bin


def test_the_program_names_its_checkout_where_there_is_none(tmp_path, monkeypatch):
    (tmp_path / "it's ü/.venv/bin").mkdir(parents=True)
    bin = at(tmp_path / "it's ü", monkeypatch)
    monkeypatch.setattr(install, "ROOT", tmp_path / "it's ü")
    install.write_launcher()
    done = subprocess.run([bin / "athanor"], cwd=tmp_path, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "Fix: cd" in done.stderr
        and subprocess.run(
            ["sh", "-c", done.stderr.strip().partition("Fix: ")[2] + " && pwd"], capture_output=True, text=True
        ).stdout.strip()
        == str(tmp_path / "it's ü")
    )


@pytest.mark.parametrize("before", ["a", "a b", "ä" * 70], ids=["short", "space", "long"])
@pytest.mark.parametrize("after", ["c", "it's d"])
def test_a_moved_checkout_is_repaired(tmp_path, monkeypatch, capsys, before, after):
    from pip._vendor.distlib.scripts import ScriptMaker

    bin = at(tmp_path / before, monkeypatch)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bin.parent)], check=True)
    install.write_launcher()
    maker = ScriptMaker(None, str(bin))
    maker.executable, maker.variants = str(bin / "python"), {""}
    maker.make("tool = platform:node")
    install.mend_moved()
    assert capsys.readouterr().out == ""  # nothing was moved yet

    (tmp_path / before).rename(tmp_path / after)
    bin = at(tmp_path / after, monkeypatch)
    install.mend_moved()
    assert "was moved or copied" in capsys.readouterr().out
    assert subprocess.run([bin / "tool"], capture_output=True).returncode == 1  # sys.exit(name)
    activated = [". bin/activate; command -v python; python -c 'import sys; print(sys.prefix)'"]
    said = subprocess.run(["sh", "-c", *activated], cwd=bin.parent, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str(bin / "python"), str(bin.parent)]
    install.mend_moved()
    assert capsys.readouterr().out == ""


def test_a_python_that_is_gone_gives_way(tmp_path, monkeypatch):
    bin = at(tmp_path, monkeypatch)
    bin.mkdir(parents=True)
    (bin / "python").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(install, "torch_of", lambda python: {})
    install.make_venv([])
    assert subprocess.run([bin / "python", "-c", ""]).returncode == 0


@pytest.mark.parametrize(("terminal", "words"), [(True, "40 %"), (False, "")])
def test_pip_shows_its_progress_on_a_terminal(tmp_path, monkeypatch, capfd, terminal, words):
    bin = at(tmp_path, monkeypatch)
    bin.mkdir(parents=True)
    (bin / "python").write_text("#!/bin/sh\nprintf '40 %%'\n")
    (bin / "python").chmod(0o755)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    install.pip("install", "torch")
    assert capfd.readouterr().out == words
    assert install.pip("install", "--quiet", "--report", "-").stdout == "40 %"
