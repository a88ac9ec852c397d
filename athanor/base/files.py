"""Arrays read from any number of files through a few open ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from athanor.base.errors import InputError

MAX_OPEN = 32


class _Descriptor:
    """Closes with its last reference, so a thread that reads keeps the file open that another thread has dropped."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class OpenFiles:
    """Reads parts of files, of which the `limit` used last stay open.

    No mappings and no file positions: several threads, and processes forked
    from this one, may read at once. A file is read as it was when it was
    opened, so make a new object after files were replaced.
    """

    def __init__(self, limit: int = MAX_OPEN) -> None:
        self._limit = limit
        self._open: dict[Path, _Descriptor] = {}  # used last comes last

    def read(self, path: Path, offset: int, count: int, dtype: DTypeLike) -> np.ndarray:
        """`count` items of `dtype` from byte `offset`; InputError where the file ends before."""
        out = np.empty(count, dtype)
        left = memoryview(out.view(np.uint8))
        file = self._descriptor(path)
        while left:
            size = os.preadv(file.number, [left], offset)
            if not size:
                raise InputError("the file is shorter than its index says", where=path, fix="dvc checkout --force")
            left, offset = left[size:], offset + size
        return out

    def _descriptor(self, path: Path) -> _Descriptor:
        file = self._open.pop(path, None) or _Descriptor(path)
        self._open[path] = file
        for old in list(self._open)[: -self._limit]:
            self._open.pop(old, None)
        return file


def joined(parts: Iterable[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """One array of all parts, of which np.concatenate would hold each twice."""
    data = bytearray()
    for part in parts:
        data += np.ascontiguousarray(part, dtype).data
    return np.frombuffer(data, dtype)
