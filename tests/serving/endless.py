"""A real model that never ends an answer: what it says is decided, and stops only at a limit."""

from __future__ import annotations

from pathlib import Path

from tests.evaluation.tiny import always_says, write_tiny_tokenizer
from tests.serving.models_tiny import write_export

CONTEXT = 30_000


def write_endless(folder: Path, name: str = "endless") -> Path:
    """`folder`/hf, an export whose every answer is one word again and again, for many seconds."""
    tokenizer_dir = folder.parent / f"{folder.name}.tokenizer"
    tokenizer = write_tiny_tokenizer(tokenizer_dir)
    token = tokenizer.encode(" the")[0]
    return write_export(folder, always_says(tokenizer, token, CONTEXT), tokenizer, tokenizer_dir, name)
