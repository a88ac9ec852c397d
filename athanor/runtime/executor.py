"""Runs work on shards: in this process, in several, or on other machines; resumable shard by shard.

The result of a task is a folder that appears whole or not at all, with the
facts that the function returned in `facts.json`. A task whose folder is there
is done. So an interrupted stage goes on where it stopped, and every way of
running gives the same bytes, because the function sees its task only.

The function stands at the top of a module, and travels to other processes by
its name; this is checked in every way of running, so that what runs here also
runs on a cluster.

Processes of this machine are joblib's loky. loky itself and not
joblib.Parallel, which gives the caller no turn between two results: a stop
would wait for a whole shard.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pkgutil
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from athanor.base.artifacts import new_dir, read_json, write_json
from athanor.base.errors import InputError, Interrupted
from athanor.base.work import Work
from athanor.runtime.lifetime import end_with
from athanor.runtime.machine import Machine

FACTS = "facts.json"
POLL = 0.1  # s between two looks at the stop flag
KILLS = 3  # workers may be killed this often in a row without one task done
SHARED_FS_WAIT = 120.0  # s; network file systems show other machines' files late, NFS after 60 s at most
# A worker is one of many: each library's own threads would make workers x cores of them.
ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "RAYON_NUM_THREADS",
    ),
    "1",
) | {"TOKENIZERS_PARALLELISM": "false"}


class Call(NamedTuple):
    """One task as `run_call` does it in another process, without a need to import anything before."""

    cwd: str
    work: str  # module:name
    name: str
    task: Any
    folder: str


# Name and answer (facts, or the error) of a task as it ends; None at least every second in between, to look at the
# stop flag.
TaskResults = Iterator[tuple[str, dict[str, Any] | BaseException] | None]


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
        _remove_temporaries(folder, tasks)
        sizes = sizes or {}
        facts = {name: read_json(folder / name / FACTS) for name in tasks if (folder / name / FACTS).is_file()}
        if facts:
            self.resumed(sum(sizes.get(name, 0) for name in facts))
        cwd, function = str(Path.cwd()), name_of(work)
        remaining = {name: task for name, task in tasks.items() if name not in facts}
        calls = {name: Call(cwd, function, name, task, str(folder)) for name, task in remaining.items()}
        with contextlib.closing(self._results(work, calls, folder)) as results:
            for result in results:
                if result is not None:
                    name, outcome = result
                    if isinstance(outcome, BaseException):
                        raise outcome
                    if self.kind != "processes":
                        _wait_until_visible(folder / name / FACTS)
                    facts[name] = outcome
                    self.advance(sizes.get(name, 0))
                if self.stop():
                    what = f"stopped after {len(facts)} of {len(tasks)} shards ({desc})"
                    raise Interrupted(f"{what}; run again to continue")
        if calls:
            _remove_temporaries(folder, tasks)
        return {name: facts[name] for name in tasks}

    def _results(self, work: Work, calls: Mapping[str, Call], folder: Path) -> TaskResults:
        if calls and self.kind == "ray":
            from athanor.runtime.ray_cluster import in_ray

            yield from in_ray(calls, self.workers, folder)
        elif self.workers > 1 and len(calls) > 1:
            yield from in_processes(calls, self.workers)
        else:
            for name, call in calls.items():
                yield name, run_task(work, name, call.task, folder)


def from_machine(machine: Machine, *args: Callable[..., Any], **settings: Any) -> Executor:
    """An `Executor` that runs as machine.yaml asks for."""
    return Executor(machine.workers, *args, kind=machine.executor, **settings)


def run_task(work: Work, name: str, task: Any, folder: Path) -> dict[str, Any]:
    """Do one task and publish its folder; a result that another process finished meanwhile is kept."""
    from threadpoolctl import threadpool_limits

    facts_path = folder / name / FACTS
    if facts_path.is_file():
        return read_json(facts_path)
    try:
        # One thread in every way of running: their number decides in which order matrix products are summed.
        with threadpool_limits(1), new_dir(folder / name) as out:
            write_json(out / FACTS, work(task, out))
    except OSError:
        if not facts_path.is_file():  # else another process was faster
            raise
    return read_json(facts_path)


def name_of(function: Callable[..., Any]) -> str:
    """`module:name` of a function that other processes can import; TypeError for anything else."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if module == "__main__":  # a stage run as python -m stages.clean: others know it by that name
        module = getattr(sys.modules["__main__"].__spec__, "name", None)
    if not module or "<" in name:
        raise TypeError(f"{function!r} is no function at the top of a module, so no other process can import it")
    return f"{module}:{name}"


def run_call(call: Call) -> dict[str, Any] | BaseException:
    """Do one task in a worker; returns its facts, or its error with a note of where it was raised."""
    try:
        os.chdir(call.cwd)
        return run_task(pkgutil.resolve_name(call.work), call.name, call.task, Path(call.folder))
    except BaseException as error:
        trace = f"raised in a worker:\n{traceback.format_exc()}"
        try:
            copy.copy(error)  # as it is made again in the other process
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(trace)
        return error


def worker_killed(what: str) -> InputError:
    fix = "lower `workers` in machine.yaml, or free memory, and run again; finished shards are kept"
    return InputError(f"a worker was killed {KILLS} times, probably because memory ran out: {what}", fix=fix)


def _remove_temporaries(folder: Path, tasks: Mapping[str, Any]) -> None:
    """Remove what killed workers left half-written."""
    for parent in {(folder / name).parent for name in tasks}:
        for leftover in parent.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


def _wait_until_visible(path: Path) -> None:
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


def in_processes(calls: Mapping[str, Call], workers: int) -> TaskResults:
    """Do the tasks in processes. After one was killed, half as many are started for the remaining tasks."""
    from concurrent.futures import FIRST_COMPLETED, wait

    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    # loky's helper process warns of semaphores that a stop left to it to remove; it does remove them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    remaining, kills = dict(calls), 0
    while remaining:
        workers = min(workers, len(remaining))
        pool = get_reusable_executor(workers, initializer=enter_worker, initargs=(os.getpid(),), env=ONE_THREAD)
        waiting, running = iter(list(remaining)), {}
        try:
            while True:
                for name in (name for name, _ in zip(waiting, range(2 * workers - len(running)), strict=False)):
                    running[pool.submit(run_call, remaining[name])] = name
                if not running:
                    break
                ended, _ = wait(running, timeout=POLL, return_when=FIRST_COMPLETED)
                for future in ended:
                    result = future.result()
                    kills = 0
                    name = running.pop(future)
                    del remaining[name]
                    yield name, result
                if not ended:
                    yield None
        except BrokenProcessPool:
            yield None  # a stop that came meanwhile wins
            kills += 1
            if kills >= KILLS:
                raise worker_killed(f"with {workers} workers, {len(remaining)} shards are left") from None
            workers = max(1, workers // 2)
        except BaseException:
            pool.shutdown(wait=True, kill_workers=True)
            raise


def enter_worker(parent: int) -> None:
    """In a new worker: leave signals to the coordinator, and end soon after it, however it ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started from here would inherit
    end_with(parent, POLL)
