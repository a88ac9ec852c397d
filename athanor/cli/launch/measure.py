"""How fast gradients travel between the processes: all of them together, and each pair alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from athanor.training.world import World

SIZES = tuple(4000 * 4**power for power in range(8))  # bytes, 4 kB to 66 MB
BUDGET = 0.3  # s for one size
TRIES = 5  # of a pair, of which the fastest counts: other programs only add time
CEILING = 8.0  # s: a size of which one would take longer is left out
MAX_REPEATS = 50
TRIAL_BYTES = 256_000  # that a pair sends to find out how many it can measure with
SLOW = 1 / 3  # of what others reach, or the link allows
GIGABIT = 125e6  # bytes/s: no training on several machines is meant for less


def all_reduce(world: Any, device: torch.device) -> list[dict[str, float]]:
    """For each size in bytes the seconds of a sum over all ranks, and bytes/s as nccl-tests counts them.

    Bus bandwidth is bytes / seconds * 2 (n - 1) / n for n ranks: what each link carries, whatever n is
    (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    rows: list[dict[str, float]] = []
    for size in SIZES:
        if rows and rows[-1]["seconds"] * size / rows[-1]["bytes"] > CEILING:
            break
        tensor = torch.zeros(size // 4, device=device)
        once = _slowest(world, _timed(lambda: world.dist.all_reduce(tensor), device))
        repeats = max(1, min(MAX_REPEATS, int(BUDGET / once)))
        seconds = _slowest(world, _timed(lambda: [world.dist.all_reduce(tensor) for _ in range(repeats)], device))
        seconds /= repeats
        bus = size / seconds * 2 * (world.size - 1) / world.size
        rows.append({"bytes": size, "seconds": seconds, "bus_bytes_per_second": bus})
    return rows


def pairs(world: World, device: torch.device, units: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes/s from each of these ranks to each other one, alone on their way; as many pairs at a time as there can be."""
    speeds = torch.zeros(world.size, world.size)
    for matches in tournament(len(units)):
        for first, second in matches:
            one, other = units[first], units[second]
            if world.rank in (one, other):
                _transfer(world, device, one, other, speeds)
                _transfer(world, device, other, one, speeds)
        world.any(True)  # the next round's pairs would share the way with those of this one
    world.sum_(speeds)
    return [
        {"from": one, "to": other, "bytes_per_second": float(speeds[one, other])}
        for one in units
        for other in units
        if one != other
    ]


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs in which each of `count` meets each other one once (the circle method)."""
    ring = [*range(count), *([-1] if count % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        yield [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if min(a, b) >= 0]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def slow_links(links: Sequence[dict[str, Any]], limit: float | None, slow: float) -> list[tuple[dict[str, Any], float]]:
    """The links below a share, `slow`, of the others or of `limit` (bytes/s), each with what it was held against."""
    found = []
    for link in links:
        others = [other["bytes_per_second"] for other in links if other is not link]
        usual = statistics.median(others) if others else 0.0
        for measure in (usual, limit or 0.0):
            if link["bytes_per_second"] < slow * measure:
                found.append((link, measure))
                break
    return found


def _transfer(world: Any, device: torch.device, sender: int, receiver: int, speeds: Tensor) -> None:
    """Time one direction, by the sender's clock up to the receiver's word that all has come; the best of some tries."""
    words, size = torch.zeros(1, dtype=torch.int64, device=device), TRIAL_BYTES
    for number in range(1 + TRIES):
        trial = not number
        tensor = torch.zeros(size // 4, device=device)
        if world.rank == receiver:
            world.dist.recv(tensor, sender)
            world.dist.send(words, sender)
            if trial:
                world.dist.recv(words, sender)
                size = int(words)
            continue
        seconds = _timed(lambda: (world.dist.send(tensor, receiver), world.dist.recv(words, receiver)), device)
        if trial:
            size = max(TRIAL_BYTES, min(SIZES[-1], int(TRIAL_BYTES * BUDGET / TRIES / seconds) // 4 * 4))
            words.fill_(size)
            world.dist.send(words, receiver)
        else:
            speeds[sender, receiver] = max(float(speeds[sender, receiver]), size / seconds)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _slowest(world: Any, seconds: float) -> float:
    """The longest of all ranks' times: the same decisions everywhere."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    world.dist.all_reduce(longest, op=world.dist.ReduceOp.MAX)
    return float(longest)
