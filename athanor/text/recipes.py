"""Read texts from YAML files: the default recipe's wordings, and templates."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from athanor.base.strict import read_yaml
from athanor.base.work import Facts

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "python"


@functools.cache
def recipe(name: str) -> Facts:
    """The content of recipes/python/NAME.yaml, its lists as tuples."""
    return read_texts(RECIPE / f"{name}.yaml")


def read_texts(path: Path) -> Facts:
    """A YAML file with its lists as tuples."""
    return {key: _frozen(value) for key, value in read_yaml(path).items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
