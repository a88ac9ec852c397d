"""Texts of the default recipe: what generated conversations say, apart from the code that draws them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from athanor.params.strict import read_yaml

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "python"


@functools.cache
def recipe(name: str) -> dict[str, Any]:
    """The content of recipes/python/NAME.yaml, its lists as tuples."""
    return {key: _frozen(value) for key, value in read_yaml(FOLDER / f"{name}.yaml").items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
