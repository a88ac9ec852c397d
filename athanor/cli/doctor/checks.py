"""Checks of `athanor doctor`: locks, journals, files, space, the hardware profile, and what is wrong with the machine.

Without torch, whose import takes longer than all checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from athanor.base.artifacts import write_text
from athanor.base.errors import AthanorError, InputError
from athanor.base.strict import read_yaml
from athanor.cli import slots
from athanor.cli.doctor.main import FIX, Checkout, Finding, lock_author_state, lock_pid
from athanor.hardware import cards
from athanor.hardware import profile as profiles
from athanor.runtime import dvc_lock, sharing, ship
from athanor.runtime import untracked as untracked_files
from athanor.runtime.facts import Graph, flatten, git
from athanor.runtime.journal import Record, alive
from athanor.runtime.locks import locked, try_lock
from athanor.runtime.machine import machine
from athanor.runtime.store import EXPERIMENT, artifacts_of, database, delivery
from athanor.runtime.store_check import trouble as store_trouble
from athanor.troubles.trouble import shown
from athanor.troubles.world import here

SHIP_SECONDS = 30.0
SHIP_AT_WORK_SECONDS = 180.0  # it steps back for every other program, and loads MLflow first
FEW_INODES = 10_000
MOST_NAMES = 3
BENCH = "python -m athanor bench hardware"


def unseen(checkout: Checkout) -> Iterator[Finding]:
    for slot in checkout.unseen:
        what = f"process {lock_pid(slot) or 'unknown'} works in this slot but is not visible here (another container?)"
        where = slot.relative_to(checkout.root).as_posix()
        yield Finding("unseen", where, f"{what}; nothing that it may own is repaired", "ask there", note=True)


# -- locks --------------------------------------------------------------------


def locks(checkout: Checkout) -> Iterator[Finding]:
    tmp = checkout.root / ".dvc" / "tmp"
    for path in filter(Path.is_file, (checkout.root / name for name in dvc_lock.RWLOCKS)):
        yield from _rwlock_findings(checkout, path)
    # A flock ends with its process. Only the hard links of core.hardlink_lock stay behind.
    for path in (tmp / "lock", tmp / "rwlock.lock"):
        if path.is_file() and path.stat().st_nlink > 1 and not checkout.dvc:
            where = path.relative_to(checkout.root).as_posix()
            yield Finding("lock", where, "held by hard link, and no DVC process lives on this machine", f"rm {where}")
    folder = checkout.root / (git(checkout.root, "rev-parse", "--git-dir") or ".git")
    for path in (folder / "index.lock", folder / "HEAD.lock"):
        if path.is_file() and not checkout.may_be_owned(path):
            what = "left by a killed git or dvc; Git refuses to work"
            yield Finding("lock", str(path), what, FIX, lambda path=path: _remove_file(path))


def torn_records(checkout: Checkout) -> Iterator[Finding]:
    """A dvc.lock that DVC cannot read: DVC was killed while it wrote it, or Git left conflict markers in it."""
    if locked(checkout.root / dvc_lock.GUARD):
        return  # DVC may be writing it
    torn = list(dvc_lock.torn(checkout.root))
    for path in dvc_lock.files(checkout.root):
        try:
            dvc_lock.stages(path)
        except InputError as error:
            where = path.relative_to(checkout.root).as_posix()
            repair_lock = lambda: "; ".join(dvc_lock.mend(checkout.root)) or "it is whole again"  # noqa: E731
            repair = repair_lock if checkout.trusted and path in torn else None
            command = error.fix if repair or path not in torn else f"when no DVC runs anywhere: rm {where}"
            yield Finding("record", where, f"{error.what}; every dvc command fails", command, repair)


def recorded_stages(checkout: Checkout) -> dict[str, Any]:
    """The stages of every readable dvc.lock; for an unreadable one there is a finding."""
    stages: dict[str, Any] = {}
    for path in dvc_lock.files(checkout.root):
        with contextlib.suppress(InputError):
            stages |= dvc_lock.stages(path)
    return stages


def _rwlock_findings(checkout: Checkout, path: Path) -> Iterator[Finding]:
    where = path.relative_to(checkout.root).as_posix()
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
        entries = _lock_entries(lock)
    except (ValueError, TypeError, KeyError, AttributeError):
        repair = (lambda: _remove_file(path)) if checkout.trusted and not checkout.dvc else None
        yield Finding("lock", where, "not valid JSON; every dvc command fails", f"rm {where}", repair)
        return
    for pid, command in sorted({(entry["pid"], entry["cmd"]) for _, _, entry in entries}):
        state = lock_author_state(pid, command)
        if state == "lives":
            continue
        paths = sorted({os.path.relpath(name, checkout.root) for _, name, entry in entries if entry["pid"] == pid})
        # DVC drops an ended process's entry when it meets it, and a read lock it meets only where it wants to write.
        modes = {mode for mode, _, entry in entries if entry["pid"] == pid}
        harmless = state == "ended" and modes == {"read"}
        clause = "which has ended" if state == "ended" else "which is no DVC process now; DVC would wait for its end"
        clause += "; a read lock without a process stops nothing" if harmless else ""
        repair = (lambda pid=pid: _release_entries(path, pid)) if checkout.trusted else None
        what = f"{', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''} locked by process {pid}, {clause}"
        command = FIX if repair else f"when no DVC runs anywhere: rm {where}"
        yield Finding("lock", where, what, command, repair, note=harmless)


def _lock_entries(lock: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(mode, path, holder) of every entry of a DVC rwlock file."""
    writers = [("write", path, entry) for path, entry in lock.get("write", {}).items()]
    return writers + [("read", path, entry) for path, row in lock.get("read", {}).items() for entry in row]


def _release_entries(path: Path, pid: int) -> str:
    """Drop a process's entries. DVC edits the file under the same guard and holds it for a moment only."""
    with try_lock(path.with_name("rwlock.lock")) as free:
        if not free:
            raise AthanorError("a DVC command is changing the locks right now")
        lock = json.loads(path.read_text(encoding="utf-8"))
        read = {name: [entry for entry in row if entry["pid"] != pid] for name, row in lock.get("read", {}).items()}
        write = {name: entry for name, entry in lock.get("write", {}).items() if entry["pid"] != pid}
        write_text(path, json.dumps({"write": write, "read": {name: row for name, row in read.items() if row}}))
    return f"its entries of process {pid} are removed"


def _remove_file(path: Path) -> str:
    path.unlink(missing_ok=True)
    return "removed"


# -- journals, slots, files -----------------------------------------------------


def journals(checkout: Checkout) -> Iterator[Finding]:
    if os.environ.get("ATHANOR_TRACKING") == "off":
        return
    undelivered = _undelivered(checkout.root)
    if undelivered:
        names = f"{undelivered[0].name}{f' and {len(undelivered) - 1} more' if len(undelivered) > 1 else ''}"
        if locked(checkout.root / ".athanor" / "ship.lock"):
            yield Finding(
                "journal", names, "being shipped to MLflow now", "athanor ship --wait 600 waits for it", note=True
            )
        else:
            what = "journal is not in MLflow yet"
            yield Finding("journal", names, what, "python -m athanor ship", lambda: _ship(checkout.root))


def store(checkout: Checkout) -> Iterator[Finding]:
    """A tracking store that does not answer, or is of another MLflow; and one that was copied or moved."""
    if why := store_trouble(checkout.root):
        yield Finding("store", why.where, why.what, why.fix)
    else:
        yield from _moved_store(checkout)


def _moved_store(checkout: Checkout) -> Iterator[Finding]:
    """MLflow writes the absolute path of its files into the database: a copied or moved checkout keeps the old one."""
    path = database(ship.tracking_uri(checkout.root))
    if path != checkout.root / "mlflow.db" or not path.is_file():
        return  # one elsewhere is not this checkout's alone
    query = "SELECT artifact_location FROM experiments WHERE name = ?"
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5.0)) as store:
        rows = store.execute(query, (EXPERIMENT,)).fetchall()
    expected = artifacts_of(path).as_uri()
    for (where,) in rows:
        if where != expected:
            what = f"was copied or moved: MLflow keeps its files in {where}"
            move = f"mv {shlex.quote(str(path))} {shlex.quote(str(path))}.old"
            yield Finding("store", str(path), what, f"{move} && athanor ship --rebuild")


def _undelivered(root: Path) -> list[Path]:
    """Runs that ended, or were killed, and are not in the tracking store as such."""
    return [folder for folder in ship.unshipped(root) if not alive(folder) and not _delivered_as_killed(folder)]


def _delivered_as_killed(folder: Path) -> bool:
    state = delivery(folder)
    return state.get("dead", False) and state.get("resumed") == Record(folder / "meta.json")["resumed"]


def _ship(root: Path) -> str:
    started = time.monotonic()
    while undelivered := len(_undelivered(root)):
        shipping = locked(root / ".athanor" / "ship.lock")
        if time.monotonic() - started > (SHIP_AT_WORK_SECONDS if shipping else SHIP_SECONDS):
            raise AthanorError(f"{undelivered} are left; see .athanor/ship.log")
        if not shipping:
            ship.start_detached(root)
        time.sleep(0.3)
    return "shipped"


def untracked(checkout: Checkout) -> Iterator[Finding]:
    """Files that a stage reads in the workspace and an experiment in a clone would miss."""
    graph = Graph(checkout.root)
    names = untracked_files.untracked(checkout.root, untracked_files.inputs(graph, graph.stages))
    for folder, found in untracked_files.by_folder(names).items():
        name = found[0] if len(found) == 1 else f"{folder}/"
        count = f"{len(found)} files of it are" if len(found) > 1 else "is"
        what = f"{count} not known to Git: experiments with --temp or --queue, and clones, do without (dvc add does as well)"
        yield Finding("untracked", name, what, untracked_files.command(folder, found))


def experiments(checkout: Checkout) -> Iterator[Finding]:
    """Experiments from commits without a DVC remote; `dvc exp push` sends them without their data and says nothing."""
    root = checkout.root
    if names := sharing.without_data(root):
        few = f"{', '.join(names[:MOST_NAMES])}{f' and {len(names) - MOST_NAMES} more' if len(names) > MOST_NAMES else ''}"
        what = "made before a DVC remote was committed: dvc exp push sends it without its data"
        command = 'DVC_GLOBAL_CONFIG_DIR="$PWD/.dvc" dvc exp push GIT-REMOTE NAME where it was made sends its data, too'
        if not sharing.setting(root):
            back = "git restore .dvc/config && dvc pull; if that fails"  # dvc exp apply took it away
            command = f"{back if sharing.setting(root, commit='HEAD') else sharing.NAME_IT}, then {command}"
        yield Finding("experiment", few, what, f"{command} (docs/experiments.md, Share)", note=True)


def data(checkout: Checkout) -> Iterator[Finding]:
    """What the last commit names and the remote lacks, as far as a look at a folder shows it."""
    root = checkout.root
    if names := sharing.lacking(root, "HEAD"):
        edited = git(root, "diff", "--name-only", "HEAD", "dvc.lock")  # dvc push sends what is in the workspace's
        push = "git stash push dvc.lock && { dvc push; git stash pop; }" if edited else "dvc push"
        push += " where they were made; or athanor repro first"
        what = f"{len(names)} outputs of the last commit are not in the DVC remote, so dvc pull fails in a clone ({names[0]})"
        yield Finding("remote", "dvc.lock", what, push, note=not git(root, "branch", "-r", "--contains", "HEAD"))


def space(checkout: Checkout) -> Iterator[Finding]:
    """Whether the disk has room for what a run may write next: the largest slot and the largest stage's outputs."""
    all_slots = slots.find(checkout.root)
    done = [slot for slot in all_slots if slot.state == "done" and not slot.current and not slot.pinned]
    if done:
        size = slots.size(sum(slot.bytes for slot in done))
        what = f"{len(done)} finished slots that made nothing in the workspace, {size}"
        yield Finding("slots", ".athanor/slots", what, "python -m athanor slots prune --days 0", note=True)
    sizes = [sum(out.get("size", 0) for out in row.get("outs", ())) for row in recorded_stages(checkout).values()]
    needed_bytes = max((slot.bytes for slot in all_slots), default=0) + max(sizes, default=0)
    folders = filter(Path.is_dir, (sharing.cache_folder(checkout.root), checkout.root))
    for path in {os.stat(folder).st_dev: folder for folder in folders}.values():
        disk = os.statvfs(path)
        free = disk.f_bavail * disk.f_frsize
        if free < needed_bytes:
            what = f"{slots.size(free)} free, but the largest slot and output need {slots.size(needed_bytes)}"
            yield Finding("disk", str(path), what, "python -m athanor slots prune, dvc gc, or a larger disk")
        if disk.f_files and disk.f_favail < FEW_INODES:
            yield Finding("disk", str(path), f"only {disk.f_favail} inodes free", "remove small files")


def hardware_profile(root: Path) -> Iterator[Finding]:
    """One note: what the hardware profile is, or why it is not used."""
    if not (root / profiles.FILE).is_file():
        return
    profile, (what, command) = profiles.read(root), ("cannot be read, so it is not used", f"{BENCH} --again")
    if profile is not None:
        traits, compiled = profile["fingerprint"], profile["compile"]
        params = root / "params.yaml"
        shape = read_yaml(params).get("model", {}) if params.is_file() else {}
        changed = [
            f"model.{name} is another"
            for name, value in shape.items()
            if value is not None and traits["model"].get(name, value) != value
        ]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("torch")
            if version.split("+")[0] != traits["torch"].split("+")[0]:
                changed.append(f"torch is now {version}")
        gain = "not compiled"
        if compiled["works"]:
            gain = f"{compiled['eager_seconds'] / compiled['compiled_seconds']:.2f} times as fast compiled"
        kernel = profile["attention"]["default"]
        what = f"{traits['device']}, {traits['threads']} threads: {profile['precision']}, {kernel} attention, {gain}"
        command = f"{BENCH} shows all of it"
        if changed:
            what, command = f"is stale and not used: {', '.join(changed)}", BENCH
    yield Finding("profile", profiles.FILE.as_posix(), what, command, note=True)


def machine_troubles(checkout: Checkout) -> Iterator[Finding]:
    """What is known to go wrong on a machine like this one (docs/troubles.md)."""
    settings, params = machine(), checkout.root / "params.yaml"
    asked = {**dataclasses.asdict(settings), "params": read_yaml(params) if params.is_file() else {}}
    for trouble in shown(here(dict(flatten(asked)), checkout.root)):
        note = trouble.severity in ("slows", "note") or trouble.name in settings.known_troubles
        what = f"{trouble.title}. {trouble.cause.removesuffix('.')}"
        yield Finding("trouble", trouble.name, what, trouble.fix, note=note)


def llama_cpp(checkout: Checkout) -> Iterator[Finding]:
    """Where there is a card: a build of llama.cpp that does not load, and a note on one that computes on the processor."""
    if not (found := cards.find()) or importlib.util.find_spec("xllamacpp") is None:
        return
    version = importlib.metadata.version("xllamacpp").partition("+")[0]  # without the name of a build
    install = f"pip install xllamacpp=={version} --no-deps --force-reinstall"
    try:
        import xllamacpp

        kinds = [device["type"].name for device in xllamacpp.get_device_info()]
    except (ImportError, OSError) as error:  # a build for another driver or card
        what = f"cannot be imported ({' '.join(str(error).split())}), so athanor serve and chat compute nothing"
        yield Finding("llama.cpp", "xllamacpp", what, install)
        return
    if not any("GPU" in kind for kind in kinds):
        what = f"is the build without GPU, so athanor serve and chat do not use {found[0]}"
        fix = f"{install} --index-url {cards.llama_cpp_index(found[0])}"
        yield Finding("llama.cpp", "xllamacpp", what, fix, note=True)
