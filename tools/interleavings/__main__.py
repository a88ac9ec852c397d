"""Every order in which two or three processes can meet at the locks, up to a number of preemptions.

    python -m tools.interleavings [SCENARIO ...] [--preemptions 3] [--schedules N]

The real functions run: slots are entered, pruned, pinned, dropped and adopted,
stages take STOP, shippers start. Each actor stands for a process; before every
call that opens, locks, renames, removes or looks at a file, a scheduler decides
who goes on. It tries all schedules with at most so many preemptions (another
actor than the one that would go on; where that has to wait for a lock any may), one after
another, each in a fresh folder. Schedules are found as CHESS does (Musuvathi &
Qadeer, PLDI 2007). Violations are

    two writers in one slot, two shippers at once
    an error that is none of ours (a raw OSError), a deadlock
    work of a living process, a pinned slot or saved progress deleted; a run that nobody ships

Exit status: 0 when there are none. Run in an older checkout, with this one in PYTHONPATH, its library is tried.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from tools.interleavings.scenarios import SCENARIOS
from tools.interleavings.scheduler import World, watched


def explore(name: str, preemptions: int, most: int) -> tuple[int, Counter[str]]:
    """Schedules tried of a scenario, at most so many, and each kind of violation with the number of its schedules."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    violations: Counter[str] = Counter()
    queue: list[list[int]] = [[]]
    tried = 0
    with mock.patch("sys.stderr", io.StringIO()):
        while queue and tried < most:
            # From both ends: a number that is cut off has seen early and late differences.
            prefix = queue.pop(0 if tried % 2 else -1)
            root = Path(tempfile.mkdtemp(prefix="interleavings-", dir=base))
            try:
                world = World(root, prefix)
                end = SCENARIOS[name](world)
                with watched(world):
                    world.run()
                if end is not None:
                    end()
            finally:
                shutil.rmtree(root, ignore_errors=True)
            violations.update(set(world.problems))
            queue += world.alternatives(preemptions)
            tried += 1
    return tried, violations


def main() -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"default: all of {', '.join(SCENARIOS)}")
    parser.add_argument("--preemptions", type=int, default=3)
    parser.add_argument("--schedules", type=int, default=10**9, help="at most so many of each scenario")
    args = parser.parse_args()
    total = bad = 0
    for name in args.scenarios or SCENARIOS:
        tried, violations = explore(name, args.preemptions, args.schedules)
        total, bad = total + tried, bad + sum(violations.values())
        print(f"{name:<14} {tried:>8,} schedules  {sum(violations.values()):>6,} violations", flush=True)
        for problem, count in violations.most_common(5):
            print(f"    {count:>6,}  {problem}")
    print(f"{'total':<14} {total:>8,} schedules  {bad:>6,} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
