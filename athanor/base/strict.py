"""Strict parameters: YAML in, frozen dataclasses out, an error for everything else.

One loader (YAML 1.2, the same rules DVC reads params.yaml with: PyYAML would
take `1e-3` for a string) and one builder that refuses unknown keys, missing
keys, wrong types and values out of range, naming the key, what is allowed and
the nearest key that exists. What people tune stands in the file; a field with a
default, which nearly everyone would write the same, may be left out of it. If
that default is a dataclass, the file names only what differs from it.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from athanor.base.artifacts import naming
from athanor.base.errors import ParamsError, suggest

T = TypeVar("T")
MAX_INTEGER = 2**63


def param(
    *,
    min: float | None = None,
    max: float | None = None,
    choices: tuple[Any, ...] | None = None,
    default: Any = dataclasses.MISSING,
) -> Any:
    """A dataclass field with a closed range or a list of choices, which may be left out if it has a default."""
    return dataclasses.field(default=default, metadata={"min": min, "max": max, "choices": choices})


def share(default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field for a share, from 0 to 1."""
    return param(min=0.0, max=1.0, default=default)


def check_file_names(names: Sequence[str], where: str) -> None:
    """ParamsError unless each of the names can be a file's, and stands there once."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ParamsError(f"'{name}' is no usable file name", where=where, fix="use letters, digits, - and _")
        if [other.lower() for other in names].count(name.lower()) > 1:  # one file where case does not count
            raise ParamsError(f"two {where} are named '{name}'", where=where, fix="rename one")


def read_yaml(path: str | Path, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Read a YAML 1.2 mapping; ParamsError for what is none: a folder, another encoding, bad syntax, a duplicate key."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    path = Path(path)
    name = shlex.quote(str(path))
    try:
        with naming(path):
            data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError("file not found", where=path, fix="restore it: git checkout params.yaml") from None
    except IsADirectoryError:
        raise ParamsError("is a folder", where=path, fix=f"mv {name} {name}.old") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "ENCODING"
        fix = f"save it as UTF-8: iconv -f {encoding} -t UTF-8 {name} > new.yaml && mv new.yaml {name}"
        raise ParamsError(f"line {line} is not UTF-8", where=path, fix=fix) from None
    except (YAMLError, ValueError, TypeError, RecursionError) as error:  # the last ones from values and nesting
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ParamsError(f"not valid YAML{line}: {why}", where=path) from None
    if data is None and may_be_empty:
        return {}
    if not isinstance(data, Mapping):
        raise ParamsError("expected a mapping, lines of 'name: value'", where=path)
    return dict(data)


def load_section(path: str | Path, section: str, schema: type[T]) -> T:
    """Read one section of a params file as `schema`."""
    data = read_yaml(path)
    if section not in data:
        raise ParamsError(f"section '{section}' is missing", where=path, fix="copy it from presets/default.yaml")
    return build(schema, data[section], section)


def build(schema: Any, value: Any, where: str) -> Any:
    """Check `value` against a type and return it converted; ParamsError names the key.

    Understands bool, int, float, str, Literal, `X | None`, tuple[X, ...],
    dict[str, X], dataclasses, and unions of dataclasses told apart by a
    `type: Literal[...]` field.
    """
    origin, args = typing.get_origin(schema), typing.get_args(schema)
    if dataclasses.is_dataclass(schema):
        return _build_dataclass(schema, value, where)
    if origin in (typing.Union, types.UnionType):
        return _build_union(args, value, where)
    if origin is typing.Literal:
        return _choice(value, args, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(value, "a list", where)
        return tuple(build(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(value, "a mapping", where)
        return {str(key): build(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if schema is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:
            raise _wrong(value, "a finite number", where)
        return float(value)
    if schema in (bool, int, str):
        # bool is a subclass of int: `layers: true` must not pass as 1.
        if type(value) is not schema or (schema is int and abs(value) >= MAX_INTEGER):
            raise _wrong(value, {bool: "true or false", int: "a whole number", str: "text"}[schema], where)
        return value
    raise _wrong(value, "a number" if schema is float else str(schema), where)


def _build_dataclass(schema: Any, value: Any, where: str, defaults: Any = None) -> Any:
    """Build a dataclass; `defaults`, if given, is an instance with the values of the keys that `value` leaves out."""
    if not isinstance(value, Mapping):
        raise _wrong(value, "a mapping", where)
    hints = typing.get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key in value:
        if key not in fields:
            raise ParamsError("unknown key", where=f"{where}.{key}", fix=suggest(key, fields, prefix=f"{where}."))
    missing = [name for name, field in fields.items() if name not in value and field.default is dataclasses.MISSING]
    if missing and defaults is None:
        what, it = ("key is missing", "it") if len(missing) == 1 else ("keys are missing", "them")
        fix = f"add {it}: docs/params.md says what is allowed, presets/default.yaml holds every section"
        raise ParamsError(what, where=f"{where}.{', .'.join(missing)}", fix=fix)
    built = {}
    for name, field in ((name, field) for name, field in fields.items() if name in value):
        key, given, default = f"{where}.{name}", value[name], field.default
        nested = dataclasses.is_dataclass(default) and isinstance(given, Mapping)
        built[name] = _build_dataclass(type(default), given, key, default) if nested else build(hints[name], given, key)
        _check_range(built[name], field.metadata, key)
    try:
        return schema(**built) if defaults is None else dataclasses.replace(defaults, **built)
    except ParamsError as error:  # a cross-field rule in __post_init__ names the key relative to its section
        raise ParamsError(error.what, where=f"{where}.{error.where}" if error.where else where, fix=error.fix) from None


def _build_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        return build(members[0], value, where)
    tags = {typing.get_args(typing.get_type_hints(member)["type"])[0]: member for member in members}
    if not isinstance(value, Mapping):
        raise _wrong(value, "a mapping", where)
    if "type" not in value:
        raise ParamsError("key is missing", where=f"{where}.type", fix=f"one of {', '.join(tags)}")
    return build(tags[_choice(value["type"], tuple(tags), f"{where}.type")], value, where)


def _check_range(value: Any, rule: Mapping[str, Any], where: str) -> None:
    if value is None:
        return
    low, high, choices = rule.get("min"), rule.get("max"), rule.get("choices")
    if choices is not None:
        _choice(value, choices, where)
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = f"from {low} to {high}" if None not in (low, high) else f"≥ {low}" if high is None else f"≤ {high}"
        raise ParamsError(f"{value} is out of range", where=where, fix=f"use a value {allowed}")


def _choice(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if value not in allowed or type(value) not in {type(item) for item in allowed}:
        fix = f"{suggest(value, allowed, cutoff=0.6)} one of {', '.join(map(str, allowed))}".strip()
        raise ParamsError(f"'{value}' is not allowed", where=where, fix=fix)
    return value


def _wrong(value: Any, expected: str, where: str) -> ParamsError:
    return ParamsError(f"expected {expected}, found {value!r:.100}", where=where)
