"""`dvc repro` with a summary at the end.

    python -m athanor repro [arguments of dvc repro]
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from athanor.commands import summary
from athanor.commands.data import report
from athanor.errors import ParamsError
from athanor.pipeline import ship
from athanor.pipeline.run import PARAMS
from athanor.pipeline.schema import check_file

SHIP_SECONDS = 60.0
SHIP_SECONDS_AFTER_FAILURE = 5.0


def main() -> int:
    root = Path.cwd()
    try:
        check_file(PARAMS)  # before DVC, which deletes a stage's outputs and only then starts it
    except ParamsError as error:
        print(error, file=sys.stderr)
        return 1
    since_ms, before = int(time.time() * 1000), summary.runs(root)
    # Ctrl-C reaches dvc and its stage as well; they save and leave, and this process must outlive them: in a
    # container its end would be theirs. A handler and not SIG_IGN, which dvc would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    status = subprocess.call([sys.executable, "-m", "dvc", "repro", *sys.argv[1:]])
    page = None if status else report.refresh(root)
    left = ship.wait(root, SHIP_SECONDS_AFTER_FAILURE if status else SHIP_SECONDS)
    sys.stdout.write(summary.text(root, before, since_ms))
    if page:
        print(f"Data      {page.relative_to(root)}  (what was kept and why; athanor data report --open)")
    if left:
        print(f"Tracking  {left} runs are still to be shipped to MLflow; the next run or `make ui` does it")
    if status:
        print(
            "\ndvc repro did not finish: the message of the stage is above. Finished stages are kept;"
            " mend the cause and run it again, long stages resume where they were.",
            file=sys.stderr,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
