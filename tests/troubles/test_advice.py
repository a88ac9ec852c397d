"""Each setting that an advice, an error or a trouble names by section and key exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from athanor.runtime.machine import Launch
from athanor.runtime.schema import schemas
from athanor.troubles.trouble import troubles

REPOSITORY = Path(__file__).resolve().parents[2]
SECTIONS = {**schemas(), "launch": Launch}
NAMED = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})((?:\.[a-z_]+)+)(?![\w(/]|\.\w)")
FILES = re.compile(r"\.(json|yaml|py|md|jsonl|log|safetensors|model)$")
ADVICE = {"fix", "what", "where", "command", "note"}  # names of arguments and variables


def exists(hint: Any, keys: list[str]) -> bool:
    """Return True if a path of keys leads to a value; names of entries are free in a mapping."""
    if not keys:
        return True
    if getattr(hint, "__origin__", None) is dict:
        return exists(get_args(hint)[1], keys[1:])
    hints = get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
    return any(exists(part, keys) for part in get_args(hint)) or keys[0] in hints and exists(hints[keys[0]], keys[1:])


def unknown(text: str) -> list[str]:
    found = [match for match in NAMED.finditer(text) if not FILES.search(match[0])]
    return [match[0] for match in found if not exists(SECTIONS[match[1]], match[2].split(".")[1:])]


def advice() -> Iterator[str]:
    for path in (path for top in ("athanor", "stages") for path in (REPOSITORY / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "arg", "")} | {getattr(target, "id", "") for target in getattr(node, "targets", ())}
            if names & ADVICE:
                yield from (part.value for part in ast.walk(node) if isinstance(getattr(part, "value", None), str))
    yield from (f"{trouble.cause} {trouble.fix}" for trouble in troubles())


def test_settings_that_are_named_exist() -> None:
    assert not [name for text in advice() for name in unknown(text)]
    text = "launch.processes, grpo.rewards.brevity and sft_data.sources.a.repeats, not {}; metrics/sft.json"
    assert unknown(text.format("grpo.brevity_reward")) == ["grpo.brevity_reward"]
