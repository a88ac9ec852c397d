"""athanor doctor: where the checkout lies, the names in it, and which programs a shell finds there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from athanor.cli.doctor import places
from athanor.cli.doctor.main import Checkout, Finding
from tests.e2e.clone import environment


def findings(check, folder: Path) -> list[Finding]:
    return list(check(Checkout(folder, (), ())))


def test_what_is_typed_in_the_folder_of_a_zip_cures_it(tmp_path):
    (found,) = findings(places.repository, tmp_path)
    (tmp_path / "file").touch()
    who = {f"GIT_{role}_{what}": "t@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = environment(**who)
    subprocess.run(found.command, shell=True, cwd=tmp_path, env=env, check=True, stdout=subprocess.DEVNULL)
    assert not findings(places.repository, tmp_path)


def test_a_name_that_is_not_utf8_is_shown_with_the_command_that_changes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages:\n  a:\n    cmd: x\n    deps: [corpus, data]\n    outs: [data]\n")
    os.makedirs(b"corpus/M\xc3\xbcller/\x8f\xe0 'x'/deep")
    Path("corpus/Ж.txt").touch()
    (found,) = findings(places.names, tmp_path)
    assert found.where == "corpus/Müller/\\x8f\\xe0 'x'" and found.what == "the name is not UTF-8"
    subprocess.run(["bash", "-c", found.command.partition(";")[0]], check=True)
    assert not findings(places.names, tmp_path) and Path("corpus/Müller/_ 'x'/deep").is_dir()


def test_programs_of_another_environment_or_place(tmp_path, monkeypatch):
    folder = tmp_path / "a b" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    for text in (f"#!{sys.executable}\n", f'#!/bin/sh\n\'\'\'exec\' "{sys.executable}" "$0" "$@"\n'):
        (folder / "dvc").write_text(text)
        (folder / "dvc").chmod(0o755)
        assert not findings(places.programs, tmp_path)
        (folder / "dvc").write_text(text.replace("a b", "before"))
        (moved,) = findings(places.programs, tmp_path)
        assert "before/bin/python, which is not there" in moved.what and moved.command == "make setup"
    monkeypatch.setenv("PATH", os.defpath)
    (other,) = findings(places.programs, tmp_path)
    assert other.note and other.command == f". '{folder}'/activate"


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_typed_lets_dvc_run_an_experiment_below_an_accent(toy, monkeypatch, cached):
    folder = toy.path.rename(toy.path.with_name("Mü ller"))
    toy.path = folder
    toy.git("config", "user.name", "Jürgen")
    monkeypatch.setenv("HOME", str(toy.control))
    monkeypatch.setenv("PATH", toy.environment()["PATH"])
    if cached:
        (folder / ".dvc/cache/files").mkdir(parents=True)
    found = findings(places.experiments, folder)
    assert len(found) == 2
    for finding in found:
        subprocess.run(finding.command, shell=True, cwd=folder, check=True)
    assert not findings(places.experiments, folder)
    target = subprocess.run(["dvc", "config", "cache.dir"], cwd=folder, capture_output=True, text=True).stdout.strip()
    assert target.isascii() and (Path(target) / "files").is_dir() is cached
    toy.run("dvc", "exp", "run", "--temp", "-S", "sft.seed=77")
