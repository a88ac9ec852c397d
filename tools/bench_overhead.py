"""What the pipeline costs beyond the work: `dvc repro` with nothing to do, and each stage when it runs.

    python tools/bench_overhead.py [CHECKOUT] [--repeats N]

CHECKOUT is a built checkout (default: the current directory); copies of it are
measured in a temporary directory, the repeats interleaved.

No-op: `dvc repro` in the copy, against a second copy in which every command is
`true`, so that stages, dependencies, parameters and outputs are equally many.

Stage: `dvc repro --force` runs all of them. A stage's time lasts from DVC's line
"Running stage" to the next one (interpreter, imports, Git, journal, hashing and
caching the outputs, DVC's look at the next stage). Less the time inside the
stage's body, from which imports are taken out again, and less the time of
`python -c 'import torch'` where the stage loads torch, it is the overhead. A
second figure also takes out the import of transformers, with which `export` compares.
What DVC needs before the first stage comes once for a command, on its own line.

Exit status 1 when a limit is exceeded: 1.1 times for the no-op, 1.5 s for a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from athanor.base.strict import read_yaml  # noqa: E402

NOOP_LIMIT, STAGE_LIMIT = 1.1, 1.5
TORCH = "import torch"
TRANSFORMERS = "import torch; from transformers import AutoTokenizer, LlamaForCausalLM"
TIMED = r'''
import builtins, functools, importlib, json, os, runpy, sys, threading, time

sys.path[0] = os.getcwd()  # as `python -m` does
spent, local = [0.0], threading.local()
LOADS = ("torch", "transformers")

def counted(function):
    """Adds up the time of the outermost imports of each thread."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        depth = getattr(local, "depth", 0)
        local.depth, began = depth + 1, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            local.depth = depth
            if depth == 0 and threading.current_thread() is threading.main_thread():
                spent[0] += time.perf_counter() - began
    return call

import athanor.runtime.process as pipeline
execute = pipeline.execute

def timed(stage, body):
    @functools.wraps(body)
    def work(run):
        builtins.__import__, importlib.import_module = counted(__import__), counted(importlib.import_module)
        began = time.perf_counter()
        body(run)
        facts = {"body": time.perf_counter() - began, "imports": spent[0], "loads": [n for n in LOADS if n in sys.modules]}
        with open(".athanor/timed.jsonl", "a") as file:
            file.write(json.dumps({"stage": stage, **facts}) + "\n")
    return execute(stage, work)

pipeline.execute = timed
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
'''


def copy(checkout: Path, path: Path) -> None:
    ignored = shutil.ignore_patterns(".venv", "mlflow.db*", "mlartifacts", "tmp", "dvc_plots", "__pycache__")
    shutil.copytree(checkout, path, symlinks=True, ignore=ignored)
    for state in (path / ".athanor" / "runs").glob("*/ship.json"):
        state.unlink()  # of the original's database


def environment() -> dict[str, str]:
    hidden = ("DVC_", "MLFLOW_", "ATHANOR_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    return {**clean, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def call(root: Path, *words: str) -> float:
    """Wall time of `python WORDS`; an error ends the benchmark."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=root, env=environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(words)} exited {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds


def rewrite(root: Path, command: Callable[[str], str]) -> list[tuple[str, str]]:
    """Give every stage another command and accept it without running; returns stages and modules."""
    path = root / "dvc.yaml"
    text = path.read_text(encoding="utf-8")
    found = [(name, stage["cmd"].removeprefix("python -m ")) for name, stage in read_yaml(path)["stages"].items()]
    for _, module in found:
        text = text.replace(f"cmd: python -m {module}\n", f"cmd: {command(module)}\n")
    path.write_text(text)
    call(root, "-m", "dvc", "commit", "--force")
    return found


def noop(ours: Path, twin: Path, repeats: int) -> tuple[list[float], list[float]]:
    times: dict[Path, list[float]] = {ours: [], twin: []}
    for root in (ours, twin):  # DVC remembers hashes from here on
        call(root, "-m", "dvc", "repro", "-q")
    for number in range(repeats):
        for root in (ours, twin) if number % 2 else (twin, ours):
            times[root].append(call(root, "-m", "dvc", "repro"))
    return times[ours], times[twin]


def measure(root: Path, rows: dict[str, list[dict[str, Any]]]) -> float:
    """Run every stage and add a row to each: wall, body without imports, imports in it. Returns DVC's start."""
    notes = root / ".athanor" / "timed.jsonl"
    notes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "dvc", "repro", "--force"]
    marks, began = [], time.perf_counter()
    with open(root / ".athanor" / "stderr.log", "w") as log:
        child = subprocess.Popen(command, cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
        for line in child.stdout or ():
            if line.startswith("Running stage"):
                marks.append((line.split("'")[1], time.perf_counter()))
    if child.wait():
        sys.exit(f"dvc repro --force exited {child.returncode}\n{Path(log.name).read_text()[-3000:]}")
    ends = [start for _, start in marks[1:]] + [time.perf_counter()]
    facts = {row["stage"]: row for row in map(json.loads, notes.read_text().splitlines())}
    for (stage, start), end in zip(marks, ends, strict=True):
        row = facts[stage]
        body = row["body"] - row["imports"]
        rows[stage].append({"wall": end - start, "body": body, "imports": row["imports"], "loads": row["loads"]})
    return marks[0][1] - began


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description="overhead of the pipeline")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path.cwd())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as scratch:
        ours, twin, timed = (Path(scratch) / name for name in ("ours", "twin", "timed"))
        for path in (ours, twin, timed):
            copy(args.checkout, path)
        rewrite(twin, lambda module: "'true'")  # quoted: YAML has a word of that name
        (timed / ".athanor" / "timed.py").write_text(TIMED)
        stages = rewrite(timed, lambda module: f"python .athanor/timed.py {module}")
        mine, theirs = noop(ours, twin, 2 * args.repeats)
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        print(f"`dvc repro` with nothing to do, {2 * args.repeats} pairs: seconds, median (smallest to largest)\n")
        print("| graph | seconds |\n|---|---|")
        print(f"| this pipeline, {len(stages)} stages | {spread(mine)} |\n| the same with `true` | {spread(theirs)} |")
        print(f"| ratio within a pair | {spread(ratios)} |\n")
        starts: list[float] = []
        loading: dict[str, list[float]] = {TORCH: [], TRANSFORMERS: []}
        rows: dict[str, list[dict[str, Any]]] = {stage: [] for stage, _ in stages}
        for _ in range(args.repeats):
            for code, seconds in loading.items():
                seconds.append(call(timed, "-c", code))
            starts.append(measure(timed, rows))
        print(f"`dvc repro --force`, {args.repeats} times; seconds until the first stage: {spread(starts)};")
        print("; ".join(f"`{code}`: {spread(seconds)}" for code, seconds in loading.items()) + "\n")
        exceeded = report(rows, loading)
        # The shipper outlives the last stage by seconds; its directory must not vanish under it.
        call(timed, "-m", "athanor", "ship", "--wait", "60")
        deadline = time.monotonic() + 30
        while subprocess.run(["flock", "-n", str(timed / ".athanor" / "ship.lock"), "true"]).returncode:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
    ratio = statistics.median(ratios)
    exceeded += [f"no-op ratio {ratio:.2f} > {NOOP_LIMIT}"] if ratio > NOOP_LIMIT else []
    print("\n" + ("\n".join(exceeded) if exceeded else f"within {NOOP_LIMIT} and {STAGE_LIMIT} s"))
    return 1 if exceeded else 0


def report(rows: dict[str, list[dict[str, Any]]], loading: dict[str, list[float]]) -> list[str]:
    """Print the table of stages; returns those above the limit."""
    print(
        "| stage | wall | body | loads | overhead beyond `import torch` | beyond all it loads |\n|---|---|---|---|---|---|"
    )
    exceeded = []
    for stage, runs in rows.items():
        loads = runs[0]["loads"]
        code = TRANSFORMERS if "transformers" in loads else TORCH
        beyond = {
            name: [
                run["wall"] - run["body"] - (load if loads else 0.0)
                for run, load in zip(runs, loading[name], strict=True)
            ]
            for name in (TORCH, code)
        }
        wall, body = (statistics.median(run[key] for run in runs) for key in ("wall", "body"))
        first, last = beyond[TORCH], beyond[code]
        print(f"| `{stage}` | {wall:.2f} | {body:.2f} | {', '.join(loads)} | {spread(first)} | {spread(last)} |")
        if statistics.median(last) > STAGE_LIMIT:
            exceeded.append(f"{stage}: {statistics.median(last):.2f} s > {STAGE_LIMIT} s")
    return exceeded


if __name__ == "__main__":
    sys.exit(main())
