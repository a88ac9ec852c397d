"""A GGUF file read back: what it holds, and whether it is a given model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, quants

from athanor.base.errors import GateError
from athanor.export.gguf_writer import K_TYPES, encode, metadata, tensor_names
from athanor.export.source import Source

# Largest error of a K-quantised matrix, as a share of its root mean square. 4 bits round weights of a bell curve by
# some 0.08, 6 bits by 0.02.
K_ERROR = 0.2


def contents(reader: GGUFReader) -> dict[str, Any]:
    """Every key of a file and its value."""
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def shape_of(tensor: ReaderTensor) -> tuple[int, ...]:
    """Dimensions from the outside in; GGUF counts them from the inside out."""
    return tuple(int(length) for length in reversed(tensor.shape))


def check_gguf(path: str | Path, source: Source, file_type: str) -> None:
    """Read a file back and compare every key and every tensor with the model; GateError names the first difference.

    The rotary order is undone row by row here, not with the code that made
    it. What llama.cpp's quantiser made is compared as numbers, within what
    its type may round.
    """
    path = Path(path)
    reader = GGUFReader(path)
    expected = {"general.architecture": source.architecture}
    expected |= {key: item.value for key, item in metadata(source, file_type).items()}
    actual = contents(reader)
    for key in sorted(set(expected) | set(actual)):
        if key not in actual or key not in expected or not _values_equal(expected[key], actual[key]):
            raise difference_error(
                path, f"key '{key}' is {_shortened(actual.get(key))}, expected {_shortened(expected.get(key))}"
            )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = tensor_names(source.config)
    if set(stored) != set(names.values()):
        unmatched = sorted(set(stored) ^ set(names.values()))
        raise difference_error(path, f"tensors missing or too many: {', '.join(unmatched[:3])}")
    for name, tensor_name in names.items():
        tensor, expected_array = stored[tensor_name], _in_file_order(source, name)
        if shape_of(tensor) != expected_array.shape or not _matches(tensor, expected_array, file_type):
            raise difference_error(path, f"tensor '{tensor_name}' is not the model's '{name}'")


def _in_file_order(source: Source, name: str) -> np.ndarray:
    """A weight with its rows in the order that the file stores them in."""
    array = source.weights[name].numpy()
    if source.architecture != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    return array[pair_order(len(array), source.config.head_dim)]


def pair_order(rows: int, head_dim: int) -> list[int]:
    """Rows of a query or key projection in the order of llama.cpp's `llama`: the two of each rotation side by side."""
    half = head_dim // 2
    heads = range(0, rows, head_dim)
    return [head + row for head in heads for pair in range(half) for row in (pair, pair + half)]


def _matches(tensor: ReaderTensor, array: np.ndarray, file_type: str) -> bool:
    if file_type not in K_TYPES or array.ndim == 1:
        data, tensor_type = encode(array, "f32" if file_type in K_TYPES else file_type)
        return tensor.tensor_type == tensor_type and tensor.data.tobytes() == data.tobytes()
    values = quants.dequantize(tensor.data, tensor.tensor_type).reshape(array.shape)
    error = float(np.square(values - array, dtype=np.float64).mean() ** 0.5)
    # Rows in another order or of another layer are off by more than the whole size of the weights.
    return error <= K_ERROR * float(np.square(array, dtype=np.float64).mean() ** 0.5)


def stored_types(path: str | Path) -> dict[str, int]:
    """How many tensors a file stores in each type."""
    type_counts = Counter(tensor.tensor_type.name.lower() for tensor in GGUFReader(Path(path)).tensors)
    return dict(sorted(type_counts.items()))


def _values_equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float):
        return np.float32(expected) == np.float32(actual)
    if isinstance(expected, list) and expected and isinstance(expected[0], float):
        return np.array_equal(np.float32(expected), np.float32(actual))
    return expected == actual


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def difference_error(path: str | Path, what: str) -> GateError:
    return GateError("GGUF read back", what, where=Path(path).name, fix="report it: the writer and the model disagree")
