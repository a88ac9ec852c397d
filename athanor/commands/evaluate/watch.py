"""Follow the checkpoints of trainings that another process runs. The trainer is neither asked nor told anything."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from athanor.artifacts import read_json
from athanor.commands.evaluate.job import CHECKPOINT, apart
from athanor.commands.slots import Found, choose, find
from athanor.errors import AthanorError, InputError
from athanor.training import checkpoint

if TYPE_CHECKING:
    from athanor.commands.evaluate.main import Recorder

STAGES = ("pretrain", "sft")


def follow(args: argparse.Namespace, recorder: Recorder, place: Path, *, once: bool = False) -> int:
    """Score checkpoints until no training is at work (without --watch, or with `once`: what is there). 1 if one failed.

    A training that has not begun is waited for, but not with --slot: a slot that nobody works in gets no more.
    """
    from athanor.commands.evaluate.main import job_of

    tried: set[tuple[str, int]] = set()
    failed = seen = False
    if args.watch:
        print("waiting for checkpoints of trainings; Ctrl-C ends it", file=sys.stderr, flush=True)
    while True:
        slots = _slots(place, args)
        working = any(slot.state == "working" for slot in slots)
        seen = seen or working
        at_hand = [(slot, path) for slot in slots for path in _checkpoints(slot, args) if _key(slot, path) not in tried]
        if at_hand:
            slot, path = at_hand[0]
            tried.add(_key(slot, path))
            told = about(slot.path, path)
            try:
                with _kept(path, place) as copy:
                    job = job_of(args, copy, CHECKPOINT, slot=str(slot.path), about=told)
                    rows = apart(job, low_priority=args.watch)
                recorder.add([{**row, "model": str(path.relative_to(place))} for row in rows])
            except FileNotFoundError:  # the trainer dropped it for a newer one
                pass
            except AthanorError as error:
                failed = True
                print(f"{slot.stage} step {told['step']:,}: {error}", file=sys.stderr, flush=True)
            continue
        if once or not args.watch or ((seen or args.slot) and not working):
            if not tried:
                raise InputError("no checkpoint to score", where="athanor slots", fix="name another --slot")
            return int(failed)
        time.sleep(args.poll)


def _slots(place: Path, args: argparse.Namespace) -> list[Found]:
    slots = [slot for slot in find(place) if slot.stage in STAGES and slot.facts]
    if args.slot:
        return [choose(slots, args.slot)]
    return [slot for slot in slots if slot.state == "working"]


def _checkpoints(slot: Found, args: argparse.Namespace) -> list[Path]:
    """In order of steps, as curves are drawn; while watching only the newest, so that slow scores do not fall behind."""
    found = checkpoint.steps(slot.path)
    return found[:1] if args.watch else found[::-1]


def _key(slot: Found, path: Path) -> tuple[str, int]:
    return slot.path.name, checkpoint.step_of(path)


def about(slot: Path, path: Path) -> dict[str, Any]:
    """Facts of a slot's checkpoint for the rows."""
    stage, step = slot.parent.name, checkpoint.step_of(path)
    params = read_json(slot / "facts.json")["params"]
    batch = params.get("batch_tokens") or params.get(stage, {}).get("batch_tokens")
    return {"stage": stage, "slot": slot.name, "step": step, "tokens": step * batch if batch else None}


@contextmanager
def _kept(path: Path, place: Path) -> Iterator[Path]:
    """A checkpoint under a second name, for the trainer deletes old ones. No byte is copied where links are possible."""
    with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=place / ".athanor") as folder:
        copy = Path(folder) / path.name
        copy.mkdir()
        for name in (checkpoint.TENSORS, checkpoint.STATE):
            try:
                os.link(path / name, copy / name)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(path / name, copy / name)
        yield copy
