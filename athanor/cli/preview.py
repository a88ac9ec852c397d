"""Talk to a model that is still training, in this terminal. The training is neither asked nor told anything.

    python -m athanor preview                cool down a copy of its newest checkpoint for five minutes, then chat
    python -m athanor preview --raw          chat with the checkpoint as it is
    python -m athanor preview --no-chat      only make the copy; athanor serve lists it, and the raw checkpoint

While its learning rate is high a model is worse than what it has learned. A
cooldown lets the rate fall to 0, as at the end of a wsd run: the same training,
in a process that steps back for others and in a folder of its own. It runs on
the CPU, or on a second GPU: CUDA_VISIBLE_DEVICES=1 athanor preview --device cuda.
Fine-tuning is taken as it is. What was made stays in .athanor/previews/ until
you remove it: copies of several weeks can be compared on the chat page.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError, GateError, InputError, Interrupted
from athanor.base.strict import build
from athanor.catalog.places import PREVIEWS, STAGES, origin, slot_folder, whole_checkpoints
from athanor.cli.cli import call, positive
from athanor.cli.evaluate.main import linked_copy
from athanor.cli.shrink import newest_checkpoint, shrink
from athanor.cli.slots import GIB, bytes_of, choose, find, size
from athanor.runtime.machine import anchor, machine, step_back
from athanor.runtime.terminal import say
from athanor.training import checkpoint
from athanor.training.pretrain_params import PretrainParams

NICENESS = (
    10  # a tenth of a core that the training wants; with 19, as good as nothing of it, five minutes are two steps
)
FAR = 10**6  # steps; the rate does not fall before
COPIES = 7  # of a checkpoint that the disk must have room for: four here, and what a training wants to see free
QUIET = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "ATHANOR_SAVE_EVERY_SECONDS": "1e9"}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--raw", action="store_true", help="the checkpoint as it is, without a cooldown")
    add("--minutes", type=positive(float), default=5.0, help="for the cooldown; longer is better (default 5)")
    add("--device", default="cpu", help="where it cools down and answers (default cpu)")
    add("--slot", default="", help="of this slot (the start of its id, from athanor slots), also if nobody works in it")
    add("--no-chat", action="store_true", help="only make it")


def run(args: argparse.Namespace) -> int:
    root = anchor()
    os.environ["ATHANOR_DEVICE"] = args.device
    out = make(root, args)
    facts = ", ".join(f"{name} {value}" for name, value in origin(out).items())
    print(f"{out.relative_to(root)}: {facts}, {size(bytes_of(out))}", flush=True)
    return 0 if args.no_chat else call("chat", ["--model", str(out)])


def make(root: Path, args: argparse.Namespace) -> Path:
    """The directory made of the newest whole checkpoint, which may be there already."""
    slots = [slot for slot in find(root) if slot.stage in STAGES and slot.facts]  # by stage, the newest last
    slots = [choose(slots, args.slot)] if args.slot else [slot for slot in slots if slot.state == "working"]
    if not slots:
        fix = "athanor slots lists the checkpoints that there are; --slot ID takes one"
        raise InputError("no training is at work here", where=str(root), fix=fix)
    with contextlib.ExitStack() as stack:
        for path in (path for slot in reversed(slots) for path in whole_checkpoints(slot.path)):
            try:
                slot = slot_folder(path)
                copy = stack.enter_context(linked_copy(slot, path, root))
                checkpoint.load(copy)
            except (InputError, FileNotFoundError) as error:
                say(f"preview: passed over: {error}")
                continue
            raw = args.raw or slot.parent.name != "pretrain"
            name = f"{slot.parent.name}-{slot.name[:8]}-{path.name}-{'raw' if raw else 'cooled'}"
            if not (out := root / PREVIEWS / name).exists():
                for file in slot.glob("*s.json"):  # facts and choices
                    shutil.copyfile(file, copy.parent / file.name)
                shrink(copy, out, "float32") if raw else start_cooldown(copy, out, args.minutes)
            return out
    fix = "athanor save has the training write one now"
    raise InputError("no whole checkpoint yet", where=str(slots[0].path), fix=fix)


def start_cooldown(copy: Path, out: Path, minutes: float) -> None:
    """Cool down a checkpoint that is alone in a copy of its slot, in another process, and write the result to `out`."""
    needed = COPIES * bytes_of(copy) + machine().min_free_gib * GIB
    if shutil.disk_usage(copy).free < needed:
        raise InputError(f"a cooldown wants {size(int(needed))} of free disk", where=str(copy), fix="--raw needs less")
    say(f"preview: step {checkpoint.step_of(copy):,} cools down, for {minutes:g} minutes")
    command = [sys.executable, "-m", "athanor.cli.preview", str(copy.parent), str(out), str(60 * minutes)]
    process = subprocess.Popen(command, env=os.environ | QUIET, start_new_session=True)
    try:
        if process.wait():
            raise InputError("the cooldown failed", where="preview", fix="--raw takes the checkpoint as it is")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# -- in that process ------------------------------------------------------------------------------------------------------


def cool_down(slot: Path, seconds: float) -> dict[str, Any]:
    """Train on from the one checkpoint of a slot for a tenth of the time, then with a falling rate for the rest of it."""
    from stages.pretrain import prepare
    from stages.probe_lr import train_at_lr

    started, facts = time.monotonic(), read_json(slot / "facts.json")
    deadline, times = started + seconds / 10, list[float]()
    first = checkpoint.step_of(newest_checkpoint(slot))
    values = facts["params"]["pretrain"]
    far = {"tokens": FAR * values["batch_tokens"] + values["warmup_tokens"], "cooldown_fraction": 0.01}
    # A trunk has no end; what only shows something is in no slot.
    recipe = build(
        PretrainParams, {**far, **values, "sample_every_tokens": 0, "validation_every_tokens": 0}, "pretrain"
    )

    def stop_requested() -> bool:
        times.append(time.monotonic())
        return len(times) > 3 and times[-1] > deadline

    # What the stages' functions ask of a run, answered from the slot. Nothing is logged.
    run: Any = SimpleNamespace(
        stage="pretrain",
        main=True,
        anchor=anchor(),
        params=lambda section, schema: build(schema, facts["params"][section], section),
        note=lambda text: say(f"preview: {text}"),
        fact=lambda **_: None,
        log=lambda *_, **__: None,
        stop_requested=stop_requested,
    )
    prepared = prepare(run, recipe)
    if facts["inputs"]["shards"] not in (prepared.sampler.manifest, prepared.sampler.trunk_manifest):
        raise InputError("was trained on other shards", where=str(slot), fix="dvc checkout data/shards")
    rate = {"lr": prepared.schedule.lr_at(first * recipe.batch_tokens), "final_lr_fraction": 0.0, "warmup_tokens": 0}
    recipe = dataclasses.replace(recipe, schedule="wsd", max_rollbacks=0, bigram_tokens=0, **rate)

    def train(before: int, steps: int) -> float:
        share = steps / (before + steps)
        params = dataclasses.replace(recipe, tokens=(before + steps) * recipe.batch_tokens, cooldown_fraction=share)
        folder: Any = SimpleNamespace(path=slot, identity="")
        point = train_at_lr(run, params, prepare(run, params), folder, bar)
        if point.bpb is None:
            raise GateError("cooldown", point.diverged, where=str(slot))
        return point.bpb

    bar: Any = SimpleNamespace(update=lambda *_: None)
    with contextlib.suppress(Interrupted):
        train(first + FAR, 1)
    deadline = math.inf
    speed = (len(times) - 1) / (times[-1] - times[0])
    before = checkpoint.step_of(newest_checkpoint(slot))
    # More than all the steps before would be another training.
    steps = max(1, min(first, int((started + seconds - time.monotonic()) * speed)))
    run.note(f"{before - first} steps at the rate of the run, now {steps:,} in which it falls to 0")
    return {"bits_per_byte": round(train(before, steps), 4), "cooled": steps}


def main(slot: str, out: str, seconds: str) -> int:
    step_back(NICENESS)
    with contextlib.suppress(OSError):  # should memory run out, this process goes and not the training
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        about = cool_down(Path(slot), float(seconds))
        shrink(newest_checkpoint(Path(slot)), Path(out), "float32", **about)
    except AthanorError as error:
        say(f"preview: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
