"""Complete params files out of presets: short overlays, each on the default or on another preset.

An overlay names what differs from the file that its key `base` names, or from
presets/default.yaml, which is complete and never changes with params.yaml. A
list, and a table whose keys people choose (sources, categories, conditions), is
taken from the overlay as a whole, but an entry keeps of the base's entry of the
same name what it does not say.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from athanor.base.errors import ParamsError, suggest
from athanor.base.strict import read_yaml
from athanor.runtime.schema import schemas

DEFAULT = "default"
LINE = 80  # characters, as DVC has them
Key = tuple[str, ...]
Comments = dict[Key, tuple[list[str], str]]  # the lines above a key and the words behind it


def names(folder: Path) -> list[str]:
    return [path.stem for path in sorted(folder.glob("*.yaml"))]


def complete(path: Path) -> str:
    """The text of the params file that a preset stands for, laid out as DVC writes YAML, with the comments."""
    if path.stem == DEFAULT:
        return path.read_text(encoding="utf-8")
    head = ""
    comments: Comments = {}
    for file in reversed(list(_chain(path))):
        head, file_comments = _comments(file.read_text(encoding="utf-8"))
        comments |= {key: texts for key, texts in file_comments.items() if any(texts)}
    return head + _with_comments(values(path), comments)


def values(path: Path) -> dict[str, Any]:
    """What `complete` would write, as `read_yaml` reads it."""
    result: dict[str, Any] = {}
    tables = _tables()
    for file in reversed(list(_chain(path))):
        overlay = read_yaml(file)
        overlay.pop("base", None)
        result = _merged(result, overlay, tables)
    return result


def _chain(path: Path) -> Iterator[Path]:
    """A preset, the one that it is an overlay on, and so on to the default."""
    seen = [path.stem]
    while True:
        yield path
        if path.stem == DEFAULT:
            return
        base = str(read_yaml(path).get("base", DEFAULT))
        if base in seen:
            raise ParamsError(
                f"'{base}' is a base of itself", where=f"{path}: base", fix="name another preset, or none"
            )
        if base not in (known := names(path.parent)):
            raise ParamsError(f"no preset '{base}'", where=f"{path}: base", fix=suggest(base, known))
        seen.append(base)
        path = path.with_name(f"{base}.yaml")


def _tables() -> set[str]:
    """The keys under which people choose the keys: those of type dict in any section."""
    tables, pending = set(), list(schemas().values())
    while pending:
        hint = pending.pop()
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            tables |= {name for name, kind in hints.items() if typing.get_origin(kind) is dict}
            pending += hints.values()
        pending += typing.get_args(hint)
    return tables


def _merged(base: Any, overlay: Any, tables: set[str], table: bool = False) -> Any:
    if (
        isinstance(base, Mapping)
        and isinstance(overlay, Mapping)
        and overlay.get("type", base.get("type")) == base.get("type")
    ):
        merged = overlay if table else {**base, **overlay}
        return {
            key: _merged(base[key], overlay[key], tables, key in tables) if key in base and key in overlay else value
            for key, value in merged.items()
        }
    if isinstance(base, list) and isinstance(overlay, list):
        known = {item["name"]: item for item in base if isinstance(item, Mapping) and "name" in item}
        return [
            _merged(known.get(item.get("name")), item, tables) if isinstance(item, Mapping) else item
            for item in overlay
        ]
    return overlay


# -- the text -------------------------------------------------------------------------------------------------------


def _key_positions(text: str) -> Iterator[tuple[Key, int, int]]:
    """Path, line and column of every key outside lists that begins a line.

    After the column only a comment can stand; it is -1 where there is no such column on the line.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode

    pending = [((), YAML(typ="rt").compose(text))]
    while pending:
        path, node = pending.pop()
        for key, value in node.value if isinstance(node, MappingNode) and not node.flow_style else ():
            line, last = key.start_mark.line, value.end_mark
            column = (
                key.end_mark.column + 1 if value.start_mark.line > line else last.column if last.line == line else -1
            )
            yield (*path, key.value), line, column
            pending.append(((*path, key.value), value))


def _comments(text: str) -> tuple[str, Comments]:
    """The first comment, and those of each key: the lines above it and the one behind it."""
    lines = text.splitlines()
    head = "".join(f"{line}\n" for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
    comments: Comments = {}
    for path, line, column in _key_positions(text):
        above = list(itertools.takewhile(lambda text: text.lstrip().startswith("#"), reversed(lines[:line])))
        comments[path] = [text.strip() for text in reversed(above)], lines[line][column:].strip() if column >= 0 else ""
    return head, comments


def _with_comments(data: Mapping[str, Any], comments: Comments) -> str:
    from dvc.utils.serialize import dumps_yaml

    text = dumps_yaml(_styled(data, (), set(comments)))
    text = re.sub(r"(: -?\d)(e-\d+\b)", r"\1.0\2", text)  # 8e-05 is text to YAML 1.1
    lines = [[line] for line in text.splitlines()]
    for path, line, _ in _key_positions(text):
        above, behind = comments.get(path, ([], ""))
        key_line = lines[line].pop()
        indent = key_line[: len(key_line) - len(key_line.lstrip())]
        lines[line] += ["", *above] if len(path) == 1 else [indent + text for text in above]
        lines[line].append(f"{key_line:<32}  {behind}" if behind else key_line)
    return "".join(f"{line}\n" for group in lines for line in group)


def _styled(value: Any, path: Key, commented: set[Key]) -> Any:
    """Mappings for ruamel.yaml: a small one without comments goes on one line, except in lists, where DVC would undo it."""
    from ruamel.yaml.comments import CommentedMap

    if not isinstance(value, Mapping):
        return value
    result = CommentedMap((key, _styled(item, (*path, key), commented)) for key, item in value.items())
    if path and not any(isinstance(item, (Mapping, list)) for item in value.values()):
        width = 2 * len(path) + len(path[-1]) + sum(len(f"{key}: {item}, ") for key, item in value.items())
        if width < LINE and not any((*path, key) in commented for key in value):
            result.fa.set_flow_style()
    return result
