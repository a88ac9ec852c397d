"""The checkpoint slots of long stages: what is there, what may go.

    python -m athanor slots                     list them
    python -m athanor slots prune [--days D] [--max-gib G] [--unfinished] [--dry-run]
    python -m athanor slots pin ID | unpin ID   keep one whatever prune is told
    python -m athanor slots adopt [ID]          let the code of today go on with what other code began
    python -m athanor slots drop [ID]           remove it: the next run begins anew

A slot of a finished run only saves the last step of that run; a trunk is what
a run with a larger token budget continues from, and pinned from the start.
`prune` never touches a pinned slot, or one that a process works in.

A stage whose code has changed stops at a slot that holds ten minutes of work or
more, and asks. Without an ID, `adopt` and `drop` answer for the one slot that
waits; `adopt` then also for the other parts of that stage's work that the same
code began (the other sources of a download).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.cli.render import fill_template
from athanor.runtime.facts import flatten
from athanor.runtime.locks import locked, try_lock
from athanor.runtime.machine import anchor
from athanor.runtime.progress import duration
from athanor.runtime.slots import CODE, DONE, FACTS, PINNED, Record, steps
from athanor.runtime.watchdog import HEARTBEAT

DAY = 86400.0
GIB = 2**30


@dataclass(frozen=True)
class SlotInfo:
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
    code: Record | None = None  # which code worked in it

    @property
    def id(self) -> str:
        return self.path.name[:8]


def find(root: Path) -> list[SlotInfo]:
    """Every slot below `root`, oldest first within its stage."""
    current = _current_fingerprints(root)
    slots = [_inspect(path, current) for path in (root / ".athanor" / "slots").glob("*/[!.]*") if path.is_dir()]
    return sorted((slot for slot in slots if slot is not None), key=lambda slot: (slot.stage, slot.changed))


def _inspect(path: Path, current: set[str] = frozenset(), locked_by_us: bool = False) -> SlotInfo | None:
    """The slot at `path`, or None when it has just been removed. `locked_by_us`: this process holds its lock."""
    for tries_left in (2, 1, 0):
        try:
            facts = read_json(path / FACTS) if (path / FACTS).is_file() else {}
            code = Record.read(path) if facts else None
            folder_stat = path.stat()
            break
        except (OSError, InputError):  # perhaps it is being removed, or begun
            if path.is_dir() and not tries_left:
                raise
    else:
        return None
    files = list(_file_stats(path))
    if not locked_by_us and busy(path):
        state = "working"
    elif facts.get("part") == "trunk":
        state = "trunk"
    else:
        state = "done" if (path / DONE).is_file() else "unfinished"
    return SlotInfo(
        path,
        path.parent.name,
        facts,
        state,
        max(steps(path), default=None),
        sum(stat.st_size for stat in files),
        max((stat.st_mtime for stat in files), default=folder_stat.st_mtime),
        (path / PINNED).is_file(),
        path.name in current,
        _heartbeat_text(path) if state == "working" else "",
        code,
    )


def _heartbeat_text(path: Path) -> str:
    """The heartbeat of the run that works in a slot, in words; "" where it left none."""
    try:
        run = json.loads((path / "run.json").read_text())["run"]
        heartbeat = json.loads((path.parents[2] / "runs" / run / HEARTBEAT).read_text())
        age = max(0.0, time.time() - heartbeat["time_ms"] / 1000)
        return f"{heartbeat['phase']}, step {heartbeat['step']:,}, sign of life {duration(age)} ago"
    except (OSError, ValueError, KeyError):  # it has just begun or ended
        return ""


def _file_stats(path: Path) -> Iterable[os.stat_result]:
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # the process that works there drops old checkpoints
                yield os.stat(os.path.join(folder, name))


def _current_fingerprints(root: Path) -> set[str]:
    """Fingerprints of the slots that made what the workspace holds."""
    leaves = [read_json(path) for path in (root / "metrics" / "runs").glob("*.json")]
    facts = [pair for leaf in leaves for pair in leaf.get("facts", {}).items()]
    return {value for name, value in facts if name in ("slot", "trunk") or name.startswith("slot_")}


def busy(path: Path) -> bool:
    """Whether a process holds the slot's lock."""
    return locked(path / "lock")


def differing_facts(slots: list[SlotInfo]) -> dict[Path, str]:
    """For each slot of one stage, the facts in which it differs from the others."""
    flat = {slot.path: {name.removeprefix("params."): value for name, value in flatten(slot.facts)} for slot in slots}
    values: dict[str, set[str]] = {}  # a trunk has no token budget; that it lacks one is no difference worth telling
    for name, value in (pair for facts in flat.values() for pair in facts.items() if pair[0] != "part"):
        values.setdefault(name, set()).add(str(value))
    differ = [name for name, distinct in values.items() if len(distinct) > 1]
    return {
        path: ", ".join(f"{name.removeprefix('inputs.')} {_short(facts[name])}" for name in differ if name in facts)
        for path, facts in flat.items()
    }


def _short(value: Any) -> str:
    return value[:8] if isinstance(value, str) and len(value) == 64 else str(value)


def table(slots: list[SlotInfo]) -> str:
    differences: dict[Path, str] = {}
    for stage in {slot.stage for slot in slots}:
        differences |= differing_facts([slot for slot in slots if slot.stage == stage])
    rows = [(slot, differences[slot.path]) for slot in slots]
    return fill_template("slots.txt.j2", rows=rows, now=time.time(), waits=waits, size=size, duration=duration)


def bytes_of(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def prunable(
    slots: list[SlotInfo], now: float, *, days: float | None, max_bytes: int | None, unfinished: bool
) -> list[SlotInfo]:
    """Slots that may go, oldest first: those older than `days`, then as many as it takes to reach `max_bytes`.

    Never a pinned one or one at work; an unfinished one only when asked,
    because its progress exists nowhere else.
    """
    states = {"done", "trunk", "unfinished"} if unfinished else {"done", "trunk"}
    candidates = sorted((s for s in slots if not s.pinned and s.state in states), key=lambda slot: slot.changed)
    chosen = [slot for slot in candidates if days is not None and now - slot.changed > days * DAY]
    total = sum(slot.bytes for slot in slots) - sum(slot.bytes for slot in chosen)
    for slot in candidates:
        if max_bytes is not None and total > max_bytes and slot not in chosen:
            chosen.append(slot)
            total -= slot.bytes
    return chosen


def remove(slot: SlotInfo) -> bool:
    """Delete a slot under its lock; False when a process took it, or worked in it, in the meantime."""
    with try_lock(slot.path / "lock") as free:
        fresh = _inspect(slot.path, locked_by_us=True) if free else None
        if fresh is None or (fresh.state, fresh.changed, fresh.pinned) != (slot.state, slot.changed, slot.pinned):
            return False
        # Renamed first: a kill half-way must not leave a slot that looks whole.
        trash = tempfile.mkdtemp(prefix=f".{slot.path.name}.", suffix=".tmp", dir=slot.path.parent)
        try:
            os.rename(slot.path, trash)
        except OSError:
            os.rmdir(trash)  # nothing of the slot is in it
            raise
        if os.path.exists(os.path.join(trash, PINNED)) and not slot.pinned:
            os.rename(trash, slot.path)  # pinned a moment ago, which takes no lock
            return False
    shutil.rmtree(trash)
    return True


def pin(slot: SlotInfo, on: bool) -> None:
    """Keep a slot from being pruned, or no longer."""
    try:
        (slot.path / PINNED).touch() if on else (slot.path / PINNED).unlink(missing_ok=True)
    except FileNotFoundError:
        fix = "athanor slots lists what is there"
        raise InputError("was removed just now", where=str(slot.path), fix=fix) from None


def waits(slot: SlotInfo) -> bool:
    """Whether a stage with other code has asked what is to be done with a slot's work."""
    return slot.code is not None and slot.code.refused is not None


def waiting_slot(slots: list[SlotInfo], start: str) -> SlotInfo:
    """The slot that waits for an answer: the one whose id begins with `start`, or the only one."""
    waiting = [slot for slot in slots if waits(slot)]
    if start:
        return choose(slots, start)
    if len(waiting) != 1:
        fix = f"name one of: {', '.join(slot.id for slot in waiting)}" if waiting else "a stage asks when it has to"
        raise InputError(f"{len(waiting)} slots wait for an answer", where="athanor slots", fix=fix)
    return waiting[0]


def adopt(slots: list[SlotInfo], start: str) -> list[SlotInfo]:
    """Let the code that was refused go on in the slot; returns it, and the parts of the same work adopted with it."""
    slot = waiting_slot(slots, start)
    if slot.code is None or slot.code.refused is None:
        fix = "run the stage: where its code has changed it stops, and waits for an answer"
        raise InputError("no other code has asked for it", where=str(slot.path), fix=fix)
    siblings = [other for other in slots if not start and _same_work(slot, other)]
    refused_code, adopted = slot.code.refused, []
    for member in [slot, *siblings]:
        with try_lock(member.path / "lock") as free:
            if free and (member.path / CODE).is_file():
                Record(refused_code, (*member.code.digests, refused_code.digest)).write(member.path)
                adopted.append(member)
    if slot not in adopted:
        raise _in_use_error(slot)
    return adopted


def _same_work(slot: SlotInfo, other: SlotInfo) -> bool:
    """Whether another slot holds a part of the same stage's work, begun by the same code."""
    are_parts = [each.facts.get("part", "trunk") != "trunk" and each.code is not None for each in (slot, other)]
    return all(are_parts) and other != slot and other.stage == slot.stage and other.code.code == slot.code.code


def choose(slots: list[SlotInfo], start: str) -> SlotInfo:
    """The one slot whose id begins with `start`."""
    hits = [slot for slot in slots if start and slot.path.name.startswith(start)]
    if len(hits) != 1:
        known = ", ".join(slot.id for slot in hits or slots) or "there are none"
        raise InputError(f"{len(hits)} slots begin with '{start}'", where="athanor slots", fix=f"name one of: {known}")
    return hits[0]


def options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="prune | pin | unpin | adopt | drop")
    prune = commands.add_parser("prune", help="delete slots that are not needed")
    prune.add_argument("--days", type=float, help="those not changed for so many days (7 when --max-gib is not given)")
    prune.add_argument("--max-gib", type=float, help="oldest first, until all slots together are no larger")
    prune.add_argument("--unfinished", action="store_true", help="also those whose run has not ended")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    for name, text in (("pin", "never prune this slot"), ("unpin", "let prune take this slot")):
        commands.add_parser(name, help=text).add_argument("id")
    for name, text in (("adopt", "go on with changed code"), ("drop", "remove what other code began")):
        commands.add_parser(name, help=text).add_argument("id", nargs="?", default="")


def run(args: argparse.Namespace) -> int:
    slots = find(anchor())
    if args.command == "prune":
        return _prune(slots, args)
    if args.command in ("pin", "unpin"):
        slot = choose(slots, args.id)
        pin(slot, args.command == "pin")
        print(f"{slot.id} of {slot.stage} is {args.command}ned")
    elif args.command == "adopt":
        for slot in adopt(slots, args.id):
            then = "the next run goes on there, and its manifest names both codes"
            print(f"{slot.id} of {slot.stage} is adopted: {then}")
    elif args.command == "drop":
        slot = waiting_slot(slots, args.id)
        if not remove(slot):
            raise _in_use_error(slot)
        print(f"removed {slot.id} of {slot.stage}, {size(slot.bytes)}: the next run begins anew")
    else:
        print(table(slots) if slots else "there are no slots: no long stage has run here")
        if any(slot.state == "trunk" for slot in slots):
            print("trunk: pretraining until its cooldown, which a run of any length goes on from")
    return 0


def _in_use_error(slot: SlotInfo) -> InputError:
    return InputError("a process is at work in it", where=str(slot.path), fix="stop it first: athanor stop")


def _prune(slots: list[SlotInfo], args: argparse.Namespace) -> int:
    days = 7.0 if args.days is None and args.max_gib is None else args.days
    limit = None if args.max_gib is None else int(args.max_gib * GIB)
    chosen = prunable(slots, time.time(), days=days, max_bytes=limit, unfinished=args.unfinished)
    freed = 0
    for slot in chosen:
        if not args.dry_run and not remove(slot):
            print(f"{slot.id} of {slot.stage} is in use now and stays", file=sys.stderr)
            continue
        freed += slot.bytes
        print(f"{'would remove' if args.dry_run else 'removed'} {slot.id} of {slot.stage}, {size(slot.bytes)}")
    remaining = sum(slot.bytes for slot in slots) - freed
    print(f"{size(freed)} {'would be ' if args.dry_run else ''}freed, {size(remaining)} stay")
    if limit is not None and remaining > limit:
        print("the rest is pinned, at work, or unfinished (--unfinished takes those, too)", file=sys.stderr)
        return 1
    return 0
