"""Who has come to `athanor launch check`, and who is silent.

Every rank counts on in the store of the rendezvous, twice a second and from a thread of its own, so that it does also
while it waits for another one. A rank whose count stands still is stopped, or its machine is; what a collective would
say of it after its timeout is that some other one is lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore

from athanor.runtime import launch
from athanor.runtime.terminal import say

BEAT, SILENT = 0.5, 5.0  # s between two signs of life, and after which there is none
FIRST_WORD = 6.0  # s until the ranks are named that are waited for
STORE_SECONDS = 30.0
LOST, MAIN = "lost", "main"  # keys


class Meeting:
    """This rank among all. `facts`: what it tells of itself, with `node`, `host` and `pid`."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.main, self.facts = launch.is_main(), facts
        self.over = False
        self.store = _connect()
        if self.main:
            self.store.set(MAIN, str(self.rank))
        self.store.set(f"here/{self.rank}", json.dumps(facts))
        threading.Thread(target=self._watch, daemon=True).start()

    def everybody(self) -> list[dict[str, Any]]:
        """What each rank told of itself, in order; all must have come."""
        return [json.loads(self.store.get(f"here/{rank}")) for rank in range(self.size)]

    def arrive(self, place: str, limit_s: float) -> None:
        """Wait here for all ranks; the main one names those that are missing, and ends the check after `limit_s`."""
        keys = {rank: f"{place}/{rank}" for rank in range(self.size)}
        self.store.set(keys[self.rank], "")
        started, told = time.monotonic(), False
        while not self.store.check(list(keys.values())):
            waited = time.monotonic() - started
            if self._speaks() and waited > (limit_s if told else min(FIRST_WORD, limit_s)):
                missing = [rank for rank, key in keys.items() if not self.store.check([key])]
                told, names = True, "; ".join(_name(self.store, rank) for rank in missing)
                if waited > limit_s:
                    self._lose(self.store, missing, f"not at {place} after {waited:.0f} s: {names}")
                elif missing:
                    say(f"check: waits at {place} for {names}")
            time.sleep(0.05)

    def _speaks(self) -> bool:
        """Whether this rank names others: the main one, or while that is not here one of the first two."""
        return self.main or (self.rank < 2 and not self.store.check([MAIN]))

    def leave(self) -> None:
        """From here on nobody's silence counts."""
        self.over = True

    def _watch(self) -> None:
        try:
            store = _connect()
            # The second and the third eye are for the main rank's own silence.
            watched = [rank for rank in range(self.size) if rank != self.rank] if self.main or self.rank < 2 else []
            seen: dict[int, tuple[int, float]] = {}
            while not self.over:
                store.add(f"beat/{self.rank}", 1)
                if store.check([LOST]):
                    self._end(json.loads(store.get(LOST)))
                now, silent = time.monotonic(), []
                for rank in watched:
                    beats = store.add(f"beat/{rank}", 0)
                    if beats and beats != seen.get(rank, (0,))[0]:
                        seen[rank] = (beats, now)
                    elif rank in seen and now - seen[rank][1] > SILENT:
                        silent.append(rank)
                if silent:
                    names = "; ".join(_name(store, rank) for rank in silent)
                    self._lose(store, silent, f"silent for {SILENT:.0f} s, so stopped, frozen or cut off: {names}")
                time.sleep(BEAT)
        except RuntimeError as error:  # the store has ended
            if not self.over:
                say(f"check: rank {self.rank} has lost the store of node 0 ({str(error).splitlines()[0]:.100})")
                _exit()

    def _lose(self, store: Store, ranks: list[int], text: str) -> NoReturn:
        text += ". Fix: look at their state there (ps -o pid,stat,cmd); T is stopped: kill -CONT PID"
        mine = json.dumps({"ranks": ranks, "text": text})
        self._end(json.loads(store.compare_set(LOST, "", mine)))

    def _end(self, lost: Mapping[str, Any]) -> NoReturn:
        """Say it once, and take the silent ones of this node along: torchrun would wait for them for half a minute."""
        store = _connect()
        found = {rank: json.loads(store.get(f"here/{rank}")) for rank in lost["ranks"] if _came(store, rank)}
        main_is_lost = not store.check([MAIN]) or int(store.get(MAIN)) in lost["ranks"]
        if self.main or (main_is_lost and self.rank == min(set(range(self.size)) - set(lost["ranks"]))):
            say(f"check: {lost['text']}")
        time.sleep(3 * BEAT)  # until the main rank has read it: torchrun ends all ranks of a node with the first
        for facts in found.values():
            if (facts["host"], facts["node"]) == (self.facts["host"], self.facts["node"]):
                try:
                    os.kill(facts["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue
        _exit()


def _exit() -> NoReturn:
    sys.stderr.flush()
    launch.report_status(1)
    os._exit(1)


def _connect() -> Store:
    """A connection of its own: one that waits holds up everything else on it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    return PrefixStore("athanor-check", store)


def _came(store: Store, rank: int) -> bool:
    return bool(store.check([f"here/{rank}"]))


def _name(store: Store, rank: int) -> str:
    if _came(store, rank):
        facts = json.loads(store.get(f"here/{rank}"))
        return f"rank {rank} (node {facts['node']}, {facts['host']}, process {facts['pid']})"
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    first = rank // local * local
    for neighbour in range(first, first + local):
        if _came(store, neighbour):
            facts = json.loads(store.get(f"here/{neighbour}"))
            return f"rank {rank} (node {facts['node']}, {facts['host']}), which has not begun"
    return f"rank {rank}, which has told nothing yet"
