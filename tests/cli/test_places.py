"""Where and how a command is started, and damaged files that every command reads: one line each, no traceback."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

import pytest

from athanor.cli import cli, repro, side
from athanor.cli.plan.forecast import _finished_runs
from athanor.runtime import presets, ship
from athanor.runtime.journal import alive
from athanor.runtime.terminal import in_words
from tests.e2e.clone import ROOT
from tests.runtime.toy_pipeline import Toy

PARAMS = presets.complete(ROOT / "presets" / "micro.yaml")
FAULTS = {
    "tab": b"threads:\t2\n\tdevice: cpu\n",
    "binary": bytes(range(256)),
    "UTF-16": "threads: 2\n".encode("utf-16"),
    "UTF-16 without a mark": "threads: 2\n".encode("utf-16-le"),
    "Latin-1": "notify: Bücher\n".encode("latin-1"),
    "NUL": b"threads: 2\0\n",
    "list": b"- threads\n",
    "text": b"threads\n",
    "number": b"7\n",
    "unknown key": b"thread: 2\n",
    "wrong type": b"threads: two\n",
    "true": b"threads: true\n",
    "null": b"threads:\n",
    "negative": b"threads: -1\n",
    "nan": b"max_minutes: .nan\n",
    "inf": b"max_minutes: .inf\n",
    "choice": b"device: gpu\n",
    "duplicate": b"threads: 2\nthreads: 3\n",
    "bracket": b"launch: {processes: 2\n",
    "inner key": b"launch: {process: 2}\n",
    "digits": b"threads: " + b"9" * 5000 + b"\n",
    "many digits": b"max_minutes: " + b"9" * 4000 + b"\n",
    "depth": b"threads: " + b"[" * 20000 + b"\n",
    "date": b"notify: 2026-99-99\n",
    "key": b"? {a: 1}\n: 2\n",
    "folder": None,
}


def put(path: Path, data: bytes | None) -> None:
    path.mkdir() if data is None else path.write_bytes(data)


def said(monkeypatch, capsys, *words: str) -> str:
    """The one line that a command ends with."""
    monkeypatch.setattr(sys, "argv", ["athanor", *words])
    assert cli.main() in (1, 2)
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and len(err) < 600 and not out, err
    return err


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a sound params.yaml; nothing is notified while a mistake is reported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path


@pytest.mark.parametrize("command", ["plan", "repro"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_machine_yaml_is_one_line(here, monkeypatch, capsys, fault, command):
    put(here / "machine.yaml", FAULTS[fault])
    assert "machine.yaml: " in said(monkeypatch, capsys, command)


@pytest.mark.parametrize("text", ["", "\n", "# threads: 2\n", "---\n"])
def test_a_machine_yaml_of_comments_is_none(here, text):
    from athanor.runtime.machine import machine

    usual = machine()
    (here / "machine.yaml").write_text(text)
    assert machine() == usual


PARAMS_FAULTS = {
    "UTF-16": PARAMS.encode("utf-16"),
    "UTF-16 without a mark": PARAMS.encode("utf-16-be"),
    "Latin-1": PARAMS.encode() + "# für\n".encode("latin-1"),
    "digits": re.sub(r"(?m)^  seed: .*", f"  seed: {'9' * 5000}", PARAMS, count=1).encode(),
    "fewer digits": re.sub(r"(?m)^  seed: .*", f"  seed: {'9' * 4000}", PARAMS, count=1).encode(),
    "empty": b"",
    "depth": b"download: " + b"[" * 5000,
    "folder": None,
}


@pytest.mark.parametrize("command", [("plan",), ("repro",), ("new", "corpus", "--write"), ("recipe", "--hours", "1")])
@pytest.mark.parametrize("fault", PARAMS_FAULTS)
def test_a_fault_in_params_yaml_is_one_line(here, monkeypatch, capsys, fault, command):
    (here / "corpus").mkdir()
    (here / "corpus/a.txt").write_text("Some words of a text.\n" * 99)
    (here / "params.yaml").unlink()
    put(here / "params.yaml", PARAMS_FAULTS[fault])
    (here / "dvc.yaml").write_text("stages:\n  a:\n    cmd: python -m stages.a\n")
    monkeypatch.setattr(sys, "argv", ["athanor", *command])
    assert cli.main() in (1, 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 600, err


@pytest.mark.parametrize("name", ["dvc.lock", "side/dvc.lock", ".dvc/tmp/rwlock"])
def test_a_folder_in_the_place_of_a_file_is_one_line(here, monkeypatch, capsys, name):
    (here / name).mkdir(parents=True)
    (here / "dvc.yaml").write_text("stages:\n  a:\n    cmd: python -m stages.a\n")
    assert f"{name}: is a folder" in said(monkeypatch, capsys, "repro")
    if name == "dvc.lock":
        assert f"{name}: is a folder" in said(monkeypatch, capsys, "plan")


RECORDS = ["null", "[]", "7", "{}", '{"stage": "sft"}', "", "{", '"text"', "[" * 9999]


@pytest.mark.parametrize("text", RECORDS, ids=range(len(RECORDS)))
def test_a_run_whose_record_is_damaged_stops_no_command(here, monkeypatch, text):
    for name in ("meta.json", "end.json", "ship.json"):
        folder = here / ".athanor/runs" / f"sft-1-{name[:3]}"
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").touch()
        (folder / "meta.json").write_text('{"stage": "sft", "pid": 1, "resumed": 0, "started_ms": 1}')
        (folder / name).write_text(text)
    assert len(ship.by_start(ship.run_folders(here))) == len(ship.unshipped(here)) == 3
    assert not any(map(alive, ship.run_folders(here))) and repro.ending(here, 0) == (False, "")
    assert not list(_finished_runs(here))
    for command in ("stop", "explain", "health", "profile"):
        monkeypatch.setattr(sys, "argv", ["athanor", command])
        assert cli.main() in (0, 1, 2)


def run(toy: Toy, *command: str, without: Collection[str] = ("LC_ALL", "LANG", "PYTHONUTF8"), **env: str) -> str:
    """What a command says, started by this Python with another environment; it must end well."""
    clean = {name: value for name, value in toy.environment().items() if name not in without}
    done = subprocess.run(command, cwd=toy.path, env={**clean, **env}, capture_output=True)
    assert done.returncode in (0, 10), (done.stdout, done.stderr)
    assert b"Traceback" not in done.stderr, done.stderr
    return done.stdout.decode(errors="replace")


ATHANOR = (sys.executable, "-m", "athanor")
SEES = """
import os, sys
(CONTROL / "seen").write_text(f"{sys.flags.optimize} {sys.getfilesystemencoding()} {sys.executable}")
print("± … Ж \\udc8f")
"""


NO_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STARTS = [
    {"PYTHONOPTIMIZE": "2"},
    {"PYTHONOPTIMIZE": "1", "PYTHONIOENCODING": "iso-8859-1"},
    {"LC_ALL": "C", **NO_UTF8, "PYTHONIOENCODING": "ascii:strict"},
    {"LC_ALL": "POSIX", **NO_UTF8},
    {"LC_ALL": "ru_RU.KOI8-R"},
]


@pytest.mark.parametrize("env", STARTS, ids=range(len(STARTS)))
def test_every_start_of_python_prints_and_gives_the_same_results(toy, env):
    if "ru_RU.KOI8-R" in env.values():
        made = ("localedef", "-i", "ru_RU", "-f", "KOI8-R", str(toy.control / "ru_RU.KOI8-R"))
        if not shutil.which("localedef") or subprocess.run(made, stderr=subprocess.DEVNULL).returncode:
            pytest.skip("the locale cannot be made here")
        env = {**env, "LOCPATH": str(toy.control)}
    stage = toy.path / "stages/count.py"
    text = stage.read_text().replace("    with run.slot(", f"{textwrap.indent(SEES, '    ')}    with run.slot(", 1)
    stage.write_text(text)
    seen = toy.control / "seen"
    run(toy, *ATHANOR, "repro", **env)
    assert seen.read_text() == f"0 utf-8 {sys.executable}"
    assert "count" in run(toy, *ATHANOR, "summary", **env)
    seen.unlink()
    run(toy, sys.executable, "-m", "dvc", "repro", "-f", "-s", "count", **env)  # without our command in between
    assert seen.read_text() == f"0 utf-8 {sys.executable}"


def test_stages_are_started_with_the_python_of_the_command(toy, tmp_path):
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python").write_text("#!/bin/sh\necho another Python >&2\nexit 1\n")
    (other / "python").chmod(0o755)
    run(toy, *ATHANOR, "repro", PATH=f"{other}:/usr/bin:/bin")
    assert toy.steps("report") == [0]


def test_a_user_without_a_name_and_a_home_plans_and_runs(toy):
    code = "import os, pwd; pwd.getpwuid = lambda number: {}[number]\n"  # as for a number without an entry
    (toy.control / "sitecustomize.py").write_text(code)
    without = ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME")
    assert "count" in run(toy, *ATHANOR, "plan", without=without)
    run(toy, *ATHANOR, "repro", without=without)


def test_an_interrupt_while_dvc_is_imported_leaves_no_traceback(tmp_path):
    (tmp_path / "dvc").mkdir()
    (tmp_path / "dvc/__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(side.DVC, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
    # That is no death, which --supervise would answer by a new start.
    assert repro.supervise(tmp_path, lambda: done.returncode, [signal.SIGINT], 3) == (-signal.SIGINT, [])


def test_a_python_without_the_packages_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: __import__("no_such_package"))
    assert "the package 'no_such_package' is not installed for " in said(monkeypatch, capsys, "pin")


@pytest.mark.parametrize("name", ["random.py", "copy.py", "types.py", "yaml/__init__.py", "ruamel.py"])
def test_a_file_with_the_name_of_a_module_is_one_line(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('imported')\n")
    (tmp_path / "test.py").write_text("")  # nothing imports it
    (tmp_path / "athanor").symlink_to(ROOT / "athanor")
    done = subprocess.run([sys.executable, "athanor", "help"], cwd=tmp_path, capture_output=True, text=True)
    first = name.partition("/")[0]
    assert done.returncode == 1 and done.stderr.startswith(f"{first}: has the name of a module")
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(f"Fix: mv {first} my_{first}\n")


def test_rights_of_another_user_are_one_line(monkeypatch, tmp_path):
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".dvc/tmp/lock"))
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    text = in_words(error) or ""
    assert text.startswith(f"{error.filename}: permission denied; {tmp_path} belongs to user ") and "chown" in text
    monkeypatch.undo()
    assert f"chmod -R u+rwX {tmp_path}" in (in_words(error) or "")


def test_a_stage_says_what_is_wrong_with_machine_yaml_once(toy):
    (toy.path / "machine.yaml").write_text("threads: -1\n")
    done = toy.dvc("repro", check=False)
    line = "count: machine.yaml: threads: -1 is out of range. Fix: use a value from 0 to 1024. Once that is right, "
    assert done.returncode and done.stderr.count(line) == 1 and "Traceback" not in done.stderr, done.stderr
