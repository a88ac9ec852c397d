"""Texts that stand in files of their own: the default recipe's wordings, and templates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from athanor.base.strict import read_yaml

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "python"


@functools.cache
def recipe(name: str) -> dict[str, Any]:
    """The content of recipes/python/NAME.yaml, its lists as tuples."""
    return read_texts(RECIPE / f"{name}.yaml")


def read_texts(path: Path) -> dict[str, Any]:
    """A YAML file with its lists as tuples."""
    return {key: _frozen(value) for key, value in read_yaml(path).items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def render(path: Path, filters: Mapping[str, Callable[..., str]], **values: Any) -> str:
    """A Jinja template of plain text or Markdown, filled in; a name that is not given is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= filters
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)
