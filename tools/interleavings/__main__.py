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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from athanor.base.artifacts import write_json
from athanor.cli import slots as command
from athanor.cli import stop as stop_command
from athanor.runtime import guards, ship
from athanor.runtime.journal import Journal
from athanor.runtime.slots import Slot
from tools.interleavings.scheduler import World, watched

MONTH = 30 * 86400.0
FACTS = {"params": {"pretrain": {"lr": 1.0, "batch_tokens": 64}}, "inputs": {}}


# Who meets whom: the real functions as actors, what is there before, and what has to hold afterwards.


# -- slots ------------------------------------------------------------------------


def folder(world: World) -> Path:
    return world.root / ".athanor" / "slots" / "pretrain"


def stage(world: World, *, code: str = "") -> Callable[[], None]:
    """A stage that enters its slot, saves, and ends unfinished, as a stop on request does."""

    def act() -> None:
        with slot_of(world, code) as slot:
            with world.alone("writers in one slot"):
                saved = slot.path / "step_00000001" / "state.json"
                saved.parent.mkdir(exist_ok=True)
                saved.touch()
                world.check(saved.is_file() and (slot.path / "facts.json").is_file(), "living work was deleted")

    return act


def slot_of(world: World, code: str = "") -> Slot:
    if not code:
        return Slot(folder(world), FACTS)
    from athanor.runtime.slots import Code

    return Slot(folder(world), FACTS, code=Code("m", {"a.py": code}), note=lambda text: None)


def before(world: World, *, done: bool, code: str = "", seconds: float = 0.0) -> Path:
    """A slot that lies there already."""
    with slot_of(world, code) as slot:
        (slot.path / "step_00000009").mkdir()
        (slot.path / "step_00000009" / "state.json").touch()
        if done:
            slot.mark_done()
    if seconds:
        (slot.path / "seconds").write_text(str(seconds))
    return slot.path


def prune(world: World, *, unfinished: bool) -> Callable[[], None]:
    def act() -> None:
        later = time.time() + MONTH
        for slot in command.prunable(command.find(world.root), later, days=7.0, max_bytes=None, unfinished=unfinished):
            command.remove(slot)

    return act


def two_stages(world: World) -> None:
    for name in "ab":
        world.add(f"stage {name}", stage(world))


def stage_and_prune(world: World) -> None:
    before(world, done=True)
    world.add("stage", stage(world))
    world.add("prune", prune(world, unfinished=False))


def stages_and_prune(world: World) -> None:
    before(world, done=False)
    for name in "ab":
        world.add(f"stage {name}", stage(world))
    world.add("prune", prune(world, unfinished=True))


def two_prunes_and_list(world: World) -> None:
    before(world, done=True)
    for name in "ab":
        world.add(f"prune {name}", prune(world, unfinished=False))
    world.add("list", lambda: command.find(world.root) and None)


def anew_and_prune(world: World) -> Callable[[], None]:
    """A finished slot is begun anew by other code while prune, which saw it finished, comes to remove it."""
    before(world, done=True, code="old")
    saved = []

    def act() -> None:
        stage(world, code="new")()
        saved.append(True)

    world.add("stage", act)
    world.add("prune", prune(world, unfinished=False))
    progress = folder(world).glob
    return lambda: world.check(not saved or bool(list(progress("*/step_00000001"))), "saved progress was deleted")


def pin_and_prune(world: World) -> Callable[[], None]:
    path, pinned = before(world, done=True), []

    def pin() -> None:
        command.pin(command.choose(command.find(world.root), path.name), True)
        pinned.append(True)

    world.add("pin", pin)
    world.add("prune", prune(world, unfinished=False))
    return lambda: world.check(not pinned or (path / "facts.json").is_file(), "a pinned slot was deleted")


def adopt_and_stages(world: World) -> Callable[[], None]:
    path = before(world, done=False, code="old", seconds=36000)
    world.add("stage a", stage(world, code="new"))
    world.add("adopt", lambda: command.adopt(command.find(world.root), "") and None)
    world.add("stage b", stage(world, code="old"))
    return lambda: world.check((path / "step_00000009/state.json").is_file(), "work of hours was deleted")


def drop_and_stage(world: World) -> None:
    before(world, done=False, code="old", seconds=36000)

    def drop() -> None:
        command.remove(command.choose(command.find(world.root), slot_of(world).fingerprint))

    world.add("stage", stage(world, code="old"))
    world.add("drop", drop)


# -- stop -------------------------------------------------------------------------


def run_folder(world: World, name: str) -> Path:
    path = world.root / ".athanor" / "runs" / name
    path.mkdir(parents=True)
    write_json(path / "meta.json", {"pid": os.getpid(), "stage": name})
    return path


def stop_and_stages(world: World) -> Callable[[], None]:
    """Two stages ask between two steps whether they have to stop; one command stops both."""
    local = mock.Mock(max_minutes=0.0, min_free_gib=0.0)
    stopped, home = [], world.root / ".athanor"

    def runs(path: Path, journal: Journal, asked: guards.Guards) -> Callable[[], None]:
        def act() -> None:
            while asked.stop() is None:
                time.sleep(1.0)
            stopped.append(path.name)
            journal.close("KILLED", error="stopped")

        return act

    for name in ("a", "b"):
        path = run_folder(world, name)
        world.add(f"stage {name}", runs(path, Journal(path), guards.Guards(home, world.root, local, {})))

    def stop() -> None:
        with mock.patch.object(stop_command, "print", lambda *words, **more: None, create=True):
            world.check(stop_command.stop(world.root, 60.0) == 0, "stop gave up")

    world.add("stop", stop)
    return lambda: world.check(len(stopped) == 2 and not (home / guards.STOP).exists(), "a stage was not stopped")


# -- shippers -----------------------------------------------------------------------


def shippers(world: World) -> Callable[[], None]:
    """Two stages end and start a shipper each; whatever was written when a stage ended arrives."""
    (world.root / ".athanor").mkdir()

    def unshipped(root: Path) -> list[Path]:
        return [path for path in sorted((root / ".athanor" / "runs").glob("*")) if not (path / "shipped").exists()]

    def ship_all(root: Path, beat: Callable[[], None]) -> set[Path]:
        with world.alone("shippers"):
            for path in unshipped(root):
                (path / "shipped").touch()
        return set()

    def serve() -> None:
        ship._serve(world.root)

    def spawn(*_: Any, **__: Any) -> None:
        world.add("shipper", serve)

    def ends(name: str) -> Callable[[], None]:
        def act() -> None:
            write_json(run_folder(world, name) / "end.json", {"status": "FINISHED"})
            ship._start(world.root)

        return act

    for name in "ab":
        world.add(f"stage {name}", ends(name))
    patches = [mock.patch.object(ship, name, value) for name, value in
               (("unshipped", unshipped), ("ship_all", ship_all), ("step_back", lambda: None))]  # fmt: skip
    patches.append(mock.patch.object(subprocess, "Popen", spawn))
    for patch in patches:
        patch.start()

    def end() -> None:
        world.check(not unshipped(world.root), "a run that nobody ships")
        for patch in patches:
            patch.stop()

    return end


SCENARIOS: dict[str, Callable[[World], Callable[[], None] | None]] = {
    "two-stages": two_stages,
    "stage-prune": stage_and_prune,
    "stages-prune": stages_and_prune,
    "prunes-list": two_prunes_and_list,
    "anew-prune": anew_and_prune,
    "pin-prune": pin_and_prune,
    "adopt-stages": adopt_and_stages,
    "drop-stage": drop_and_stage,
    "stop-stages": stop_and_stages,
    "shippers": shippers,
}


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
