"""A LoRA as a GGUF file: `llama-server -m base.gguf --lora adapter.gguf`.

llama.cpp adds `alpha / rank · B A x` to every matrix that the file names. Its
`llama` rotates neighbouring pairs where transformers rotates halves, and keeps
the rows of query and key matrices in that order, so the rows of their B move too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType
from torch import Tensor

from athanor.adapters import lora
from athanor.base.errors import GateError
from athanor.export.gguf_check import contents, difference_error, pair_order
from athanor.export.gguf_writer import BLOCK, Value, interleave, write_raw
from athanor.model.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def tensors(adapters: Mapping[str, Tensor], arch: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """A [rank, inputs] and B [outputs, rank] under llama.cpp's names, fp32, in file order."""
    heads = {"self_attn.q_proj": config.heads, "self_attn.k_proj": config.kv_heads}
    arrays: dict[str, np.ndarray] = {}
    for name, (a_RD, b_DR) in lora.pairs(adapters).items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if arch not in ARCHITECTURES or not match or match[2] not in BLOCK:
            raise GateError("mapped weights", f"'{name}' has no place in a {arch} file")
        b = b_DR.float().numpy()
        if arch == "llama" and match[2] in heads:
            b = interleave(b, heads[match[2]])
        arrays[f"blk.{match[1]}.{BLOCK[match[2]]}.weight.lora_a"] = a_RD.float().numpy()
        arrays[f"blk.{match[1]}.{BLOCK[match[2]]}.weight.lora_b"] = b
    return dict(sorted(arrays.items(), key=lambda item: (int(item[0].split(".")[1]), item[0])))


def write_lora(
    path: str | Path, adapters: Mapping[str, Tensor], arch: str, config: ModelConfig, alpha: float, name: str
) -> None:
    """Write the file. Equal adapters make equal bytes."""
    texts = {"general.type": "adapter", "general.name": name, "adapter.type": "lora"}
    values = {key: Value(GGUFValueType.STRING, text) for key, text in texts.items()}
    values["adapter.lora.alpha"] = Value(GGUFValueType.FLOAT32, float(alpha))
    # fp32: a few megabytes beside the model, and the sum is exact.
    write_raw(path, arch, values, tensors(adapters, arch, config), "f32")


def check_lora(path: str | Path, adapters: Mapping[str, Tensor], arch: str, config: ModelConfig, alpha: float) -> None:
    """Read a file back and compare what it says with the adapter; the rotary order is undone row by row."""
    reader = GGUFReader(Path(path))
    metadata = contents(reader)
    expected = {"general.architecture": arch, "general.type": "adapter", "adapter.type": "lora"}
    for key, value in (*expected.items(), ("adapter.lora.alpha", float(np.float32(alpha)))):
        if metadata.get(key) != value:
            raise difference_error(path, f"key '{key}' is {metadata.get(key)!r}, expected {value!r}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, factors in lora.pairs(adapters).items():
        _, _, number, module, projection = name.split(".")
        for suffix, tensor in zip(("lora_a", "lora_b"), factors, strict=True):
            array, key = tensor.float().numpy(), f"blk.{number}.{BLOCK[f'{module}.{projection}']}.weight.{suffix}"
            if arch == "llama" and suffix == "lora_b" and projection in ("q_proj", "k_proj"):
                array = array[pair_order(len(array), config.head_dim)]
            stored_tensor = stored.pop(key, None)
            if stored_tensor is None or not np.array_equal(stored_tensor.data.reshape(array.shape), array):
                raise difference_error(path, f"tensor '{key}' is not the adapter's")
    if stored:
        raise difference_error(path, f"tensor '{min(stored)}' is too many")
