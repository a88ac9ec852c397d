"""The keys of a GGUF file; without its long arrays fast enough to look at every file when a server starts.

The `gguf` package reads a vocabulary of 150,000 pieces in seconds; here its bytes are stepped over. It stays the reader
of tensors (export/gguf_check.py).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Bounds on what a file from anywhere can cost: the largest vocabularies take 15 MB, and a model has an item per layer.
MAX_BYTES, MAX_ITEMS, MAX_KEYS = 32 << 20, 1 << 16, 10_000


def read_header(path: str | Path, *, arrays: bool = False) -> dict[str, Any]:
    """Every key with its value. InputError if the file is not there or torn.

    Without `arrays`, of a long array or one of text only the number of its items.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("file not found", where=str(path), fix="dvc repro export")
    try:
        with open(path, "rb") as file:
            size = min(os.fstat(file.fileno()).st_size, MAX_BYTES)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _keys(data, arrays)
    except (struct.error, KeyError, OverflowError, ValueError) as error:
        raise InputError(f"not a whole GGUF file ({error})", where=str(path), fix="fetch or export it again") from None


def _keys(data: mmap.mmap, arrays: bool) -> dict[str, Any]:
    magic, version, _, count = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    if count > MAX_KEYS:
        raise ValueError(f"it promises {count} keys")
    position, header = 24, {}
    for _ in range(count):
        key, position = _text(data, position)
        (value_type,) = struct.unpack_from("<I", data, position)
        header[key], position = _value(data, position + 4, value_type, arrays)
    return header


def _text(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(data, position)
    end = position + 8 + length
    if end > len(data):
        raise ValueError("a text reaches beyond its end")
    return data[position + 8 : end].decode("utf-8"), end


def _value(data: mmap.mmap, position: int, value_type: int, arrays: bool) -> tuple[Any, int]:
    if value_type == _STRING:
        return _text(data, position)
    if value_type != _ARRAY:
        number = struct.Struct("<" + _NUMBERS[value_type])
        return number.unpack_from(data, position)[0], position + number.size
    element_type, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if element_type != _STRING:  # an array of arrays is in no model, and can be nested without end
        size = struct.calcsize(f"<{_NUMBERS[element_type]}")
        if count > MAX_ITEMS and not arrays:
            return count, position + count * size
        return list(struct.unpack_from(f"<{count}{_NUMBERS[element_type]}", data, position)), position + count * size
    if arrays:
        texts = []
        for _ in range(count):
            text, position = _text(data, position)
            texts.append(text)
        return texts, position
    unpack_length = _LENGTH.unpack_from
    for _ in range(count):
        position += 8 + unpack_length(data, position)[0]
    return count, position
