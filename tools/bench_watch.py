"""Does scoring checkpoints beside a training slow its steps? Measured within one run, in phases with and without.

    ATHANOR_LOG_EVERY_STEPS=1 python -m stages.pretrain &        a training that lasts, in this checkout
    python tools/bench_watch.py [--pairs N] [--seconds S] [--backend llama.cpp] [--set FILE]

Each pair holds one phase with scores (one after the other without a pause, on
the newest checkpoint, at the low priority of `athanor evaluate --watch`) and
one without, in alternating order, so that a slow drift of the machine counts
for neither. Printed is the ratio of seconds per step with to without, the
geometric mean over pairs with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# 97.5 % quantiles of Student's t by degrees of freedom; beyond, the last: a hair too wide.
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
SETTLE = 1.0  # s after a switch that count for neither phase


def quantile(pairs: int) -> float:
    return T[min(pairs - 1, len(T)) - 1]


def load(words: list[str]) -> int:
    """Score again and again until a signal comes."""
    from athanor.runtime.machine import step_back

    step_back()
    from athanor.base.errors import AthanorError
    from athanor.cli.evaluate.main import follow, options

    class Nothing:
        def add(self, rows: list[dict]) -> None:
            print(f"{rows[0]['seconds']:g} s", flush=True)

    parser = argparse.ArgumentParser()
    options(parser)
    args = parser.parse_args(["--watch", *words])
    while True:
        try:
            follow(args, Nothing(), Path.cwd(), once=True)
        except AthanorError as error:
            print(error, flush=True)
            time.sleep(0.5)


def seconds_per_step(journal: Path, begin: float, end: float) -> float:
    """From the rows that were written between two times (s since the epoch)."""
    rows = [json.loads(line) for line in journal.read_text().split("\n") if '"loss"' in line]
    inside = [(row["t"] / 1000, row["s"]) for row in rows if begin <= row["t"] / 1000 <= end]
    if len(inside) < 4:
        raise SystemExit(f"only {len(inside)} steps in a phase: raise --seconds, or is the training over?")
    (t0, s0), (t1, s1) = inside[0], inside[-1]
    return (t1 - t0) / (s1 - s0)


def running() -> Path:
    """The journal of the training that works in this checkout."""
    from athanor.runtime.journal import alive

    found = [
        p.parent for p in Path(".athanor/runs").glob("*/meta.json") if p.parent.name.startswith(("pretrain", "sft"))
    ]
    at_work = [folder for folder in found if alive(folder)]
    if not at_work:
        raise SystemExit("no training is at work in this folder")
    return at_work[-1] / "journal.jsonl"


def main() -> int:
    if sys.argv[1:2] == ["--load"]:
        return load(sys.argv[2:])
    parser = argparse.ArgumentParser(description="step time with and without scoring beside it")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    args, words = parser.parse_known_args()
    journal, ratios, scores = running(), [], 0
    for pair in range(args.pairs):
        times = {}
        for busy in (pair % 2 == 0, pair % 2 == 1):
            process = None
            if busy:
                command = [sys.executable, __file__, "--load", *words]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
                )
            begin = time.time() + SETTLE
            time.sleep(SETTLE + args.seconds)
            end = time.time()
            if process is not None:
                process.send_signal(signal.SIGINT)
                scores += sum(line.endswith(" s\n") for line in process.communicate()[0].splitlines(keepends=True))
            times[busy] = seconds_per_step(journal, begin, end)
        ratios.append(math.log(times[True] / times[False]))
        print(f"pair {pair + 1}: {times[False]:.4f} s per step without, {times[True]:.4f} with", flush=True)
    mean = sum(ratios) / len(ratios)
    print(f"ratio {math.exp(mean):.4f}", end="")
    if len(ratios) > 1:
        spread = math.sqrt(sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1) / len(ratios))
        half = quantile(len(ratios)) * spread
        print(f", 95 % interval {math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}", end="")
    print(f" over {len(ratios)} pairs; {scores} scores meanwhile")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
