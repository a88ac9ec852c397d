"""Stages in several processes: torchrun started under DVC without DVC knowing.

    dvc repro -> python -m stages.pretrain          the launcher: waits, passes signals on, gives the exit status
                   python -m athanor.runtime.launch    torchrun's agent (torch.distributed.run), one per node
                     python -m stages.pretrain              a member: one process of the training

The launcher exists because torchrun turns every failure into status 1, and on
a signal gives its processes 30 s, less than a large checkpoint may need. So
signals go from the launcher to the members themselves, and their exit
statuses come back in files below `.athanor`. The agent has the end of a pipe
that only the launcher can write to, and ends when the other end is closed; a
member ends with the agent. So none outlives the launcher, however it ended.

torchrun may also be started by hand: then the members are on their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from athanor.base.artifacts import write_text
from athanor.base.errors import InputError, ParamsError
from athanor.runtime import hosts
from athanor.runtime.lifetime import end_with, record_death
from athanor.runtime.locks import process_exists
from athanor.runtime.machine import Launch, anchor, machine
from athanor.runtime.terminal import say, stop_signals

FOLDER, NODE_RANK, PIPE = "ATHANOR_LAUNCHED", "ATHANOR_LAUNCH_NODE_RANK", "ATHANOR_LAUNCH_PIPE"
AGENT = "ATHANOR_LAUNCH_AGENT"  # the number of torchrun's process
POLL = 0.2  # s
GRACE = 30.0  # s; torchrun's own, too
TOLD = 3  # of the agent: it has said why the nodes did not meet
STOPPED, CRASHED = 75, 70  # statuses that members report, besides 0 and 1


def is_member() -> bool:
    """Whether this is one of several processes of a stage."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main() -> bool:
    """Whether this process is the stage to the outside: the only one, or the first of node 0."""
    if not is_member():
        return True
    if FOLDER not in os.environ:
        return os.environ.get("RANK") == "0"
    # Not torchrun's rank: it numbers nodes as it likes, and results belong where the user asked for them.
    return node_rank(os.environ) == 0 and os.environ.get("LOCAL_RANK") == "0"


def node_rank(environment: Mapping[str, str]) -> int:
    for name in (NODE_RANK, "SLURM_NODEID"):
        text = environment.get(name)
        if text is not None:
            if not text.isdigit():
                raise ParamsError(f"expected a whole number, found {text!r}", where=f"environment {name}")
            return int(text)
    return 0


def launch(stage: str, module: str, settings: Launch | None = None) -> int | None:
    """The exit status of a stage that ran in several processes; None where this process is to do the work.

    `settings` replaces those of the machine. The nodes in `hosts` run the module of the same name.
    """
    if is_member() or "RANK" in os.environ:
        return None
    local = machine()
    settings = settings or local.launch
    if settings.hosts:
        settings = dataclasses.replace(settings, nodes=1 + len(settings.hosts))
    processes = settings.processes or accelerators()
    if processes * settings.nodes < 2:
        return None
    hosts.end_with_node_0()
    folder = _folder(anchor() / ".athanor" / "launch")
    read, write = os.pipe()
    try:
        threads = max(1, local.threads // processes)
        environment = {**os.environ, FOLDER: str(folder), PIPE: str(read), "ATHANOR_THREADS": str(threads)}
        environment["ATHANOR_LAUNCH"] = settings.as_text()
        environment.setdefault("OMP_NUM_THREADS", "1")
        argv = arguments(stage, module, settings, processes)
        if settings.nodes > 1 and (name := hosts.interface_of(own_address(settings.endpoint))):
            # gloo asks for the address of the host's name, which Debian's /etc/hosts calls 127.0.1.1.
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
        command = [sys.executable, "-m", "athanor.runtime.launch", *argv]
        with hosts.Others(settings, module) as others:
            # In a session of its own: Ctrl-C reaches the launcher, which passes it on once.
            agent = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[read])
            return _wait(stage, agent, folder, others)
    finally:
        os.close(read)
        os.close(write)
        shutil.rmtree(folder, ignore_errors=True)


def _folder(home: Path) -> Path:
    """A folder for this launcher's files, not among temporary ones, which some systems clear after ten days.

    Those that killed launchers of this host left behind go.
    """
    host = platform.node()
    for old in home.glob(f"{host}-*"):
        pid = int(old.name.removeprefix(f"{host}-"))
        if pid == os.getpid() or not process_exists(pid):
            shutil.rmtree(old, ignore_errors=True)
    folder = home / f"{host}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


def arguments(stage: str, module: str, settings: Launch, processes: int) -> list[str]:
    """The arguments for torchrun."""
    if settings.nodes == 1:
        rendezvous = ["--standalone"]
    elif settings.endpoint:
        rendezvous = [f"--nnodes={settings.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={settings.endpoint}"]
        # The stage is part of the id, because a node that is one stage ahead must not join.
        rendezvous += [f"--rdzv-id=athanor-{stage}", f"--node-rank={node_rank(os.environ)}"]
        seconds = int(settings.wait_s)
        rendezvous += [f"--rdzv-conf=join_timeout={seconds},is_host={int(node_rank(os.environ) == 0)}"]
        rendezvous += [f"--local-addr={own_address(settings.endpoint)}"]
    else:
        raise ParamsError(
            f"{settings.nodes} nodes need a place to meet",
            where="machine.launch.endpoint",
            fix="the address of node 0 and a free port, such as 10.0.0.1:29400",
        )
    return [*rendezvous, f"--nproc-per-node={processes}", "--max-restarts=0", *settings.args, "-m", module]


def own_address(endpoint: str) -> str:
    """This node's address as others can reach it: host names of clusters do not always resolve."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))  # asks for the route, sends nothing
            return probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise ParamsError(
            f"no way to {endpoint!r} ({error})", where="machine.launch.endpoint", fix="host:port of node 0"
        ) from None


def accelerators() -> int:
    """How many this machine has; 1 without any."""
    import torch

    return max(1, torch.cuda.device_count())


def _wait(stage: str, agent: subprocess.Popen, folder: Path, others: hosts.Others | None = None) -> int:
    """Pass signals on to the members of this node until the agent has ended; the stage's exit status."""
    received: list[int] = []
    lost, give_up = "", math.inf
    signalled: set[str] = set()
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in stop_signals()}
    try:
        while (status := agent.poll()) is None:
            time.sleep(POLL)
            if others and not (lost or received) and (lost := others.lost()):
                # Its neighbours notice it by their connections, and have something to tell; not before they have met.
                say(f"{stage}: {lost}")
                give_up = time.monotonic() + (GRACE if any(folder.glob("*.pid")) else 0.0)
            if time.monotonic() > give_up:
                agent.terminate()
                give_up = math.inf
            if not received:
                continue
            members = {path.stem: int(path.read_text()) for path in folder.glob("*.pid")}
            if not members and "agent" not in signalled:  # still waiting for other nodes, or importing: nothing to save
                signalled.add("agent")
                if others:
                    others.end(0.0)  # before they miss this node, and take it for a fault
                agent.terminate()
            # One that has reported its status may be gone, and its process id another process's.
            for name in members.keys() - signalled - {path.stem for path in folder.glob("*.status")}:
                signalled.add(name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(members[name], received[0])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    statuses = {int(path.read_text()) for path in folder.glob("*.status")}
    without_status = {path.stem for path in folder.glob("*.pid")} - {path.stem for path in folder.glob("*.status")}
    if status == 0:
        return STOPPED if STOPPED in statuses else 0
    if received and statuses <= {0, STOPPED}:
        return STOPPED
    if status == TOLD or (lost and not without_status):
        return 1
    if without_status or not statuses:
        subject = (
            f"process {', '.join(sorted(without_status))} of this node was" if without_status else "all processes were"
        )
        cause = f"{subject} killed, perhaps for want of memory"
        say(f"{stage}: {cause}; the same command goes on from the last checkpoint")
        record_death(cause)
    elif CRASHED in statuses:
        record_death("a process of this node met an unexpected error")
    return 1


def register() -> None:
    """Called in a member once it handles signals: register with the launcher, and end with it."""
    if not is_member() or FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    write_text(folder / f"{os.environ['LOCAL_RANK']}.pid", str(os.getpid()))
    end_with(int(os.environ[AGENT]), POLL)  # not with its parent now: the agent may have ended by this time


def report_status(status: int) -> int:
    """Called in a member at its end: report the status to the launcher; returns the one for torchrun.

    A member that stopped with its state saved has not failed: torchrun would kill the others at their last words.
    """
    if not is_member() or FOLDER not in os.environ:
        return status
    with contextlib.suppress(OSError):
        write_text(Path(os.environ[FOLDER]) / f"{os.environ['LOCAL_RANK']}.status", str(status))
    return 0 if status == STOPPED else status


def end(status: int) -> NoReturn:
    """End the process. A member that failed ends at once: gloo can abort one that tears down a lost connection."""
    if status and is_member():
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _end_with_launcher(pipe: int) -> None:
    """End this process with its launcher, which alone has the other end of the pipe and writes nothing."""

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def agent(argv: Sequence[str]) -> int:
    """Run torchrun without its messages about failures that the members have reported themselves."""
    _end_with_launcher(int(os.environ[PIPE]))
    os.environ[AGENT] = str(os.getpid())
    logging.disable(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main

    hosts.tell_who_is_missing(argv)
    try:
        main(list(argv))
    except (ChildFailedError, SignalException):
        return 1
    except RendezvousError as error:
        what = f"the nodes did not come together ({type(error).__name__}: {error})"
        say(str(InputError(what, where="launch", fix="start the same command on every node")))
        return TOLD
    return 0


if __name__ == "__main__":
    sys.exit(agent(sys.argv[1:]))
