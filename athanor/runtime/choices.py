"""The choices of a run: made once from the hardware profile, then kept with its checkpoints.

The first process writes `choices.json` into the run's slot. A later one reads
it, so that a run goes on as it began even if the profile has changed. A run
that goes on from a trunk takes over the trunk's choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from athanor.base.artifacts import canonical_json, read_json
from athanor.base.errors import InputError
from athanor.hardware import profile as profiles
from athanor.hardware.policy import AUTO, Record, Requested, needed_bytes, resolve
from athanor.model import gpu_family
from athanor.model.config import ModelConfig
from athanor.model.device import prepare
from athanor.model.elementwise import compiled_functions
from athanor.model.precision import without_effect
from athanor.runtime.machine import anchor, machine
from athanor.runtime.run import Run
from athanor.runtime.slots import Slot
from athanor.training.compiling import first_line
from athanor.training.memory import available_bytes
from athanor.training.setup import Choices, check_batch
from athanor.training.world import SINGLE, World

FILE = "choices.json"
COMPILED = Path(".athanor") / "compile-cache"
_COMPILING_PAYS = 1000  # steps; a shorter run does without trying


def chosen(
    run: Run,
    slots: Sequence[Slot | None],
    config: ModelConfig,
    precision: str,
    batch_tokens: int,
    total_tokens: int,
    world: World = SINGLE,
    optimizer: str = "adamw",
) -> Choices:
    """The resolved settings of this run on this machine, also added to its facts. `slots`: its own, then the trunk's.

    In a world of several processes the main one chooses, for all of them.
    """
    check_batch(config, batch_tokens, run.stage)
    decided = None
    if world.main:
        folders = [slot.path for slot in slots if slot is not None]
        steps = total_tokens // batch_tokens
        decided = dataclasses.asdict(choose(folders, config, precision, batch_tokens, steps, run.note, optimizer))
    record = Record.of(world.broadcast_object(decided))
    choices = record.choices
    chosen_values = dataclasses.asdict(choices)
    device = prepare(machine().device, machine().threads, machine().deterministic == "on")
    if world.main and without_effect(choices.precision, device):
        run.note(
            f"precision {choices.precision}: this processor has no units for it, so fp32 rounded to it is used, and nothing is gained"
        )
    if world.main and device.type == "cpu" and compiled_functions() is None:
        run.note("no C compiler (cc) that works: steps take about 1.5 times as long as with one")
    run.fact(choices=", ".join(f"{name} {value}" for name, value in chosen_values.items()), choices_why=str(record.why))
    return choices


def choose(
    folders: Sequence[Path],
    config: ModelConfig,
    precision: str,
    batch_tokens: int,
    steps: int,
    note: Callable[[str], None] = lambda text: None,
    optimizer: str = "adamw",
) -> Record:
    """Choose by the settings, else the first record in `folders`, else the profile.

    An accelerator without a profile of this model is measured first, by another process, so that this one's allocator
    holds nothing of it. That takes a quarter of a minute and, for a run that is long enough to be compiled, a minute
    or two once.
    """
    local, root = machine(), anchor()
    device = prepare(local.device, local.threads, local.deterministic == "on")
    if device.type == "mps" and local.compile == AUTO:  # torch's compiler for Metal is a prototype
        local = dataclasses.replace(local, compile="off")
    saved = next((record for record in map(_read_record, folders) if record is not None), None)
    requested = Requested.of(
        local, config, device, steps, precision=precision, batch_tokens=batch_tokens, optimizer=optimizer
    )
    architecture, free = gpu_family.identify(device), available_bytes(device)
    if saved is not None:
        if saved.device == device.type:
            _save_record(folders, saved)
            explicit = requested.explicit()
            choices = dataclasses.replace(saved.choices, **explicit)
            why = dict.fromkeys(dataclasses.asdict(choices), "as when the run began") | dict.fromkeys(
                explicit, "as set"
            )
            needed = needed_bytes(config, choices, requested, architecture)
            return dataclasses.replace(saved, choices=choices, why=why, needed_bytes=needed, free_bytes=free)
        requested = dataclasses.replace(
            requested, precision=saved.choices.precision if precision == AUTO else precision
        )
    profile = profiles.load(root, profiles.fingerprint(config, device, local.threads))
    if profile is None and device.type != "cpu":
        from athanor.hardware import measure

        tries_compiler = local.compile != "off" and steps >= _COMPILING_PAYS
        note(f"first training of this model on {gpu_family.name(device)}: measuring its formats and kernels")
        try:
            profile = measure.in_subprocess(
                config,
                device,
                local.threads,
                precision=requested.precision,
                batch_tokens=batch_tokens,
                root=root,
                bounds=measure.QUICK if tries_compiler else measure.QUICK._replace(compile=0.0),
            )
        except RuntimeError as error:  # of a driver or a kernel: training may well do without
            note(f"the device could not be measured ({first_line(error)}); `athanor bench hardware` says more")
        if profile is not None and (tries_compiler or local.compile == "off"):
            profiles.save(root, profile)
    record = resolve(requested, architecture, config, profile, free)
    if saved is not None:
        return record
    _save_record(folders, record)
    return _read_record(folders[0]) or record  # of two processes that began at once, one was first


def _read_record(folder: Path) -> Record | None:
    """The record of a slot; None where there is none, or one in the form of another version of the code."""
    try:
        values = read_json(folder / FILE)
        names = {field.name for field in dataclasses.fields(Choices)}
        return Record.of(values) if set(values["choices"]) == names else None
    except (InputError, KeyError, TypeError):
        return None


def _save_record(folders: Sequence[Path], record: Record) -> None:
    """Write the record atomically to each folder that has none yet."""
    for folder in folders:
        for tries_left in (2, 1, 0):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if _read_record(folder) is None:
                    _write(folder, record)
                break
            except (FileNotFoundError, FileExistsError):  # `athanor slots prune` may have taken the folder away
                if not tries_left:
                    raise


def _write(folder: Path, record: Record) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{FILE}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(canonical_json(dataclasses.asdict(record)))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, folder / FILE)
        except OSError:  # a file system without links, or a record that is not understood
            if _read_record(folder) is None:
                os.replace(temporary, folder / FILE)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
