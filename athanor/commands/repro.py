"""`dvc repro` with a summary at the end.

    python -m athanor repro [--max-minutes N] [arguments of dvc repro]

With --max-minutes, a stage that is at work when the time is over saves and
ends, and the status is 75; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from athanor.artifacts import read_json
from athanor.commands import summary
from athanor.commands.data import report
from athanor.errors import ParamsError
from athanor.pipeline import ship
from athanor.pipeline.guards import UNTIL
from athanor.pipeline.run import PARAMS
from athanor.pipeline.schema import check_file

SHIP_SECONDS = 60.0
SHIP_SECONDS_AFTER_FAILURE = 5.0
STOPPED = 75


def main() -> int:
    root = Path.cwd()
    parser = argparse.ArgumentParser(prog="athanor repro", add_help=False, allow_abbrev=False)
    parser.add_argument("--max-minutes", type=float)
    own, words = parser.parse_known_args()
    # A moment and not an amount: the stages of one repro share what is left.
    until = {} if own.max_minutes is None else {UNTIL: f"{time.time() + 60 * own.max_minutes:.1f}"}
    try:
        check_file(PARAMS)  # before DVC, which deletes a stage's outputs and only then starts it
    except ParamsError as error:
        print(error, file=sys.stderr)
        return 1
    since_ms, before = int(time.time() * 1000), summary.runs(root)
    # Ctrl-C reaches dvc and its stage as well; they save and leave, and this process must outlive them: in a
    # container its end would be theirs. A handler and not SIG_IGN, which dvc would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    status = subprocess.call([sys.executable, "-m", "dvc", "repro", *words], env={**os.environ, **until})
    page = None if status else report.refresh(root)
    left = ship.wait(root, SHIP_SECONDS_AFTER_FAILURE if status else SHIP_SECONDS)
    sys.stdout.write(summary.text(root, before, since_ms))
    if page:
        print(f"Data      {page.relative_to(root)}  (what was kept and why; athanor data report --open)")
    if left:
        print(f"Tracking  {left} runs are still to be shipped to MLflow; the next run or `make ui` does it")
    if status and stopped(root, since_ms):
        told = "a stage stopped on request; the same command goes on from there."
        print(f"\ndvc repro did not finish: {told}", file=sys.stderr)
        return STOPPED
    if status:
        print(
            "\ndvc repro did not finish: the message of the stage is above. Finished stages are kept;"
            " mend the cause and run it again, long stages resume where they were.",
            file=sys.stderr,
        )
    return status


def stopped(root: Path, since_ms: int) -> bool:
    """Whether a run ended on request since then, and not because of an error."""
    ends = [read_json(path) for path in (root / ".athanor" / "runs").glob("*/end.json")]
    return any(end["status"] == "KILLED" and end["ended_ms"] >= since_ms for end in ends)


if __name__ == "__main__":
    sys.exit(main())
