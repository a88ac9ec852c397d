"""A score in a process of its own: it may take memory, hang or crash, and nothing else notices.

    python -m athanor.evaluation.perplexity.child JOB.json RESULT.json
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.errors import AthanorError, GateError, InputError
from athanor.hardware.priority import step_back

if TYPE_CHECKING:
    from athanor.evaluation.perplexity.job import Job

ROOT = Path(__file__).resolve().parents[3]
SPARE_SECONDS = 5


def apart(job: Job, *, low_priority: bool) -> list[dict[str, Any]]:
    """The rows of a job, made by another process within `job.timeout_seconds`; its error, if it ends with one."""
    with tempfile.TemporaryDirectory(prefix="athanor-child-") as folder:
        paths = [Path(folder) / name for name in ("job.json", "result.json", "log.txt")]
        paths[0].write_text(json.dumps(asdict(job)), encoding="utf-8")
        words = [str(paths[0]), str(paths[1]), "low" if low_priority else "usual"]
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with paths[2].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "athanor.evaluation.perplexity.child", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | threads | {"PYTHONPATH": search, "TMPDIR": folder},
                start_new_session=True,
            )
        try:
            status = process.wait(job.timeout_seconds)
        except subprocess.TimeoutExpired:
            raise GateError(
                "evaluation", f"no score in {job.timeout_seconds:g} s", where=job.model, fix="raise --timeout"
            ) from None
        finally:  # also on a signal: with all that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == 0:
            return json.loads(paths[1].read_text(encoding="utf-8"))["rows"]
        if paths[1].is_file():
            raise InputError(json.loads(paths[1].read_text(encoding="utf-8"))["error"])
        lines = paths[2].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        told = " / ".join(line.strip() for line in lines[-3:])[-400:] or "no message"
        raise GateError("evaluation", f"its process ended with status {status}: {told}", where=job.model)


def main(job_path: str, result_path: str, priority: str) -> int:
    if priority == "low":
        step_back()  # before the imports, which are work as well
    import torch

    from athanor.evaluation.perplexity.job import Job, run

    job = Job(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    signal.alarm(int(job.timeout_seconds) + SPARE_SECONDS)  # also when the parent was killed and nobody waits
    torch.set_num_threads(job.threads)
    try:
        result, status = {"rows": run(job)}, 0
    except AthanorError as error:
        result, status = {"error": str(error)}, 1
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
