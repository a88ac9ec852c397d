"""Questions to begin a chat with: some that the model itself has answered, in the battery that its export was made with.

They are read beside the export, where they are of these very weights; any other model has none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from athanor.base.artifacts import manifest_digest, read_json
from athanor.base.errors import AthanorError

EVALUATION, ANSWERS, CHAT_MODEL = Path("data/eval"), "battery.jsonl", "sft"
MOST, MOST_CHARS, LEAST_RIGHT = 4, 90, 0.5
FIRST = "identity"
SENTENCE = re.compile(r"[A-Z].*[^.?!][.?!]")


def starters(path: Path) -> list[dict[str, str]]:
    """Up to four questions, each with its category; `path` is a file or folder of models/export in a checkout."""
    export = path.parent
    try:
        lineage = read_json(export / "hf" / "athanor.json")["lineage"]
        evaluation = export.parents[1] / EVALUATION
        if lineage.get("eval") != manifest_digest(evaluation):
            return []
        return [dict(row) for row in _answered(evaluation / ANSWERS, lineage["eval"])]
    except (AthanorError, OSError, KeyError, ValueError, AttributeError, IndexError):
        return []


@lru_cache(maxsize=8)
def _answered(path: Path, digest: str) -> tuple[dict[str, str], ...]:
    categories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        if (row := json.loads(line))["model"] == CHAT_MODEL:
            categories[row["category"]].append(row)
    rights = {name: sum(bool(row["correct"]) for row in rows) / len(rows) for name, rows in categories.items()}
    best_first = sorted(categories, key=lambda name: (name != FIRST, -rights[name], name))
    chosen: dict[str, str] = {}
    kinds: set[str] = set()  # of answers: one question of each before a second one
    for again in (False, True):
        for name in best_first:
            kind = categories[name][0]["kind"]
            question = _shortest(categories[name])
            if rights[name] < LEAST_RIGHT or not question or name in chosen or (kind in kinds and not again):
                continue
            if len(chosen) < MOST:
                chosen[name] = question
                kinds.add(kind)
    return tuple({"title": name.replace("_", " ").capitalize(), "text": text} for name, text in chosen.items())


def _shortest(rows: list[dict[str, Any]]) -> str:
    """A question of one sentence or more that was answered rightly; "" if there is none."""
    alone = (row["prompt"][0]["content"] for row in rows if row["correct"] and len(row["prompt"]) == 1)
    fitting = [text for text in alone if len(text) <= MOST_CHARS and SENTENCE.fullmatch(text)]
    return min(fitting, key=lambda text: (len(text), text), default="")
