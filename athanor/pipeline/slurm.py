"""Work on shards as a Slurm job array, or as parts that any other scheduler starts.

The tasks go to a folder below the slot as JSON. Part i of n is

    python -m athanor work FOLDER --part i --of n

It does every n-th task and leaves one answer per task, which the coordinator
collects. What a killed job did not answer is handed in again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from athanor.artifacts import read_json, write_json, write_text
from athanor.errors import InputError
from athanor.pipeline.executor import KILLS, ONE_THREAD, Answers, run_call

POLL = 0.5  # s
LATE = 5.0  # s that an answer may take to be seen here after its job has ended
TASKS, ANSWERS, BATCHES = "tasks.json", "answers", ".slurm"


def in_slurm(calls: Mapping[str, str], workers: int, folder: Path, arguments: Sequence[str]) -> Answers:
    """At most `workers` jobs at a time; `arguments` go to sbatch as they are."""
    if shutil.which("sbatch") is None:
        raise InputError("machine.yaml asks for Slurm, but there is no sbatch here", fix="run on a login node")
    for earlier in (folder / BATCHES).glob("*/job"):  # its coordinator was killed, its jobs may still run
        _cancel(earlier.read_text())
    shutil.rmtree(folder / BATCHES, ignore_errors=True)
    left, kills = dict(calls), 0
    while left:
        batch = folder / BATCHES / uuid.uuid4().hex[:8]
        write_batch(batch, left)
        before = len(left)
        with contextlib.closing(_submitted(batch, left, min(workers, len(left)), arguments)) as answers:
            for answer in answers:
                if answer is not None:
                    del left[answer[0]]
                yield answer
        kills = kills + 1 if len(left) == before else 0
        if kills >= KILLS:
            raise InputError(
                f"{len(left)} shards were begun by {KILLS} jobs each and finished by none: {', '.join(left):.200}",
                where=str(batch / "log"),
                fix="read the logs there; for more memory or time, set slurm_args in machine.yaml",
            )
    shutil.rmtree(folder / BATCHES)


def write_batch(batch: Path, calls: Mapping[str, str]) -> None:
    (batch / ANSWERS).mkdir(parents=True)
    (batch / "log").mkdir()
    write_json(batch / TASKS, [{"name": name, "call": text} for name, text in calls.items()])


def run_part(batch: Path, part: int, of: int) -> None:
    """What one job does: every `of`-th task from `part` on, with one answer per task."""
    for number, task in list(enumerate(read_json(batch / TASKS)))[part::of]:
        write_json(batch / ANSWERS / f"{number}.json", {"name": task["name"], **run_call(task["call"])})


def collect(batch: Path, seen: set[str]) -> Iterator[tuple[str, dict]]:
    """New answers; adds their files to `seen`."""
    for name in sorted(set(os.listdir(batch / ANSWERS)) - seen):
        if name.endswith(".json") and not name.startswith("."):
            seen.add(name)
            answer = read_json(batch / ANSWERS / name)
            yield answer.pop("name"), answer


def _submitted(batch: Path, calls: Mapping[str, str], parts: int, arguments: Sequence[str]) -> Answers:
    """The answers of one job array, until all are there or no job is left."""
    lines = ["#!/bin/sh", *(f"export {name}={value}" for name, value in ONE_THREAD.items())]
    work = f'-m athanor work {shlex.quote(str(batch))} --part "$SLURM_ARRAY_TASK_ID" --of {parts}'
    write_text(batch / "job.sh", "\n".join([*lines, f"exec {shlex.quote(sys.executable)} {work}", ""]))
    command = ["sbatch", "--parsable", "--wait", f"--array=0-{parts - 1}", "--ntasks=1", "--job-name=athanor"]
    command += [f"--chdir={Path.cwd()}", f"--output={batch}/log/%a.txt", *arguments, str(batch / "job.sh")]
    pipe = subprocess.PIPE
    waiting = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert waiting.stdout is not None and waiting.stderr is not None
    job = ""
    try:
        job = waiting.stdout.readline().strip().split(";")[0]  # sbatch says it at once, then waits
        if not job:
            what = waiting.stderr.read().strip() or f"status {waiting.wait()}"
            raise InputError(f"sbatch refused: {what}", fix="see slurm_args in machine.yaml")
        write_text(batch / "job", job)
        seen: set[str] = set()
        ended: float | None = None
        count = len(calls)  # the caller takes away what is answered
        while len(seen) < count and (ended is None or time.monotonic() < ended + LATE):
            if ended is None and waiting.poll() is not None:
                ended = time.monotonic()
            time.sleep(POLL)
            yield from collect(batch, seen)
            yield None
    except BaseException:
        _cancel(job)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            waiting.kill()
        waiting.communicate()


def _cancel(job: str) -> None:
    if job:
        subprocess.run(["scancel", job], capture_output=True, check=False)
