"""Keys of a GGUF file without its arrays of text: fast enough to look at every file when a server starts.

The `gguf` package reads a vocabulary of 150,000 pieces in seconds; here its bytes are stepped over.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

from athanor.errors import InputError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Bounds on what a file from anywhere can cost: the largest vocabularies take 15 MB, and a model has an item per layer.
MOST_BYTES, MOST_ITEMS, MOST_KEYS = 32 << 20, 1 << 16, 10_000


def read_header(path: str | Path) -> dict[str, Any]:
    """Every key with its value; of a long array or one of text only the number of its items. InputError if torn."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = min(os.fstat(file.fileno()).st_size, MOST_BYTES)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _keys(data)
    except (struct.error, KeyError, OverflowError, ValueError) as error:
        raise InputError(f"not a whole GGUF file ({error})", where=str(path), fix="fetch or export it again") from None


def _keys(data: mmap.mmap) -> dict[str, Any]:
    magic, version, _, count = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    if count > MOST_KEYS:
        raise ValueError(f"it promises {count} keys")
    place, found = 24, {}
    for _ in range(count):
        key, place = _text(data, place)
        (kind,) = struct.unpack_from("<I", data, place)
        found[key], place = _value(data, place + 4, kind)
    return found


def _text(data: mmap.mmap, place: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(data, place)
    end = place + 8 + length
    if end > len(data):
        raise ValueError("a text reaches beyond its end")
    return data[place + 8 : end].decode("utf-8"), end


def _value(data: mmap.mmap, place: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _text(data, place)
    if kind != _ARRAY:
        number = struct.Struct("<" + _NUMBERS[kind])
        return number.unpack_from(data, place)[0], place + number.size
    inner, count = struct.unpack_from("<IQ", data, place)
    place += 12
    if inner != _STRING:  # an array of arrays is in no model, and can be nested without end
        size = struct.calcsize(f"<{_NUMBERS[inner]}")
        if count > MOST_ITEMS:
            return count, place + count * size
        return list(struct.unpack_from(f"<{count}{_NUMBERS[inner]}", data, place)), place + count * size
    read = _LENGTH.unpack_from
    for _ in range(count):
        place += 8 + read(data, place)[0]
    return count, place
