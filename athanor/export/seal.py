"""Hashes that a file carries of itself, so that a changed byte can be named without the folder it came from.

They find accidents and edits, not forgers: who can rewrite a file can also
rewrite its hashes. What ties a file to its maker is the lineage, which
`athanor verify` compares with the data, the metrics and the Git history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from athanor.artifacts import digest

WEIGHTS, METADATA = "athanor.weights_sha256", "athanor.metadata_sha256"
SEALS = (WEIGHTS, METADATA)


def weights_seal(tensors: Iterable[tuple[str, str, tuple[int, ...], np.ndarray]]) -> str:
    """SHA-256 over the tensors as stored, by name: (name, type, shape from the outside in, bytes)."""
    checksum = hashlib.sha256()
    for name, kind, shape, data in sorted(tensors, key=lambda row: row[0]):
        checksum.update(f"{name} {kind} {list(shape)}\n".encode())
        checksum.update(memoryview(np.ascontiguousarray(data)).cast("B"))
    return checksum.hexdigest()


def metadata_seal(values: Mapping[str, Any]) -> str:
    """SHA-256 over all keys and values but the seals themselves; fp32 numbers as fp32."""
    return digest({key: _plain(value) for key, value in values.items() if key not in SEALS})


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], float):
            return np.float32(value).tolist()
        return [_plain(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value
