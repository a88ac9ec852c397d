"""Running a side stage: one that the main graph does not need, in a file of its own in probes/ or side/ (why: probes/lr.yaml)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import write_json
from athanor.base.errors import InputError
from athanor.base.strict import read_yaml
from athanor.runtime import dvc_lock, ship
from athanor.runtime.closure import PROBES
from athanor.runtime.facts import Graph
from athanor.runtime.locks import try_lock
from athanor.runtime.terminal import stop_signals

LOCK = Path(PROBES) / dvc_lock.LOCK
SHIP_SECONDS = 60.0
BASE = "side.base"  # the dependency on what this parameter names
# `python -m dvc repro`, which a signal during its imports ends without a traceback.
START_DVC = """import _signal, sys
_signal.signal(_signal.SIGINT, _signal.SIG_DFL)
import dvc._debug, dvc.cli.parser, dvc.config, dvc.repo.reproduce, dvc.stage.run
from dvc.cli import main
_signal.signal(_signal.SIGINT, _signal.default_int_handler)
del sys.argv[0]
sys.exit(main(sys.argv[1:]))
"""
DVC = (sys.executable, "-c", START_DVC, "dvc", "repro")


def repro(root: Path, file: Path, stage: str, force: bool, base: str = "") -> int:
    """Run the side stage of a file by DVC, one at a time in a checkout; returns DVC's exit status.

    base: the path that takes the place of the dependency `side.base`.
    """
    if not (root / file).is_file():
        raise InputError("file not found", where=file.as_posix(), fix=f"git checkout {file.as_posix()}")
    (root / ".athanor").mkdir(exist_ok=True)
    repair_dvc_files(root)
    with try_lock(root / ".athanor" / "probe.lock") as free:
        if not free:
            raise InputError(
                "another side stage (probe, synthesize, side) is at work here", where=str(root), fix="wait for it"
            )
        status = _repro(root, file, stage, force, base)
    ship.wait(root, SHIP_SECONDS if not status else 5.0)
    return status


def repair_dvc_files(root: Path) -> None:
    """Repair the files of DVC that a kill may leave torn (dvc.lock and rwlock): DVC does not start with them."""
    for text in dvc_lock.mend(root):
        print(text, file=sys.stderr)


def _repro(root: Path, file: Path, stage: str, force: bool, base: str) -> int:
    """Run `dvc repro`; the file has the name that DVC expects only as long as that takes."""
    dvc_file = file.with_name("dvc.yaml")
    run_command, target = command_runner(), f"{dvc_file.as_posix()}:{stage}"
    graph = read_yaml(root / file)
    for entry in graph["stages"].values():
        entry["deps"] = [base if path == BASE else path for path in entry["deps"]]
    write_json(root / dvc_file, graph)  # which is YAML
    try:
        if not force:
            return run_command([*DVC, target], cwd=root)
        # --force alone would force every stage before it as well: hours, and requests that are paid for again.
        upstream = Graph(root).upstream(stage)
        status = run_command([*DVC, *upstream], cwd=root) if upstream else 0
        return status or run_command([*DVC, "--force", "--single-item", target], cwd=root)
    finally:
        (root / dvc_file).unlink(missing_ok=True)


def command_runner(
    signals: list[int] | None = None, wait: Callable[[subprocess.Popen[bytes]], int] = subprocess.Popen.wait
) -> Callable[..., int]:
    """A function that runs a command while this process outlives signals, to tidy up. It adds them to `signals`.

    Ctrl-C reaches DVC and its stage as well, which save and leave; in a container this process' end would be theirs.
    SIGTERM and SIGHUP are passed on to the command. Handlers, and not SIG_IGN, which the command would inherit.
    Stages are started as `python`, so that of this environment comes first, whichever the shell would take.
    """
    children: list[subprocess.Popen[bytes]] = []
    signals = [] if signals is None else signals

    def forward_signal(number: int, _: object) -> None:
        signals.append(number)
        running = [child for child in children if child.poll() is None]
        for child in running:
            child.send_signal(number)
        if not running:
            sys.exit(128 + number)

    def call(command: list[str], env: Mapping[str, str] = os.environ, **popen_options: Any) -> int:
        path = os.pathsep.join([os.path.dirname(sys.executable), *filter(None, [env.get("PATH")])])
        children.append(subprocess.Popen(command, env={**env, "PATH": path}, **popen_options))
        return wait(children[-1])

    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    for number in {signal.SIGTERM, signal.SIGHUP} & set(stop_signals()):
        signal.signal(number, forward_signal)
    return call
