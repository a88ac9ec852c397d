"""A report on a GPU in nine minutes: correct results, speed, memory, and the default pipeline. Needs no data or network.

    python tools/gpu_report.py OUT                                            # the first GPU
    python tools/gpu_report.py OUT --device cpu --preset micro                # rehearsal, two minutes on two cores
    python tools/gpu_report.py OUT --make-reference reference.npz             # fp32 results of this CPU, to take along
    python tools/gpu_report.py OUT --reference reference.npz --nanochat DIR   # its d12 next to ours, from a checkout

Each part runs in a process of its own with a time limit, and gives one JSON line: printed, and appended to
OUT/report.jsonl. A part that crashes, hangs or runs out of memory gives what it measured until then, and an `error`
with the last lines of stderr (all of them: OUT/stderr.txt). Parts are forked from a process that has imported
torch, and has not touched the GPU: importing it once for each of them would take a minute of the nine.

It needs torch, numpy and ruamel.yaml; the pipeline also psutil, pyarrow, sentencepiece and gguf. A part without what
it needs says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STDERR_LINES = 6
RESERVE = 3.0  # seconds of the total: to end a part, and to write


class Job(NamedTuple):
    """What all parts are given. `work`: scratch space that is removed at the end."""

    device: str
    preset: str
    reference: str
    nanochat: str
    work: Path


class Part(NamedTuple):
    """`usual`: seconds that it takes on an H100, without which it is not begun; `limit`: when it is killed."""

    function: str  # module.name
    usual: float
    limit: float
    options: dict[str, Any] = {}


def speed(usual: float, limit: float, **options: Any) -> Part:
    return Part("gpu_speed.speed", usual, limit, options)


# In this order: what is cheap and tells most comes first.
PARTS = {
    "machine": Part("gpu_speed.machine", 10, 40),
    "attention": Part("gpu_checks.attention", 15, 60),
    "pieces": Part("gpu_checks.pieces", 5, 40),
    "model": Part("gpu_checks.model", 25, 100),
    "choice": Part("gpu_speed.choice", 25, 120),
    "eager": speed(25, 60),
    "compiled": speed(30, 90, compile=True),
    "compiled-32": speed(25, 75, compile=True, rows=32),
    "compiled-efficient": speed(25, 75, compile=True, attention="efficient"),
    "hour-eager": speed(12, 45, preset="one-gpu-hour"),
    "hour-compiled": speed(20, 60, preset="one-gpu-hour", compile=True),
    "nanochat": Part("gpu_speed.nanochat", 40, 100),
    "d12": speed(30, 75, preset="d12", compile=True),
    "resume": Part("gpu_training.resume", 20, 60),
    "resume-efficient": Part("gpu_training.resume", 20, 60, {"attention": "efficient"}),
    "score": Part("gpu_training.score", 15, 45),
    "save": Part("gpu_training.save", 15, 60),
    "pipeline": Part("gpu_training.pipeline", 60, 140),
}
# To test the runner itself.
HIDDEN = {f"test-{kind}": Part("gpu_report.misbehave", 0, 2, {"kind": kind}) for kind in ("crash", "hang", "kill")}


def misbehave(job: Job, kind: str) -> Iterator[dict[str, Any]]:
    yield {"begun": True}
    if kind == "hang":
        time.sleep(3600)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise MemoryError("as planned")


def work_on(part: Part, job: Job, write: Callable[[dict[str, Any]], None]) -> None:
    """Run a part here; `write` is given what it measures piece by piece."""
    module, name = part.function.split(".")
    for facts in getattr(importlib.import_module(f"tools.{module}"), name)(job, **part.options):
        write(facts)


def run(part: Part, job: Job, limit: float) -> dict[str, Any]:
    """Run a part in a child; what it measured, and an error if it did not come to its end within `limit` seconds."""
    facts_path, log = job.work / "facts.jsonl", job.work / "log.txt"
    facts_path.write_text("")
    sys.stdout.flush()
    started, child = time.monotonic(), os.fork()
    with contextlib.suppress(OSError):  # in both processes, so that neither goes on before it is done
        os.setpgid(child, child)
    if not child:
        _child(part, job, facts_path, log)
    ended, status = 0, 0
    while not ended and time.monotonic() < started + limit:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # with compilers and stages that it has left behind
    if not ended:
        os.waitpid(child, 0)
    facts: dict[str, Any] = {}
    for line in facts_path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # killed while it wrote
            facts |= json.loads(line)
    if (code := os.waitstatus_to_exitcode(status)) or not ended:
        why = f"exit status {code}" if ended else f"no end within {limit:.0f} s"
        facts.setdefault("error", why)
        facts["stderr"] = log.read_text(errors="replace").strip().splitlines()[-STDERR_LINES:]
    return facts | {"seconds": round(time.monotonic() - started, 1)}


def _child(part: Part, job: Job, facts_path: Path, log: Path) -> None:
    """The child; never returns."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for target in (1, 2):
            os.dup2(output, target)
        os.chdir(job.work)
        with open(facts_path, "w") as file:

            def write(facts: dict[str, Any]) -> None:
                print(json.dumps(plain(facts)), file=file, flush=True)

            try:
                work_on(part, job, write)
                code = 0
            except BaseException as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]
                missing = isinstance(error, ModuleNotFoundError)
                write({"error": f"needs {error.name}" if missing else f"{type(error).__name__}: {lines[0]}"[:400]})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def plain(value: Any) -> Any:
    """`value` as JSON has it, with five digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, (int, str, type(None))) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--preset", default="plasma-1.1", help="the model of most parts")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=540.0, help="in all")
    parser.add_argument("--reference", type=Path, help="made by --make-reference; else this CPU computes it")
    parser.add_argument("--nanochat", type=Path, metavar="DIR")
    parser.add_argument("--make-reference", type=Path, metavar="FILE", help="do nothing else")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds - RESERVE
    names, known = args.parts.split(","), PARTS | HIDDEN
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    sys.path[0] = str(ROOT)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-report-", ignore_cleanup_errors=True) as work:
        os.environ |= {"DVC_ROOT": work, "ATHANOR_DEVICE": args.device, "ATHANOR_TRACKING": "off"}
        paths = [str(path.resolve()) if path else "" for path in (args.reference, args.nanochat)]
        job = Job(args.device, args.preset, *paths, Path(work))
        if args.make_reference:
            from tools import gpu_checks

            print(gpu_checks.make_reference(job, args.make_reference))
            return 0
        with contextlib.suppress(ImportError):  # which the parts tell
            from tools import gpu_checks, gpu_speed, gpu_training  # noqa: F401
        for name in names:
            part, left = known[name], deadline - time.monotonic()
            usual = part.usual if args.device == "cuda" else 0
            row = {"part": name}
            row |= run(part, job, min(part.limit * (1 if args.device == "cuda" else 5), left)) if left > usual else {"skipped": f"{left:.0f} s are left"}
            line = json.dumps(row)
            print(line, flush=True)
            with open(args.out / "report.jsonl", "a") as file:
                print(line, file=file)
            if (job.work / "log.txt").is_file():
                with open(args.out / "stderr.txt", "a") as file:
                    print(f"== {name}\n{(job.work / 'log.txt').read_text(errors='replace')[-20000:]}", file=file)
                (job.work / "log.txt").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
