"""What tracking costs a training run, on this machine.

    python tools/bench_tracking.py CLONE [--pairs 7] [--tokens 600000] [--uri URI]

CLONE is a checkout in which `make repro` has run with the micro preset; it is
copied and not touched. The pretrain stage runs in pairs, once with tracking and
once without, in alternating order, each from a fresh slot and after the shipper
of the run before has left. Printed: the ratio of seconds per step and of the
whole stage's wall time (the shipper imports mlflow while the stage starts), and
the cost of a journal line. With --uri the tracked runs use that store, for
example http://127.0.0.1:9, where nobody answers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from athanor.base.artifacts import read_json  # noqa: E402
from athanor.runtime.journal import Journal  # noqa: E402
from athanor.runtime.ship import try_lock  # noqa: E402

LINES = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(description="what tracking costs a training run")
    parser.add_argument("clone", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=600_000)
    parser.add_argument("--uri", default="", help="tracking store of the tracked runs (default: mlflow.db in the copy)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "clone"
        left = shutil.ignore_patterns(".git", "cache", "runs", "mlflow.db*", "mlartifacts")
        shutil.copytree(args.clone, root, symlinks=True, ignore=left)
        lengthen(root, args.tokens)
        one_run(root, "on", args.uri)  # warms the page cache and makes the database
        pairs = []
        for number in range(args.pairs):
            order = ("on", "off") if number % 2 else ("off", "on")
            found = {mode: one_run(root, mode, args.uri) for mode in order}
            pairs.append(found)
            step, wall = (found["on"][i] / found["off"][i] for i in (0, 1))
            print(f"pair {number + 1}: step {step:.3f}, stage {wall:.3f}, {found}", flush=True)
    for name, i in (("seconds per step", 0), ("wall time of the stage", 1)):
        ratios = sorted(pair["on"][i] / pair["off"][i] for pair in pairs)
        same = [pair["off"][i] for pair in pairs]
        noise = statistics.stdev(same) / statistics.mean(same) if len(same) > 1 else float("nan")
        print(
            f"{name}, tracking on / off: median {statistics.median(ratios):.4f}, min {ratios[0]:.4f},"
            f" max {ratios[-1]:.4f} over {len(ratios)} pairs; spread of the runs without tracking {noise:.1%}"
        )
    print(f"a journal line of 6 numbers: {line_seconds() * 1e6:.1f} microseconds")
    return 0


def lengthen(root: Path, tokens: int) -> None:
    """A longer training without the samples and validations in between, which only add noise."""
    yaml = YAML()
    params = yaml.load(root / "params.yaml")
    params["pretrain"] |= {"tokens": tokens, "validation_every_tokens": tokens, "sample_every_tokens": tokens}
    yaml.dump(params, root / "params.yaml")


def one_run(root: Path, mode: str, uri: str) -> tuple[float, float]:
    """Seconds per step, and wall seconds, of one pretrain stage from a fresh slot."""
    for name in ("slots", "runs"):
        shutil.rmtree(root / ".athanor" / name, ignore_errors=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "ATHANOR_", "DVC_"))}
    tracking = {"ATHANOR_TRACKING": "off"} if mode == "off" else {"MLFLOW_TRACKING_URI": uri} if uri else {}
    started = time.monotonic()
    command = [sys.executable, "-m", "stages.pretrain"]
    subprocess.run(command, cwd=root, env={**clean, **tracking}, check=True, stderr=subprocess.DEVNULL)
    wall = time.monotonic() - started
    timings = read_json(root / "metrics" / "runs" / "pretrain.json")["facts"]
    steps = read_json(root / "metrics" / "pretrain.json")["steps"]
    wait_for_shipper(root)
    return round(timings["train_seconds"] / steps, 6), round(wall, 3)


def wait_for_shipper(root: Path) -> None:
    while True:
        with try_lock(root / ".athanor" / "ship.lock") as free:
            if free:
                return
        time.sleep(0.2)


def line_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        values = {name: 0.123456789 for name in ("loss", "lr", "grad_norm", "tokens", "skipped", "tokens_per_second")}
        started = time.monotonic()
        for step in range(LINES):
            journal.scalars(step, values)
        return (time.monotonic() - started) / LINES


if __name__ == "__main__":
    sys.exit(main())
