"""One tiny foreign checkpoint of each shape, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters import tiny


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("bases")
    return {kind: tiny.make_base(folder / kind, kind) for kind in ("qwen2", "qwen3", "llama")}
