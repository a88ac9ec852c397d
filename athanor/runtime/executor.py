"""Runs work on shards: in this process, in several, or on other machines; resumable shard by shard.

The result of a task is a folder that appears whole or not at all, with the
facts that the function returned in `facts.json`. A task whose folder is there
is done. So an interrupted stage goes on where it stopped, and every way of
running gives the same bytes, because the function sees its task only.

Memory here: two tables of the names, and the few tasks that are submitted.
Facts stay on disk until they are asked for.

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
import itertools
import os
import pkgutil
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from athanor.base.artifacts import new_dir, read_json, write_json
from athanor.base.errors import InputError, Interrupted
from athanor.base.work import Facts, Work
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


# Name of a task as it ends, and its error; None at least every second in between, to look at the stop flag.
TaskResults = Iterator[tuple[str, BaseException | None] | None]


class StoredFacts(Mapping[str, Facts]):
    """The facts of finished tasks by name, each read from `folder/name` every time it is asked for."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder, self._names = folder, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Facts:
        if name not in self._names:
            raise KeyError(name)
        return read_json(self._folder / name / FACTS)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
    ) -> StoredFacts:
        folder = folder.absolute()
        facts = StoredFacts(folder, tasks)
        remaining = {name: None for name in facts if not os.path.isfile(f"{folder}/{name}/{FACTS}")}
        done = len(facts) - len(remaining)
        if done:
            self.resumed(sum(sizes[name] for name in facts if name not in remaining) if sizes else done)
        with contextlib.closing(self._results(work, tasks, remaining, folder)) as results:
            for result in results:
                if result is not None:
                    name, error = result
                    if error is not None:
                        raise error
                    if self.kind != "processes":
                        _wait_until_visible(folder / name / FACTS)
                    done += 1
                    self.advance(sizes[name] if sizes else 1)
                if self.stop():
                    what = f"stopped after {done} of {len(facts)} shards ({desc})"
                    raise Interrupted(f"{what}; run again to continue")
        for parent in {os.path.dirname(name) for name in facts}:
            _remove_temporaries(folder / parent)
        return facts

    def _results(self, work: Work, tasks: Mapping[str, Any], remaining: dict[str, None], folder: Path) -> TaskResults:
        cwd, function = str(Path.cwd()), name_of(work)

        def call_of(name: str) -> Call:
            return Call(cwd, function, name, tasks[name], str(folder))

        if remaining and self.kind == "ray":
            from athanor.runtime.ray_cluster import in_ray

            yield from in_ray(remaining, call_of, self.workers, folder)
        elif self.workers > 1 and len(remaining) > 1:
            yield from in_processes(remaining, call_of, self.workers)
        else:
            for name in remaining:
                run_task(work, name, tasks[name], folder)
                yield name, None


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


def run_call(call: Call) -> BaseException | None:
    """Do one task in a worker; returns its error with a note of where it was raised."""
    try:
        os.chdir(call.cwd)
        run_task(pkgutil.resolve_name(call.work), call.name, call.task, Path(call.folder))
    except BaseException as error:
        trace = f"raised in a worker:\n{traceback.format_exc()}"
        try:
            copy.copy(error)  # as it is made again in the other process
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(trace)
        return error
    return None


def worker_killed(what: str) -> InputError:
    fix = "lower `workers` in machine.yaml, or free memory, and run again; finished shards are kept"
    return InputError(f"a worker was killed {KILLS} times, probably because memory ran out: {what}", fix=fix)


def _remove_temporaries(parent: Path) -> None:
    """Remove what killed workers, of earlier runs too, left half-written."""
    with os.scandir(parent) as entries:  # Path.glob would hold them all
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                shutil.rmtree(entry.path, ignore_errors=True)


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


def in_processes(remaining: dict[str, None], call_of: Callable[[str], Call], workers: int) -> TaskResults:
    """Do the tasks in processes; one that is done leaves `remaining`.

    After a process was killed, half as many are started for what remains.
    """
    from concurrent.futures import FIRST_COMPLETED, wait

    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    # loky's helper process warns of semaphores that a stop left to it to remove; it does remove them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    kills = 0
    while remaining:
        workers = min(workers, len(remaining))
        pool = get_reusable_executor(workers, initializer=enter_worker, initargs=(os.getpid(),), env=ONE_THREAD)
        waiting, running = iter(list(remaining)), {}
        try:
            while True:
                for name in itertools.islice(waiting, 2 * workers - len(running)):
                    running[pool.submit(run_call, call_of(name))] = name
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
