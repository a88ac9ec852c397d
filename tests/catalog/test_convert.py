"""Conversions to GGUF: made again for other weights, and those in use stay."""

from __future__ import annotations

import asyncio
import os

from athanor.catalog import convert
from athanor.catalog.discover import described
from tests.evaluation.tiny import make_model, save, write_tiny_tokenizer


def test_other_weights_are_converted_again_and_files_in_use_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "KEPT", 1)
    monkeypatch.setattr(convert, "RECENT_SECONDS", 0)
    tokenizer, base = write_tiny_tokenizer(tmp_path / "models/tokenizer"), tmp_path / "models/base"

    def made(seed: int, *used):
        save(base, make_model(tokenizer, seed=seed), tokenizer)
        os.utime(base / "config.json", (1, 1))  # as DVC leaves it, since its content is the same
        return asyncio.run(convert.gguf_of(tmp_path, described(base, "export", ""), used))

    first = made(0)
    second = made(1, first)
    assert first.is_file() and first.read_bytes() != second.read_bytes()
    third = made(2, second)
    assert [path for path in (first, second, third) if path.is_file()] == [second, third]
