"""A stage as a process: opens and closes its run, and reports errors in one line.

    def run(run: Run) -> None: ...

    if __name__ == "__main__":
        stage_main("clean", run)

Exit status: 0 done, 1 an error the user can act on, 75 stopped on request with
its state saved (DVC records nothing for a non-zero exit, so nothing half-done
can be cached).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, InputError, Interrupted, ParamsError
from athanor.runtime import facts, launch, sharing, untracked
from athanor.runtime.journal import Record, finished
from athanor.runtime.lifetime import MEMORY_FIX, at_work, record_death, refused
from athanor.runtime.machine import anchor, machine
from athanor.runtime.notify import FAILED, notify
from athanor.runtime.redact import excepthook
from athanor.runtime.run import PARAMS, Run
from athanor.runtime.start import settle
from athanor.runtime.terminal import in_words, say, stop_signals
from athanor.troubles.trouble import BLOCKING, shown, troubles
from athanor.troubles.world import here


def stage_main(stage: str, body: Callable[[Run], None], *, several: bool = False) -> None:
    """Run a stage's body as a process: check params.yaml whole, open the run, map errors to exit codes.

    With `several`, as many processes run the body as machine setting `launch` asks for.
    """
    settle()
    if several and launch.is_member():
        status = launch.CRASHED
        try:
            status = execute(stage, body)
        finally:
            status = launch.report_status(status)
        launch.end(status)
    with at_work(stage) as waited:
        status = _run_or_launch(stage, body, several, waited)
    sys.exit(status)


def _run_or_launch(stage: str, body: Callable[[Run], None], several: bool, waited: bool) -> int:
    module, launched = f"stages.{_module_name(body)}", None
    if waited and _already_done(stage, module):
        return 0
    try:
        if several:
            _refuse_troubles()
            launched = launch.launch(stage, module)
    except AthanorError as error:
        return _report(None, stage, "FAILED", str(error), 1)
    return execute(stage, body) if launched is None else launched


def _refuse_troubles() -> None:
    """InputError if this machine shows a trouble that would freeze a training or ruin its result."""
    settings = machine()
    blocking = [trouble for trouble in troubles() if trouble.severity in BLOCKING]
    for trouble in shown(here(dict(facts.flatten(dataclasses.asdict(settings))), anchor()), blocking):
        if trouble.name not in settings.known_troubles:
            what = f"{trouble.title}. {trouble.cause.removesuffix('.')}"
            known = f"Or, to train all the same, in machine.yaml: known_troubles: [{trouble.name}]"
            raise InputError(what, where="this machine", fix=f"{trouble.fix.removesuffix('.')}. {known}")


def _already_done(stage: str, module: str) -> bool:
    """Whether the process that was waited for did this same work, and all of its results are here.

    DVC removed earlier results when it started this process.
    """
    try:
        run = Run(stage, module)
        graph, leaf = facts.Graph(run.root), facts.leaf(run.root, stage)
        if not leaf.is_file() or not all((run.root / path).exists() for path in graph.results(stage)):
            return False
        leaf_facts, sources = read_json(leaf), [run.root / path for path in graph.dependencies(stage)]
        folder = run.anchor / ".athanor" / "runs" / leaf_facts["run"]
        meta = Record(folder / "meta.json") if finished(folder) else {}
        if not meta or meta != {**meta, **run.subject()} or leaf_facts["code"] != run.code:
            return False
    except AthanorError:  # reported when the work is done
        return False
    if facts.newest_ms(sources) >= meta["started_ms"]:
        return False
    say(f"{stage}: that process has done this very work; its results are taken")
    return True


def execute(stage: str, body: Callable[[Run], None]) -> int:
    from athanor.runtime.schema import check_file, memory_notes

    run, missing = None, list[str]()
    sys.excepthook = excepthook
    try:
        sections = check_file(PARAMS)
        run = _run_class()(stage, f"stages.{_module_name(body)}")
        for number in stop_signals():
            signal.signal(number, run.on_signal)
        launch.register()
        run.begin()
        missing = untracked.missed(run.root, run.anchor, stage)
        notes = memory_notes(sections) if stage == "download" else []
        for text in filter(None, [*notes, untracked.said(missing), sharing.warning(run.root, run.anchor)]):
            run.note(text)
        _ship()
        body(run)
        run.check_unchanged()
        run.finish()
        return 0
    except Interrupted as error:
        return _report(run, stage, "KILLED", run.why(error) if run else str(error), 75)
    except AthanorError as error:
        return _report(run, stage, "FAILED", f"{untracked.explained(error, missing)}{_restore_hint(error)}", 1)
    except OSError as error:
        disk_error = in_words(error)
        code = _report(run, stage, "FAILED", disk_error or repr(error), 1)
        if disk_error is None:
            raise
        return code
    except BaseException as error:
        message = str(error)
        torch_out_of_memory = isinstance(error, RuntimeError) and re.search("out of memory|not enough memory", message)
        if not (isinstance(error, MemoryError) or torch_out_of_memory):
            _report(run, stage, "FAILED", repr(error), 1)
            raise
        text = str(
            InputError(
                f"out of memory{f' ({message.splitlines()[0]})' if message else ''}", where=stage, fix=MEMORY_FIX
            )
        )
        record_death(text)
        if run is not None and "torch" in sys.modules:
            from athanor.runtime.memory_snapshot import leave_snapshot

            leave_snapshot(run, "end")
        return _report(run, stage, "FAILED", text, 1)
    finally:
        _ship()


def _restore_hint(error: AthanorError) -> str:
    """A hint for users of plain `dvc repro`: DVC removes a stage's outputs before it runs the stage."""
    if not isinstance(error, ParamsError) or "DVC_ROOT" not in os.environ:
        return ""
    end = "" if str(error).endswith(("?", ".")) else "."
    return f"{end} Once that is right, dvc repro brings back what DVC has removed"


def _report(run: Run | None, stage: str, status: str, message: str, code: int) -> int:
    if run is not None:
        return run.report(status, message, code)
    say(f"{stage}: {message}")
    if status == "FAILED" and launch.is_main():
        refused(stage)
        notify(FAILED, f"{stage}: {message}")
    return code


def _run_class() -> type[Run]:
    if launch.is_main():
        return Run
    from athanor.runtime.follower import WorkerRankRun

    return WorkerRankRun


def _ship() -> None:
    """Start the shipper in the background if none runs; tracking trouble never stops a stage."""
    if not launch.is_main():
        return
    from athanor.runtime.ship import start_detached

    start_detached(anchor())


def _module_name(body: Callable[[Run], None]) -> str:
    file = sys.modules[body.__module__].__file__ or ""
    return Path(file).stem
