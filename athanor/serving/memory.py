"""How much memory a model of the server takes, and how much all together may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from athanor.base.host import free_memory_bytes

GIB = 2**30
ENGINE_BYTES = 64 << 20  # of a process with llama.cpp, before any weight: 63 MB measured
ELEMENT_BYTES = 2  # of a key or value in fp16, llama.cpp's default
LEAST_CONTEXT = 512


def default_memory_bytes() -> int:
    """Half of the memory that is free now, the limit of a container respected."""
    return free_memory_bytes() // 2


def fit_cache(header: Mapping[str, Any], rows: int, cache_bytes: int) -> tuple[int, int, int]:
    """Tokens of context, answers at a time whose keys and values fit into `cache_bytes`, and the bytes of these.

    Fewer answers before a shorter context; one answer gets at least 512 tokens.
    """
    arch = header["general.architecture"]

    def number(name: str, default: int = 0) -> int:
        value = header.get(f"{arch}.{name}", default) if default else header[f"{arch}.{name}"]
        return int(max(value) if isinstance(value, list) else value)

    heads = number("attention.head_count")
    width = number("embedding_length") // max(heads, 1)
    keys, values = number("attention.key_length", width), number("attention.value_length", width)
    token = max(1, number("block_count") * number("attention.head_count_kv", heads) * (keys + values) * ELEMENT_BYTES)
    trained = number("context_length")
    rows = max(1, min(rows, cache_bytes // (token * trained)))
    context = min(trained, max(LEAST_CONTEXT, cache_bytes // (token * rows)))
    return context, rows, token * context * rows


def size_text(count: int) -> str:
    """A number of bytes as people read it."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
