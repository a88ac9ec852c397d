"""A process that has imported one stage and forks a child for each attempt of the drill.

    python -m tools.drill.server STAGE MODULE

Importing torch takes seconds and a hundred kills would wait for it a hundred
times. Reads one attempt as a JSON line, runs the stage in a fresh child,
answers {"status", "seconds"} with a status as `subprocess` would give it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> int:
    stage, module = sys.argv[1:]
    body = importlib.import_module(module).run
    print(json.dumps({"ready": os.getpid()}), flush=True)
    learned = False
    while line := sys.stdin.readline():
        attempt = json.loads(line)
        answer = serve(stage, body, attempt)
        if answer["status"] == 0 and not learned:
            learn(Path(attempt["record"]))
            learned = True
        print(json.dumps(answer), flush=True)
    return 0


def learn(record: Path) -> None:
    """Import what the stage imported while it ran: later children find it in memory."""
    for name in json.loads(record.read_text().splitlines()[-1])["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def serve(stage: str, body: Any, attempt: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, and kill when the attempt's time is up. The pipe closes when the child is gone."""
    alive, held = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        os.close(alive)
        _run(stage, body, attempt)
    os.close(held)
    limit = attempt["limit"] if attempt["delay"] is None else attempt["delay"]
    ended, _, _ = select.select([alive], [], [], limit)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(alive)
    hung = not ended and attempt["delay"] is None
    return {"status": status, "seconds": time.monotonic() - started, "hung": hung}


def _run(stage: str, body: Any, attempt: dict[str, Any]) -> None:
    """The child: its own directory, environment, log and faults; never returns."""
    code = 1
    try:
        log = os.open(attempt["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(attempt["folder"])
        os.environ.update(attempt["env"])
        if attempt["file_bytes"] is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (attempt["file_bytes"], resource.RLIM_INFINITY))
        code = _execute(stage, body, attempt)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _execute(stage: str, body: Any, attempt: dict[str, Any]) -> int:
    from athanor.runtime.process import execute
    from tools.drill.faults import Watch, record_batches, record_rows

    watch = Watch(Path(attempt["folder"]), Path(attempt["record"]), attempt["kind"], attempt["count"])
    (record_rows if stage == "download" else record_batches)(watch)
    watch.install()
    code = execute(stage, body)
    watch.note(modules=[name for name in sys.modules if not name.startswith("__")])
    return code


if __name__ == "__main__":
    sys.exit(main())
