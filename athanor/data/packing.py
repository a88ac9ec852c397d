"""Packing: whole conversations into rows of a fixed number of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from athanor.data.order import permutation


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Best-fit decreasing: numbers of the pieces in each row; no piece is divided.

    Each piece goes to the fullest row it still fits. Pieces of equal length are
    taken in a seeded order, so rows mix sources. ValueError for a piece longer than `capacity`.
    """
    order = permutation(len(lengths), seed, "pack").tolist()
    order.sort(key=lambda number: -lengths[number])
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free tokens -> rows with exactly that room
    rooms: list[int] = []  # the keys of by_room, ascending
    for number in order:
        length = lengths[number]
        if length > capacity:
            raise ValueError(f"piece {number} has {length} tokens, a row holds {capacity}")
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[row].append(number)
        left = room - length
        if left not in by_room:
            bisect.insort(rooms, left)
            by_room[left] = []
        by_room[left].append(row)
    return rows


def fit_turns(mask: Sequence[int], capacity: int) -> int:
    """How many leading tokens of a conversation to keep: all, or up to the last assistant turn that fits, or 0.

    A conversation is cut only right after a supervised run, where an assistant turn has ended.
    """
    if len(mask) <= capacity:
        return len(mask)
    values = np.asarray(mask, dtype=np.int8)
    ends = np.flatnonzero((values[:-1] == 1) & (values[1:] == 0)) + 1
    fitting = ends[ends <= capacity]
    return int(fitting[-1]) if len(fitting) else 0
