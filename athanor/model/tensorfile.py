"""Read and write safetensors files with torch alone.

The format: eight bytes (little endian) with the length of a JSON header, the
header (name -> dtype, shape, byte range; padded with spaces to eight bytes),
the tensors' bytes. Written here in one fixed order, so that equal tensors
make equal files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from athanor.base.errors import InputError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS, _MAX_ITEMS = 64, 2**59  # what NumPy and torch can count


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors to `path`, flushed to disk; returns the file's SHA-256 in hexadecimal.

    Widest elements first, then by name, so every tensor starts aligned. Not
    atomic by itself: write into a directory that is renamed when complete.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in (struct.pack("<Q", len(text)), text):
            checksum.update(chunk)
            file.write(chunk)
        for name in order:
            data = _bytes(tensors[name].detach().cpu().contiguous())
            checksum.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return checksum.hexdigest()


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, dict], dict[str, str], int]:
    """Entries by name, metadata, and the byte where data starts; InputError if the file is torn."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, "its header is cut off")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise InputError("file not found", where=str(path), fix="run the stage that makes it: dvc repro") from None
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is not JSON") from None
    try:
        metadata = dict(header.pop("__metadata__", {}))
        offset = _checked(path, header)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header has another form ({type(error).__name__})") from None
    if 8 + length + offset != size:
        raise _damaged(path, f"it has {size} bytes where its header promises {8 + length + offset}")
    return header, metadata, 8 + length


def _checked(path: Path, header: dict[str, dict]) -> int:
    """The bytes that all tensors take, after a look at every entry; raises for one that torch could not hold."""
    offset = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise _damaged(path, f"tensor {name} has unknown type {entry['dtype']}")
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
            raise _damaged(path, f"tensor {name} has a shape or a byte range that no tensor can have")
        if math.prod(max(1, n) for n in shape) > _MAX_ITEMS:
            raise _damaged(path, f"tensor {name} has a shape that no tensor can have")
        if begin != offset or end - begin != math.prod(shape) * dtype.itemsize:
            raise _damaged(path, f"the byte range of tensor {name} does not fit its shape")
        offset = end
    return offset


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU, in memory of their own."""
    header, _, start = read_header(path)
    tensors = {}
    with open(path, "rb") as file:
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            file.seek(start + begin)
            if end > begin and file.readinto(_bytes(tensors[name])) != end - begin:
                raise _damaged(Path(path), f"tensor {name} is cut off")
    return tensors


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"not a whole safetensors file: {reason}", where=str(path), fix="delete it and run dvc repro")
