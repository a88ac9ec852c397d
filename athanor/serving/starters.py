"""Questions to begin a chat with: some that the model itself has answered, in the battery that its export was made with.

They are read beside the export, where they are of these very weights; any other model has none.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from athanor.base.artifacts import manifest_digest, read_json
from athanor.base.errors import AthanorError
from athanor.text.questions import WIDE_MARKS

EVALUATION, ANSWERS, CHAT_MODEL = Path("data/eval"), "battery.jsonl", "sft"
MOST, MOST_CHARS, LEAST_RIGHT = 4, 90, 0.5
OWN, OWN_QUESTIONS = "taught", 2  # origin of the questions of one's own conversations; so many are offered of a source
FIRST = "identity"
LIKELIHOOD, WRITTEN = "likelihood", "written"  # texts that it goes on with, and items by hand: neither is trained on
MARKS = ".?!" + WIDE_MARKS
SENTENCE = re.compile(rf"[A-Z\u0080-\U0010ffff].*[^{MARKS}][{MARKS}]")
ASKED = re.compile(rf".*[^{MARKS}][{MARKS}]")


class Topic(NamedTuple):
    """A category of the battery: how its answers are judged, whether questions like these were trained on, the share
    of right answers, and a question answered rightly."""

    name: str
    kind: str
    taught: bool
    share: float
    question: str
    own: bool = False  # of one's own conversations


def starters(path: Path) -> list[dict[str, str]]:
    """Up to four questions, each with its category; `path` is a file or folder of models/export in a checkout."""
    best_first = [topic for topic in topics(path) if topic.share >= LEAST_RIGHT and topic.question]
    # Questions of one's own; then one of each kind of answer before a second one.
    own = [topic for topic in best_first if topic.own]
    others = [topic for topic in best_first if not topic.own and SENTENCE.fullmatch(topic.question)]
    kinds = list(dict.fromkeys(topic.kind for topic in others))
    first = [next(topic for topic in others if topic.kind == kind) for kind in kinds]
    chosen = [*own[:OWN_QUESTIONS], *first, *(topic for topic in others if topic not in first)][:MOST]
    return [{"title": topic.name.replace("_", " ").capitalize(), "text": topic.question} for topic in chosen]


def checkout_of(path: Path) -> Path | None:
    """The checkout that a file or folder of models/export lies in, if its evaluation is of these very weights."""
    with suppress(AthanorError, OSError, KeyError, ValueError, AttributeError, IndexError):
        root = path.parents[2]
        lineage = read_json(path.parent / "hf" / "athanor.json")["lineage"]
        return root if lineage.get("eval") == manifest_digest(root / EVALUATION) else None
    return None


def topics(path: Path) -> tuple[Topic, ...]:
    """What the model was asked in its evaluation: one's own questions first, then itself, then what it answers best."""
    if (root := checkout_of(path)) is None:
        return ()
    try:
        return _topics(root / EVALUATION / ANSWERS, manifest_digest(root / EVALUATION))
    except (AthanorError, OSError, KeyError, ValueError, AttributeError):
        return ()


@lru_cache(maxsize=8)
def _topics(path: Path, digest: str) -> tuple[Topic, ...]:
    categories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        if (row := json.loads(line))["model"] == CHAT_MODEL:
            categories[row["category"]].append(row)
    own = {name for name, rows in categories.items() if rows[0].get("origin") == OWN}
    found = [
        Topic(
            name,
            rows[0]["kind"],
            rows[0]["kind"] != LIKELIHOOD and any(row.get("origin") != WRITTEN for row in rows),
            sum(bool(row["correct"]) for row in rows) / len(rows),
            question,
            name in own,
        )
        for name, rows in categories.items()
        for question in (_shortest(_plain(rows), OWN_QUESTIONS) if name in own else _shortest(rows, 1))
    ]
    return tuple(
        sorted(found, key=lambda topic: (topic.name not in own, topic.name != FIRST, -topic.share, topic.name))
    )


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the wordings of a question, which have one answer, that whose words most of them share: one without a slip."""
    wordings: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["correct"] and len(row["prompt"]) == 1:
            wordings[row["expected"]].append(row["prompt"][0]["content"])
    chosen = {max(same, key=_shared(same)) for same in wordings.values()}
    return [row for row in rows if row["prompt"][0]["content"] in chosen]


def _shared(texts: list[str]) -> Callable[[str], tuple[float, bool, int]]:
    words = {text: set(re.findall(r"\w+", text.casefold())) or {""} for text in texts}
    counts = Counter(word for each in words.values() for word in each)
    return lambda text: (
        sum(counts[word] - len(texts) / 2 for word in words[text]),
        bool(ASKED.fullmatch(text)),
        -len(text),
    )


def _shortest(rows: list[dict[str, Any]], most: int) -> list[str]:
    """Questions that were answered rightly, those of whole sentences first; an empty one if there is none."""
    alone = {row["prompt"][0]["content"] for row in rows if row["correct"] and len(row["prompt"]) == 1}
    fitting = [text for text in alone if len(text) <= MOST_CHARS and "\n" not in text]
    return sorted(fitting, key=lambda text: (not SENTENCE.fullmatch(text), len(text), text))[:most] or [""]
