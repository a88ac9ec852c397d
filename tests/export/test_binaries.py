"""llama.cpp's programs are looked for in three places, in this order."""

from __future__ import annotations

import pytest

from athanor.base.errors import InputError
from athanor.export import kquants


def place(folder, name="llama-quantize"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return (folder / name).resolve()


def test_variable_then_path_then_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("LLAMA_CPP_BIN", raising=False)
    assert kquants.find("llama-quantize") is None
    project = place(tmp_path / ".athanor" / "llama.cpp" / "bin")
    assert kquants.find("llama-quantize") == project and project.is_absolute()
    on_path = place(tmp_path / "path")
    assert kquants.find("llama-quantize") == on_path
    named = place(tmp_path / "named")
    monkeypatch.setenv("LLAMA_CPP_BIN", str(tmp_path / "named"))
    assert kquants.find("llama-quantize") == named
    assert kquants.find("llama-server") is None and "LLAMA_CPP_BIN" in kquants.MISSING


def test_a_variable_that_names_no_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_BIN", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="LLAMA_CPP_BIN"):
        kquants.find("llama-quantize")


def test_a_file_that_cannot_be_run_is_no_program(tmp_path, monkeypatch):
    place(tmp_path / "named").chmod(0o644)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("LLAMA_CPP_BIN", str(tmp_path / "named"))
    assert kquants.find("llama-quantize") is None
