"""A report on a GPU in nine minutes: correct results, speed, memory, and the default pipeline. Needs no data or network.

    python tools/gpu_report.py OUT                                            # the first GPU
    python tools/gpu_report.py OUT --device cpu --preset micro                # rehearsal, two minutes on two cores
    python tools/gpu_report.py OUT --make-reference reference.npz             # fp32 results of this CPU, to take along
    python tools/gpu_report.py OUT --reference reference.npz --nanochat DIR   # its d12 next to ours, from a checkout

Each part runs in a process of its own with a time limit, and gives one JSON line: printed, and appended to
OUT/report.jsonl. A part that crashes, hangs or runs out of memory gives what it measured until then, and an `error`
with the last lines of stderr (all of it: OUT/stderr.txt). Parts are forked from a process that has imported
torch and has not touched the GPU: importing it for each of them would take a minute of the nine.

It needs torch, numpy and ruamel.yaml; the pipeline more (docs/machine.md). A part that lacks a package says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESERVE = 3.0  # seconds of the total: to end a part, and to write
CPU_FACTOR = 5  # of the limits: a rehearsal may share its cores

# What is cheap and tells most comes first. `usual`: seconds on an H200, partly estimated; with fewer left the part is not begun.
# part            usual limit  function            options
PARTS = """
machine              25    45  gpu_speed:machine
attention            40    70  gpu_checks:attention
pieces               15    60  gpu_checks:pieces
model                50   120  gpu_checks:model
choice               55   120  gpu_speed:choice
eager                20    60  gpu_speed:speed     {}
compiled             35    90  gpu_speed:speed     {"compile": true, "attention": "varlen"}
hour-compiled        30    60  gpu_speed:speed     {"preset": "one-gpu-hour", "compile": true, "attention": "varlen"}
nanochat             80   130  gpu_speed:nanochat
d12                  45    75  gpu_speed:speed     {"preset": "d12", "compile": true}
resume               55    75  gpu_training:resume
resume-deterministic 55    75  gpu_training:resume {"deterministic": "on"}
score                25    45  gpu_training:score
save                 35    60  gpu_training:save
pipeline             80   150  gpu_training:pipeline
"""


def run(function: str, options: dict[str, Any], job: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run `module:function` in a child: all that it yielded, and an error if it did not end well within `limit` seconds."""
    facts, log = job.work / "facts.jsonl", job.work / "log.txt"
    for path in (facts, log):
        path.write_text("")
    sys.stdout.flush()
    started, child = time.monotonic(), os.fork()
    if not child:
        _measure(function, options, job, facts, log)
    status = _status(child, limit)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # with compilers and stages that it leaves behind
    row: dict[str, Any] = {}
    for line in facts.read_text().splitlines():
        with contextlib.suppress(ValueError):  # killed while it wrote
            row |= json.loads(line)
    if status != 0:
        tail = log.read_text(errors="replace").strip().splitlines()[-6:] or [""]
        if status is None:
            _status(child, RESERVE / 2)  # not for ever: a driver may hold it
            why = f"no end within {limit:.0f} s"
        else:
            why = tail[-1] if os.WIFEXITED(status) else f"killed by signal {os.WTERMSIG(status)}"
        row |= {"error": re.sub(r".*ModuleNotFoundError.*'([\w.]+)'.*", r"needs \1", why)[:400], "stderr": tail}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _status(child: int, limit: float) -> int | None:
    """How a child ended; None if it has not after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    return ended[1]


def _measure(function: str, options: dict[str, Any], job: argparse.Namespace, facts: Path, log: Path) -> None:
    """The child; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(job.work)
        with open(log, "w") as output, open(facts, "w") as file:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            try:
                from athanor.base.artifacts import rounded

                module, name = function.split(":")
                for row in getattr(importlib.import_module(module), name)(job, **options):
                    print(json.dumps(rounded(row, 5)), file=file, flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> int:
    table = {row.split()[0]: row.split(None, 4) for row in PARTS.strip().splitlines()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--preset", default="plasma-1.1", help="the model of most parts")
    parser.add_argument("--parts", default=",".join(table), help="a name, or module:function of your own")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all")
    parser.add_argument("--limit", type=float, help="seconds of a part of your own", default=60.0)
    parser.add_argument("--reference", type=Path, help="made by --make-reference; else this CPU computes it")
    parser.add_argument("--nanochat", type=Path, metavar="DIR")
    parser.add_argument("--make-reference", type=Path, metavar="FILE", help="do nothing else")
    job = parser.parse_args()
    deadline = time.monotonic() + job.seconds - RESERVE
    for name in ("out", "reference", "nanochat", "make_reference"):
        setattr(job, name, getattr(job, name) and getattr(job, name).resolve())
    if job.make_reference:
        job.device, job.reference = "cpu", None
    job.out.mkdir(parents=True, exist_ok=True)
    sys.path[0] = str(ROOT)
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *inherited])
    with tempfile.TemporaryDirectory(prefix="gpu-report-", ignore_cleanup_errors=True) as work:
        job.work = Path(work)
        os.environ |= {"DVC_ROOT": work, "ATHANOR_DEVICE": job.device, "ATHANOR_TRACKING": "off"}
        with contextlib.suppress(ImportError):  # the parts say it
            from tools import gpu_checks, gpu_training  # noqa: F401
        if job.make_reference:
            gpu_checks.make_reference(job)
            return 0
        for part in job.parts.split(","):
            _, usual, limit, function, options = [*table.get(part, ["", 0, 0, part]), "{}"][:5]
            left = deadline - time.monotonic()
            row = {"skipped": f"{max(left, 0.0):.0f} s are left"}
            if left > (float(usual) if job.device == "cuda" else 0.0):
                most = float(limit) * (1 if job.device == "cuda" else CPU_FACTOR) or job.limit
                module = function if function == part else f"tools.{function}"
                row = run(module, json.loads(options), job, min(most, left))
            with open(job.out / "report.jsonl", "a") as file, open(job.out / "stderr.txt", "a") as errors:
                for stream in (sys.stdout, file):
                    print(json.dumps({"part": part, **row}), file=stream, flush=True)
                if "seconds" in row:
                    print(f"== {part}\n{(job.work / 'log.txt').read_text(errors='replace')[-20000:]}", file=errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
