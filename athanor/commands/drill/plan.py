"""Which deaths a stage dies, how often, and what is damaged before it starts again."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TRAINING = ("pretrain", "sft")
STAGES = (*TRAINING, "download")

# Kinds of death in the order of the table, in words. Names up to "after-done" are those of faults.py.
KINDS = {
    "random": "killed at a random moment",
    "opening": "killed while the slot or the run is opened",
    "journal": "killed in the middle of a journal line",
    "write": "killed in the middle of a checkpoint write",
    "fsync": "killed after a write, before fsync",
    "rename": "killed after fsync, before the rename",
    "renamed": "killed right after the rename",
    "remove": "killed before old checkpoints are removed",
    "removing": "killed with an old checkpoint half removed",
    "before-done": "killed between the last checkpoint and DONE",
    "after-done": "killed between DONE and the end of the stage",
    "truncated": "newest checkpoint's tensors, or part, cut off",
    "flipped tensors": "a byte of the newest checkpoint's tensors, or part, flipped",
    "flipped state": "a byte of the newest checkpoint's state flipped",
    "deleted": "a file of the newest checkpoint deleted",
    "disk": "disk full while a checkpoint is written (no kill)",
}
DAMAGE = ("truncated", "flipped tensors", "flipped state", "deleted")
NOT_FOR_DOWNLOAD = ("journal", "remove", "removing", "flipped state")
RANDOM_SHARE = 4  # of a cycle through all kinds
DISKS = 2


@dataclass(frozen=True)
class Fault:
    """One death. `part`: how far into the points of its kind, the run, or the damaged file, 0 to 1."""

    kind: str
    part: float
    tries: int = 0  # rounds in which its point was not reached


def plan(stage: str, kills: int, draw: random.Random) -> list[Fault]:
    """`kills` deaths in a random order, every kind about equally often, random moments more often."""
    kinds = [kind for kind in KINDS if kind != "disk" and not (stage == "download" and kind in NOT_FOR_DOWNLOAD)]
    cycle = ["random"] * (RANDOM_SHARE - 1) + kinds
    draw.shuffle(cycle)
    chosen = [cycle[number % len(cycle)] for number in range(kills)]
    draw.shuffle(chosen)
    return [Fault(kind, draw.random()) for kind in chosen]


def point(fault: Fault, points: Counter[str], whole: int) -> tuple[str, int]:
    """Where an attempt has to die for a fault: the kind of point and its count.

    `points` counts those an attempt meets, `whole` is the number of whole
    checkpoints on the disk. Damage comes after the second, so that one is
    left. A point that was missed before is tried again nearer.
    """
    if fault.kind in DAMAGE:
        return "renamed", 1 if whole else 2
    # Of points all over a run only the first half: an attempt may begin late.
    share = 1.0 if fault.kind in ("opening", "before-done", "after-done", "write", "fsync") else 0.5
    return fault.kind, 1 + int(fault.part * share * points[fault.kind] / 4**fault.tries)


def possible(fault: Fault, points: Counter[str]) -> bool:
    """Whether a run without kills meets what the fault needs."""
    if fault.kind in DAMAGE:
        return points["renamed"] > 1
    return fault.kind == "random" or points[fault.kind] > 0


def damage(folder: Path, stage: str, fault: Fault, whole: list[Path]) -> Path:
    """Do to the newest whole checkpoint, or part of a download, what a fault says; returns what was damaged."""
    if stage == "download":
        state = next(folder.glob(".athanor/slots/download/*/state.json"))
        parts = sorted(state.parent.glob("part-*.parquet"))
        hurt, path = state.parent, parts[-1] if parts and (fault.kind != "deleted" or fault.part < 0.5) else state
    else:
        in_state = fault.kind == "flipped state" or (fault.kind == "deleted" and fault.part < 0.5)
        hurt, path = whole[0], whole[0] / ("state.json" if in_state else "tensors.safetensors")
    content = bytearray(path.read_bytes())
    at = int(fault.part * len(content))
    if fault.kind == "deleted" or (stage == "download" and path.name == "state.json"):
        path.unlink()
        return hurt
    if fault.kind == "truncated":
        del content[at:]
    else:
        content[at] ^= 1 << int(fault.part * 1000) % 8
    path.write_bytes(content)
    return hurt
