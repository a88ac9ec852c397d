"""Runs work on shards: in this process, in several, or on other machines; resumable shard by shard.

The result of a task is a folder that appears whole or not at all, with the
facts that the function returned in `facts.json`. A task whose folder is there
is done. So an interrupted stage goes on where it stopped, and every way of
running gives the same bytes, because the function sees its task only.

A task is made of JSON types, tuples, paths and dataclasses, and the function
stands at the top of a module (athanor/pipeline/portable.py): both are checked
in every way of running, so that what runs here also runs on a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from athanor.artifacts import new_dir, read_json, write_json
from athanor.corpus.work import Work
from athanor.errors import InputError, Interrupted
from athanor.pipeline.machine import Machine
from athanor.pipeline.portable import OWN, call_text, item_of, pack_error, unpack, unpack_error

FACTS = "facts.json"
POLL = 0.1  # s between two looks at the stop flag
KILLS = 3  # workers may be killed this often in a row without one task done
SHARED_FS_WAIT = 120.0  # s; network file systems show other machines' files late, NFS after 60 s at most
# A worker is one of many: each library's own threads would make workers x cores of them.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
     "RAYON_NUM_THREADS"), "1"
) | {"TOKENIZERS_PARALLELISM": "false"}

# Name and answer of a task as it ends; None at least every second in between, to look at the stop flag.
Answers = Iterator[tuple[str, dict[str, Any]] | None]


class Executor:
    """A `MapShards`.

    `advance` gets the bytes of each task as it ends, `resumed` (else
    `advance`) those of all that had ended before. `stop` is asked while workers
    work; in one process, between two tasks.
    """

    def __init__(
        self,
        workers: int = 1,
        advance: Callable[[int], None] = lambda size: None,
        stop: Callable[[], bool] = lambda: False,
        *,
        kind: str = "processes",
        resumed: Callable[[int], None] | None = None,
    ) -> None:
        self.workers, self.advance, self.stop = workers, advance, stop
        self.resumed = resumed or advance
        self.kind = kind

    def __call__(
        self,
        work: Work,
        tasks: Mapping[str, Any],
        folder: Path,
        *,
        desc: str = "",
        sizes: Mapping[str, int] | None = None,
    ) -> dict[str, dict[str, Any]]:
        folder = folder.absolute()
        _sweep(folder, tasks)
        sizes = sizes or {}
        facts = {name: read_json(folder / name / FACTS) for name in tasks if (folder / name / FACTS).is_file()}
        if facts:
            self.resumed(sum(sizes.get(name, 0) for name in facts))
        calls = {name: call_text(work, name, task, folder) for name, task in tasks.items() if name not in facts}
        with contextlib.closing(self._answers(work, tasks, calls, folder)) as answers:
            for answer in answers:
                if answer is not None:
                    name, found = answer
                    if "error" in found:
                        raise unpack_error(found["error"])
                    if self.kind != "processes":
                        _wait_seen(folder / name / FACTS)
                    facts[name] = found["facts"]
                    self.advance(sizes.get(name, 0))
                if self.stop():
                    what = f"stopped after {len(facts)} of {len(tasks)} shards ({desc})"
                    raise Interrupted(f"{what}; run again to continue")
        if calls:
            _sweep(folder, tasks)
        return {name: facts[name] for name in tasks}

    def _answers(self, work: Work, tasks: Mapping[str, Any], calls: Mapping[str, str], folder: Path) -> Answers:
        if calls and self.kind == "ray":
            from athanor.pipeline.ray_cluster import in_ray

            yield from in_ray(calls, self.workers, folder)
        elif self.workers > 1 and len(calls) > 1:
            from athanor.pipeline.processes import in_processes

            yield from in_processes(calls, self.workers)
        else:
            for name in calls:
                yield name, {"facts": run_task(work, name, tasks[name], folder)}


def from_machine(machine: Machine, *args: Callable[..., Any], **settings: Any) -> Executor:
    """An `Executor` that runs as machine.yaml asks for."""
    return Executor(machine.workers, *args, kind=machine.executor, **settings)


def run_task(work: Work, name: str, task: Any, folder: Path) -> dict[str, Any]:
    """Do one task and publish its folder; what another process has finished meanwhile stands."""
    from threadpoolctl import threadpool_limits

    done = folder / name / FACTS
    if done.is_file():
        return read_json(done)
    try:
        # One thread in every way of running: their number decides in which order matrix products are summed.
        with threadpool_limits(1), new_dir(folder / name) as out:
            write_json(out / FACTS, work(task, out))
    except OSError:
        if not done.is_file():  # else another process was faster
            raise
    return read_json(done)


def run_call(text: str) -> dict[str, Any]:
    """Do one task told as text, in a worker; the answer is {"facts": ...} or {"error": ...}."""
    call = json.loads(text)
    try:
        os.chdir(call["cwd"])
        task = unpack(call["task"], (*OWN, call["work"].partition(".")[0]))
        return {"facts": run_task(item_of(call["work"]), call["name"], task, Path(call["folder"]))}
    except BaseException as error:
        return {"error": pack_error(error)}


def killed(what: str) -> InputError:
    fix = "lower `workers` in machine.yaml, or free memory, and run again; finished shards are kept"
    return InputError(f"a worker was killed {KILLS} times, probably because memory ran out: {what}", fix=fix)


def _sweep(folder: Path, tasks: Mapping[str, Any]) -> None:
    """Remove what killed workers left half-written."""
    for parent in {(folder / name).parent for name in tasks}:
        for rest in parent.glob(".*.tmp"):
            shutil.rmtree(rest, ignore_errors=True)


def _wait_seen(path: Path) -> None:
    deadline = time.monotonic() + SHARED_FS_WAIT
    while not path.is_file():
        if time.monotonic() > deadline:
            raise InputError(
                "another machine says it is written, but it is not here",
                where=str(path),
                fix="put the checkout on a file system that all machines share, under the same path",
            )
        with contextlib.suppress(FileNotFoundError):
            os.listdir(path.parent.parent)  # makes NFS look again
        time.sleep(POLL)
