"""Paths with signs of the shell, passwords in addresses, and other users of the machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile

import pytest

from athanor.runtime.store import store_lock
from tools import install

ODD = "a $(touch pwned) `touch pwned` 'b\" & c"


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_the_launcher_of_a_checkout_with_such_a_path_starts_its_python(tmp_path, monkeypatch):
    (tmp_path / ODD).mkdir()
    monkeypatch.setattr(install, "PYTHON", script(tmp_path / ODD / "python", 'echo "$@"\n'))
    monkeypatch.setattr(install, "LAUNCHER", tmp_path / ODD / "athanor")
    install.write_launcher()
    (tmp_path / "athanor").mkdir()
    (tmp_path / "athanor/__main__.py").touch()  # a checkout
    said = subprocess.run(
        [str(tmp_path / ODD / "athanor"), "plan"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout == "athanor plan\n" and not (tmp_path / "pwned").exists()


def test_a_password_of_the_package_index_is_on_no_command_line_and_in_no_message(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    text = f'printf "%s\\n" "$@" > {seen}\ncat >> {seen}\necho "ERROR: $TORCH_INDEX is not there" >&2\nexit 1\n'
    monkeypatch.setattr(install, "PYTHON", script(tmp_path / "python", text))
    monkeypatch.setenv("TORCH_INDEX", "https://me:planted-secret@index.example/simple")
    with pytest.raises(SystemExit) as ended:
        install.pip("install", "torch", index=install.ALSO)
    assert "planted-secret" not in str(ended.value) and "https://***@index.example/simple" in str(ended.value)
    assert "planted-secret" not in seen.read_text() and "--extra-index-url ${TORCH_INDEX}" in seen.read_text()


def test_nobody_else_can_make_the_tracking_store_s_lock_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uri = "http://127.0.0.1:9"
    name = f"athanor-{os.getuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
    (tmp_path / name).mkdir()  # somebody was quicker
    with store_lock(uri):
        (lock,) = (tmp_path / "cache" / "athanor").iterdir()
        assert lock.stat().st_mode & 0o77 == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
    with store_lock(uri):
        pass
