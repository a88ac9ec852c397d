"""`dvc repro` with a summary at the end, or with what ended it.

    python -m athanor repro [--max-minutes N] [--supervise] [arguments of dvc repro]

With --max-minutes, a stage that is at work when the time is over saves and
ends, and the status is 75; the same command goes on from there. With
--supervise, a stage that dies (killed, crashed, hung) is started again, three
times at most; why each died is told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from athanor.base.errors import AthanorError
from athanor.base.host import memory_bytes, peak_bytes
from athanor.cli import explain, live, side, summary
from athanor.cli.battery_gate import check_battery
from athanor.cli.corpus_gate import check_corpus
from athanor.cli.data import report
from athanor.cli.doctor import places
from athanor.cli.doctor.main import Checkout
from athanor.runtime import dvc_lock, lifetime, ship
from athanor.runtime.facts import Graph, check_names
from athanor.runtime.guards import UNTIL
from athanor.runtime.journal import Record
from athanor.runtime.machine import machine
from athanor.runtime.notify import DONE, FAILED, notify
from athanor.runtime.progress import duration
from athanor.runtime.run import PARAMS
from athanor.runtime.schema import check_file
from athanor.runtime.store_check import trouble
from athanor.runtime.terminal import say

RESTARTS = 3
GIB = 2**30
SHIP_SECONDS = 60.0
SHIP_SECONDS_AFTER_FAILURE = 5.0
STOPPED = 75
GOES_ON, MEND = (
    "The same command goes on from there",
    "Mend the cause and run it again; long stages resume where they were",
)
SINGLE = {"-s", "--single-item"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="athanor repro", add_help=False, allow_abbrev=False)
    parser.add_argument("--max-minutes", type=float)
    parser.add_argument("--supervise", action="store_true")
    args, arguments = parser.parse_known_args()
    if {"-h", "--help"} & set(arguments):
        print(__doc__, flush=True)
        return side.command_runner()([*side.DVC, "--help"])
    root = Path.cwd()
    # A moment and not an amount: the stages of one repro share what is left.
    deadline_env = {} if args.max_minutes is None else {UNTIL: f"{time.time() + 60 * args.max_minutes:.1f}"}
    machine()  # for its message
    built = check_file(PARAMS)  # before DVC, which deletes a stage's outputs and only then starts it
    check_names(root)
    check_battery(root, built["battery"])
    check_corpus(built)
    if why := trouble(root):
        say(f"{why}. Training continues without it")
    since_ms, runs_before = int(time.time() * 1000), summary.runs(root)
    signals: list[int] = []
    call = live.command_runner(root, arguments, Graph(root).stages, signals)
    command = [*side.DVC, *arguments]
    restarts = RESTARTS if args.supervise else 0
    status, deaths = supervise(root, lambda: call(command, env={**os.environ, **deadline_env}), signals, restarts)
    unshipped = ship.wait(root, SHIP_SECONDS_AFTER_FAILURE if status else SHIP_SECONDS)
    if status:
        finished, (stopped, reason) = summary.finished(root, runs_before, since_ms), ending(root, since_ms)
        if signals and not (reason or deaths):  # between two stages
            stopped, reason = True, "stopped on request"
        kept = f"Finished in this run: {', '.join(finished)}\n" if finished else ""
        say(
            f"\n{kept}{'Stopped on request' if stopped else 'dvc repro did not finish'}. {GOES_ON if stopped else MEND}.\n"
        )
        told = any(reason.partition(": ")[2] in death for death in deaths)  # a crash has said it in both places
        said = "\n".join(deaths if told else [*deaths, reason]).strip()
        say(said or "the message of the stage is above")
        more = "" if stopped else explain.addition(root, since_ms, said)
        if more:
            say(f"\n{more}")
        if deaths:  # whoever died could say nothing
            notify(FAILED, "\n".join(deaths))
        elif not (stopped or reason or lifetime.refusals(root)):  # nor does DVC, where no stage of ours is at fault
            notify(
                FAILED, f"dvc repro in {root.name} ended with status {status}, and no stage says why.\n{more}".strip()
            )
        return STOPPED if stopped else status
    lines = [summary.text(root, runs_before, since_ms, asked=asked_for(root, arguments)).rstrip("\n")]
    if data_page := report.refresh(root):
        lines.append(f"Data      {data_page.relative_to(root)}  (what was kept and why; athanor data report --open)")
    if next(places.experiments(Checkout(root, (), ())), None):
        lines.append("Queue     `dvc exp run` with --temp or --queue fails here; the cure: athanor doctor")
    if unshipped:
        lines.append("Tracking  the rest of it comes to MLflow with the next run or `make ui`")
    say("\n".join(lines), sys.stdout)
    notify(DONE, f"athanor repro in {root.name} is done, {duration(time.time() - since_ms / 1000)}")
    if deaths:
        say("\n" + "\n".join(deaths))
    return 0


def asked_for(root: Path, arguments: list[str]) -> set[str] | None:
    """The stages that DVC looks at with these arguments of `dvc repro`; None for all, or where names do not tell."""
    graph, targets = Graph(root), {word for word in arguments if not word.startswith("-")}
    options = set(arguments) - targets
    if not targets or targets - graph.stages.keys() or options - {"-f", "--force", *SINGLE}:
        return None
    return targets if options & SINGLE else targets.union(*map(graph.upstream, targets))


def ending(root: Path, since_ms: int) -> tuple[bool, str]:
    """How the last run that did not finish since then ended: whether by a request to stop, and the words of its stage."""
    broken = []
    for path in (root / ".athanor" / "runs").glob("*/end.json"):
        with contextlib.suppress(AthanorError):  # a damaged one says nothing
            end = Record(path)
            if end["ended_ms"] >= since_ms and end["status"] != "FINISHED":
                stage = Record(path.with_name("meta.json"))["stage"]
                broken.append((end["ended_ms"], end["status"] == "KILLED", f"{stage}: {end['error']}"))
    return max(broken, default=(0, False, ""))[1:]


# -- how a stage died, and another start where that helps -----------------------------------------------------------------
#
# A stage that says why it ends (a refused parameter, a gate, a request to stop) would say the same again, or is wanted so.
# One that dies does not: the kernel killed it for want of memory, a driver or a library crashed, it hung. Its checkpoints
# are whole, so another start costs the steps since the last one.


def supervise(root: Path, call: Callable[[], int], signals: list[int], restarts: int) -> tuple[int, list[str]]:
    """Run DVC by `call`, and restart it up to `restarts` times while stages die; returns its status and the deaths.

    It is not restarted once a signal has come, which is then in `signals`.
    """
    all_deaths: list[str] = []
    restarted = 0
    lifetime.deaths(root), lifetime.refusals(root)  # of earlier commands
    while True:
        side.repair_dvc_files(root)
        kills_before = oom_kills()
        status = call()
        dvc_lock.keep(root)
        deaths = [
            death_text(stage, message, oom_kills() > kills_before) for stage, message in lifetime.deaths(root).items()
        ]
        if status < 0 and not signals:
            deaths.append(f"dvc itself was killed (signal {-status}, {signal.strsignal(-status)})")
        all_deaths += deaths
        if not status or not deaths or signals or restarted == restarts:
            return status, all_deaths
        restarted += 1
        say(f"\n{'; '.join(deaths)}\nathanor repro --supervise: starts it again, {restarted} of {restarts}\n")


def death_text(stage: str, message: str, oom_killed: bool) -> str:
    """How a stage died, in words, and what to do about it."""
    if message:
        where = f" (its stack: {lifetime.trace(Path(), stage)})" if "\n" in message else ""
        return f"{stage} died: {message.splitlines()[0]}{where}"
    peak_gib = peak_bytes(resource.RUSAGE_CHILDREN) / GIB
    memory = f"its largest process held {peak_gib:.1f} of {memory_bytes() / GIB:.1f} GiB"
    if oom_killed:
        cause = "the kernel has killed a process for want of memory meanwhile"
    else:
        cause = "most often the kernel does that for want of memory (dmesg knows)"
    return f"{lifetime.KILLED.format(stage=stage)}; {cause}; {memory}. Fix: {lifetime.MEMORY_FIX}"


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not count them."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(rows.get("oom_kill", 0))
    return 0
