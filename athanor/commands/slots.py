"""The checkpoint slots of long stages: what is there, what may go.

    python -m athanor slots                     list them
    python -m athanor slots prune [--days D] [--max-gib G] [--unfinished] [--dry-run]
    python -m athanor slots pin ID | unpin ID   keep one whatever prune is told

A slot of a finished run only saves the last step of that run; a trunk is what
a run with a larger token budget continues from, and pinned from the start.
`prune` never touches a pinned slot, or one that a process works in.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.artifacts import read_json, write_text
from athanor.errors import InputError
from athanor.pipeline.facts import flatten
from athanor.pipeline.locks import locked, try_lock
from athanor.pipeline.machine import anchor
from athanor.pipeline.progress import duration
from athanor.pipeline.slots import DONE, PINNED
from athanor.pipeline.watchdog import HEARTBEAT

DAY = 86400.0
GIB = 2**30


@dataclass(frozen=True)
class Found:
    """One slot on disk. `state`: working, done, trunk or unfinished."""

    path: Path
    stage: str
    facts: Mapping[str, Any]
    state: str
    step: int | None
    bytes: int
    changed: float  # seconds since the epoch
    pinned: bool
    current: bool  # it made what lies in the workspace
    pulse: str = ""  # what the process that works in it said last

    @property
    def id(self) -> str:
        return self.path.name[:8]


def find(root: Path) -> list[Found]:
    """Every slot below `root`, oldest first within its stage."""
    current = _current(root)
    slots = [_look(path, current) for path in (root / ".athanor" / "slots").glob("*/[!.]*") if path.is_dir()]
    return sorted(slots, key=lambda slot: (slot.stage, slot.changed))


def _look(path: Path, current: set[str]) -> Found:
    facts = read_json(path / "facts.json") if (path / "facts.json").is_file() else {}
    files = [file.stat() for file in _files(path)]
    steps = [int(folder.name[5:]) for folder in path.glob("step_*") if folder.name[5:].isdigit()]
    if busy(path):
        state = "working"
    elif facts.get("part") == "trunk":
        state = "trunk"
    else:
        state = "done" if (path / DONE).is_file() else "unfinished"
    return Found(
        path,
        path.parent.name,
        facts,
        state,
        max(steps, default=None),
        sum(stat.st_size for stat in files),
        max((stat.st_mtime for stat in files), default=path.stat().st_mtime),
        (path / PINNED).is_file(),
        path.name in current,
        _pulse(path) if state == "working" else "",
    )


def _pulse(path: Path) -> str:
    """The heartbeat of the run that works in a slot, in words; "" where it left none."""
    try:
        run = json.loads((path / "run.json").read_text())["run"]
        told = json.loads((path.parents[2] / "runs" / run / HEARTBEAT).read_text())
        age = max(0.0, time.time() - told["time_ms"] / 1000)
        return f"{told['phase']}, step {told['step']:,}, sign of life {duration(age)} ago"
    except (OSError, ValueError, KeyError):  # it has just begun or ended
        return ""


def _files(path: Path) -> Iterable[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _current(root: Path) -> set[str]:
    """Fingerprints of the slots that made what the workspace holds."""
    leaves = [read_json(path) for path in (root / "metrics" / "runs").glob("*.json")]
    facts = [pair for leaf in leaves for pair in leaf.get("facts", {}).items()]
    return {value for name, value in facts if name in ("slot", "trunk") or name.startswith("slot_")}


def busy(path: Path) -> bool:
    """Whether a process holds the slot's lock."""
    return locked(path / "lock")


def words(slots: list[Found]) -> dict[Path, str]:
    """For each slot of one stage, the facts in which it differs from the others."""
    flat = {slot.path: {name.removeprefix("params."): value for name, value in flatten(slot.facts)} for slot in slots}
    names = list(dict.fromkeys(name for facts in flat.values() for name in facts if name != "part"))
    told = {}
    for slot in slots:
        mine = flat[slot.path]
        # A trunk has no token budget; that it lacks one is no difference worth telling.
        others = [flat[other.path] for other in slots]
        differ = [name for name in names if name in mine and any(o.get(name, mine[name]) != mine[name] for o in others)]
        told[slot.path] = ", ".join(f"{_short(name)} {_value(mine[name])}" for name in differ)
    return told


def _short(name: str) -> str:
    return name.removeprefix("inputs.") if name.startswith("inputs.") else name


def _value(value: Any) -> str:
    return value[:8] if isinstance(value, str) and len(value) == 64 else str(value)


def table(slots: list[Found]) -> str:
    told: dict[Path, str] = {}
    for stage in {slot.stage for slot in slots}:
        told |= words([slot for slot in slots if slot.stage == stage])
    lines = [f"{'id':<9} {'stage':<10} {'state':<11} {'step':>9} {'age':>14} {'size':>10}  marks"]
    now = time.time()
    for slot in slots:
        marks = [word for word, on in (("current", slot.current), ("pinned", slot.pinned)) if on]
        marks += [slot.pulse] if slot.pulse else []
        step = "-" if slot.step is None else f"{slot.step:,}"
        line = f"{slot.id:<9} {slot.stage:<10} {slot.state:<11} {step:>9} {duration(now - slot.changed):>14}"
        lines.append(f"{line} {size(slot.bytes):>10}  {', '.join(marks)}".rstrip())
        if told[slot.path]:
            lines.append(f"{'':<10}{told[slot.path]}")
    lines.append(f"{len(slots)} slots, {size(sum(slot.bytes for slot in slots))}")
    return "\n".join(lines)


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def prunable(
    slots: list[Found], now: float, *, days: float | None, max_bytes: int | None, unfinished: bool
) -> list[Found]:
    """Slots that may go, oldest first: those older than `days`, then as many as it takes to reach `max_bytes`.

    Never a pinned one or one at work; an unfinished one only when asked,
    because its progress exists nowhere else.
    """
    states = {"done", "trunk", "unfinished"} if unfinished else {"done", "trunk"}
    may = sorted((s for s in slots if not s.pinned and s.state in states), key=lambda slot: slot.changed)
    gone = [slot for slot in may if days is not None and now - slot.changed > days * DAY]
    total = sum(slot.bytes for slot in slots) - sum(slot.bytes for slot in gone)
    for slot in may:
        if max_bytes is not None and total > max_bytes and slot not in gone:
            gone.append(slot)
            total -= slot.bytes
    return gone


def remove(slot: Found) -> bool:
    """Delete a slot under its lock; False when a process took it in the meantime."""
    with try_lock(slot.path / "lock") as free:
        if free:
            # Renamed first: a kill half-way must not leave a slot that looks whole.
            scrap = slot.path.with_name(f".{slot.path.name}.removed.tmp")
            os.rename(slot.path, scrap)
            shutil.rmtree(scrap)
        return free


def choose(slots: list[Found], start: str) -> Found:
    """The one slot whose id begins with `start`."""
    hits = [slot for slot in slots if start and slot.path.name.startswith(start)]
    if len(hits) != 1:
        known = ", ".join(slot.id for slot in hits or slots) or "there are none"
        raise InputError(f"{len(hits)} slots begin with '{start}'", where="athanor slots", fix=f"name one of: {known}")
    return hits[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="checkpoint slots of long stages")
    commands = parser.add_subparsers(dest="command", metavar="prune | pin | unpin")
    prune = commands.add_parser("prune", help="delete slots that are not needed")
    prune.add_argument("--days", type=float, help="those not changed for so many days (7 when --max-gib is not given)")
    prune.add_argument("--max-gib", type=float, help="oldest first, until all slots together are no larger")
    prune.add_argument("--unfinished", action="store_true", help="also those whose run has not ended")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    for name, text in (("pin", "never prune this slot"), ("unpin", "let prune take this slot")):
        commands.add_parser(name, help=text).add_argument("id")
    args = parser.parse_args()
    slots = find(anchor())
    if args.command == "prune":
        return _prune(slots, args)
    if args.command in ("pin", "unpin"):
        slot = choose(slots, args.id)
        if args.command == "pin":
            write_text(slot.path / PINNED, "")
        else:
            (slot.path / PINNED).unlink(missing_ok=True)
        print(f"{slot.id} of {slot.stage} is {args.command}ned")
        return 0
    print(table(slots) if slots else "there are no slots: no long stage has run here")
    return 0


def _prune(slots: list[Found], args: argparse.Namespace) -> int:
    days = 7.0 if args.days is None and args.max_gib is None else args.days
    limit = None if args.max_gib is None else int(args.max_gib * GIB)
    gone = prunable(slots, time.time(), days=days, max_bytes=limit, unfinished=args.unfinished)
    freed = 0
    for slot in gone:
        if not args.dry_run and not remove(slot):
            print(f"{slot.id} of {slot.stage} is in use now and stays", file=sys.stderr)
            continue
        freed += slot.bytes
        print(f"{'would remove' if args.dry_run else 'removed'} {slot.id} of {slot.stage}, {size(slot.bytes)}")
    left = sum(slot.bytes for slot in slots) - freed
    print(f"{size(freed)} {'would be ' if args.dry_run else ''}freed, {size(left)} stay")
    if limit is not None and left > limit:
        print("the rest is pinned, at work, or unfinished (--unfinished takes those, too)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
