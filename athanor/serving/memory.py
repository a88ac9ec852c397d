"""How much memory a model of the server will take, and how much all together may."""

from __future__ import annotations

import contextlib
from pathlib import Path

from athanor.base.artifacts import read_json
from athanor.base.errors import AthanorError
from athanor.base.host import free_memory_bytes
from athanor.serving.discover import LLAMA_CPP, TORCH, AvailableModel
from athanor.serving.files import CONFIG

GIB = 2**30
# What a process takes before any weight: Python with llama.cpp, or with torch.
RUNTIME_BYTES, LLAMA_CPP_BYTES = 400 << 20, 150 << 20


def default_memory_bytes() -> int:
    """Half of the memory that is free now, the limit of a container respected."""
    return free_memory_bytes() // 2


def kept_rows(rows: int) -> int:
    """Of how many answers that have ended a model keeps keys and values at most, beside `rows` under way."""
    return min(rows, 8)


def estimate(model: AvailableModel, rows: int, cache_bytes: int) -> int:
    """Bytes that a model will take: weights, runtime, and the keys and values of `rows` answers, at most `cache_bytes`."""
    if model.backend == LLAMA_CPP:
        return model.bytes + LLAMA_CPP_BYTES + cache_bytes
    weights, cache = model.bytes, cache_bytes
    with contextlib.suppress(AthanorError, AttributeError, KeyError, TypeError):
        config = read_json(Path(model.path) / CONFIG)
        if "model" in config:  # a base model, as its stage wrote it
            own = config["model"]
            config = {"num_hidden_layers": own["layers"], "max_position_embeddings": own["context_tokens"]}
            config |= {"num_key_value_heads": own["kv_heads"], "head_dim": own["head_dim"], "dtype": "float32"}
        if config.get("dtype", config.get("torch_dtype")) != "float32":
            weights *= 2  # they are computed with as fp32
        rows += kept_rows(rows) if model.backend == TORCH else 0
        row = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        cache = min(cache, rows * row * config["max_position_embeddings"])
    if model.backend == TORCH:
        weights *= 2  # decoding holds the matrices of the layers a second time (model/folded.py)
    return weights + RUNTIME_BYTES + cache


def size_text(count: int) -> str:
    """A number of bytes as people read it."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
