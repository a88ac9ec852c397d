"""Seconds that a piece of work takes on a device, in bounded time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

TRIES = 20


def synchronise(device: torch.device) -> None:
    """Wait for the device: without it a clock measures how fast work is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def fastest(call: Callable[[], Any], device: torch.device, budget_seconds: float) -> float:
    """The shortest of as many calls as fit into the budget, after one to warm up; that one counts when it is long."""
    return compare({"": call}, device, budget_seconds)[""]


def compare(calls: Mapping[str, Callable[[], Any]], device: torch.device, budget_seconds: float) -> dict[str, float]:
    """As `fastest` for each of several calls, in turns: what else the machine does then meets them all alike."""

    def once(call: Callable[[], Any]) -> float:
        synchronise(device)
        started = time.perf_counter()
        call()
        synchronise(device)
        return time.perf_counter() - started

    started = time.perf_counter()
    warm = {name: once(call) for name, call in calls.items()}
    if time.perf_counter() - started > 2 * budget_seconds:
        return warm
    found = {name: once(call) for name, call in calls.items()}
    for _ in range(TRIES):
        if time.perf_counter() - started > budget_seconds:
            break
        found = {name: min(found[name], once(call)) for name, call in calls.items()}
    return found


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads for each operation inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
