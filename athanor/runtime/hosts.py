"""The other nodes of a launch: started from node 0 by srun, and named when they do not come.

srun runs the same stage there. Its standard input is held open by node 0: when that ends, however it does, the other
side reads the end of it and ends too, with all of its processes. Signals are not sent there: a member that is asked to
stop asks all.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

from athanor.base.errors import InputError
from athanor.runtime.machine import Launch, anchor
from athanor.runtime.terminal import say

HELD = "ATHANOR_LAUNCH_HELD"  # set where standard input is the line to node 0
ALLOWED = (0, 75)
END_SECONDS = 20.0  # for the last words of the others, once node 0 is through
FIRST_WORD, NEXT_WORD = 5.0, 30.0  # s until missing nodes are named, and again


class Others:
    """The processes here that hold the stage on each host; a context, at whose end none is left."""

    def __init__(self, settings: Launch, module: str) -> None:
        self.names = dict(enumerate(settings.hosts, start=1))
        self.steps = {}
        for number in self.names:
            words, env = step(settings, module, number)
            try:
                self.steps[number] = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                self.end(0.0)
                raise InputError(
                    f"cannot start srun ({error.strerror})",
                    where="machine.launch.hosts",
                    fix="outside of Slurm start the same command on each node (docs/scale-out.md)",
                ) from None

    def lost(self) -> str:
        """The first node whose srun has ended with an error, in words; empty if there is none."""
        for number, srun in self.steps.items():
            status = srun.poll()
            if status is not None and status not in ALLOWED:
                return f"node {number} ({self.names[number]}) ended with status {status}; what it said stands above"
        return ""

    def __enter__(self) -> Others:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(END_SECONDS if kind is None else 0.0)

    def end(self, patience: float) -> None:
        """Wait so many seconds for all to end by themselves, then end them."""
        deadline = time.monotonic() + patience
        while any(one.poll() is None for one in self.steps.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for one in self.steps.values():
            one.stdin.close()
        for one in self.steps.values():
            try:
                one.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def step(settings: Launch, module: str, number: int) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module as node `number`, and its environment."""
    there = dataclasses.replace(settings, hosts=())
    values = {"DVC_ROOT": str(anchor()), "ATHANOR_LAUNCH": there.as_text(), "ATHANOR_LAUNCH_NODE_RANK": str(number)}
    env = {**os.environ, **values, HELD: "1"}
    env.pop("DVC_STAGE", None)  # the lock of a stage that DVC started is node 0's
    one = ["--nodes=1", "--ntasks=1", f"--nodelist={settings.hosts[number - 1]}", "--overlap", "--export=ALL"]
    return ["srun", *one, "--cpu-bind=none", "--unbuffered", sys.executable, "-m", module], env


def end_with_node_0() -> None:
    """Where node 0 started this process: end with it."""
    if os.environ.pop(HELD, None) is None:
        return

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def tell_who_is_missing(argv: Sequence[str]) -> None:
    """In torchrun's agent, in the background: say which nodes have not come to the meeting, until all have.

    torchrun itself waits in silence, and then tells that the time is over.
    """
    options = dict(word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word)
    if "nnodes" not in options:
        return
    host, _, port = options["rdzv-endpoint"].rpartition(":")
    own, total = int(options["node-rank"]), int(options["nnodes"])
    place, started = (host.strip("[]"), int(port)), time.monotonic()

    def watch() -> None:
        from torch.distributed import TCPStore

        word_at = started + FIRST_WORD

        def due() -> bool:
            nonlocal word_at
            is_due = time.monotonic() >= word_at
            word_at += NEXT_WORD if is_due else 0.0
            return is_due

        while True:
            try:
                socket.create_connection(place, timeout=2.0).close()
                break
            except OSError as error:
                if due():
                    say(f"node {own} waits: node 0 does not answer at {host}:{port} ({error})")
                time.sleep(0.2)
        store = TCPStore(place[0], place[1], is_master=False, timeout=timedelta(seconds=60))
        keys = {number: node_key(options["rdzv-id"], number) for number in range(total)}
        store.set(keys[own], platform.node())
        while own == 0 and (missing := [number for number, key in keys.items() if not store.check([key])]):
            if due():
                names = ", ".join(map(str, missing))
                what = f"{time.monotonic() - started:.0f} s, and of {total} nodes {names} {'is' if len(missing) == 1 else 'are'} missing"
                say(f"{what}. Fix: the same command there, with ATHANOR_LAUNCH_NODE_RANK={missing[0]}")
            time.sleep(0.2)

    def quietly() -> None:
        try:
            watch()
        except RuntimeError:  # the store has ended, and with it the meeting
            return

    threading.Thread(target=quietly, daemon=True).start()


def node_key(meeting: str, number: int) -> str:
    """Where the store has the name of a node that has come."""
    return f"{meeting}/node-{number}"


def interface_of(address: str) -> str:
    """The network interface that has an address; empty if none has."""
    import psutil

    found = (name for name, rows in psutil.net_if_addrs().items() if any(row.address == address for row in rows))
    return next(found, "")
