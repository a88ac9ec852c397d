"""Questions to begin a chat with: some that the model itself answered in the battery of its export.

They are read beside the export, where they are of these very weights; any other model has none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from athanor.base.artifacts import manifest_digest
from athanor.serving.discover import ODD
from athanor.serving.files import read_bounded
from athanor.text.questions import WIDE_MARKS

EVALUATION, ANSWERS, CHAT_MODEL = Path("data/eval"), "battery.jsonl", "sft"
MOST, MOST_CHARS, LEAST_RIGHT = 4, 90, 0.5
OWN, OWN_QUESTIONS = "taught", 2  # origin of the questions of one's own conversations; so many of a source are offered
FIRST = "identity"
LIKELIHOOD, WRITTEN = "likelihood", "written"  # texts that it goes on with, and items by hand: neither is trained on
MARKS = ".?!" + WIDE_MARKS
SENTENCE = re.compile(rf"[A-Z\u0080-\U0010ffff].*[^{MARKS}][{MARKS}]")


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
    best = [topic for topic in topics(path) if topic.share >= LEAST_RIGHT and topic.question]
    others = [topic for topic in best if not topic.own and SENTENCE.fullmatch(topic.question)]
    first = {topic.kind: topic for topic in reversed(others)}  # one of each kind of answer before a second one
    chosen = [topic for topic in best if topic.own][:OWN_QUESTIONS]
    chosen += sorted(others, key=lambda topic: first[topic.kind] is not topic)
    return [{"title": topic.name.replace("_", " ").capitalize(), "text": topic.question} for topic in chosen[:MOST]]


def checkout_of(path: Path) -> Path | None:
    """The checkout that a file or folder of models/export lies in, if its evaluation is of these very weights."""
    with suppress(*ODD):
        root = path.parents[2]
        lineage = json.loads(read_bounded(path.parent / "hf" / "athanor.json"))["lineage"]
        return root if lineage.get("eval") == manifest_digest(root / EVALUATION) else None
    return None


def topics(path: Path) -> tuple[Topic, ...]:
    """What the model was asked in its evaluation: one's own questions first, then itself, then what it answers best."""
    with suppress(*ODD):
        if (root := checkout_of(path)) is not None:
            return _topics(root / EVALUATION / ANSWERS, manifest_digest(root / EVALUATION))
    return ()


@lru_cache(maxsize=8)
def _topics(path: Path, digest: str) -> tuple[Topic, ...]:
    categories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        if (row := json.loads(line))["model"] == CHAT_MODEL:
            categories[row["category"]].append(row)
    found = []
    for name, rows in categories.items():
        origins, kind = {row.get("origin") for row in rows}, rows[0]["kind"]
        share = sum(bool(row["correct"]) for row in rows) / len(rows)
        for question in _questions(rows, OWN in origins) or [""]:
            found.append(
                Topic(name, kind, kind != LIKELIHOOD and origins != {WRITTEN}, share, question, OWN in origins)
            )
    return tuple(sorted(found, key=lambda topic: (not topic.own, topic.name != FIRST, -topic.share, topic.name)))


def _questions(rows: list[dict[str, Any]], own: bool) -> list[str]:
    """Questions answered rightly: the shortest, whole sentences first; of one's own one for each answer, and of its
    wordings the longest: others leave words or letters out."""
    wordings: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        text = row["prompt"][0]["content"]
        if row["correct"] and len(row["prompt"]) == 1 and len(text) <= MOST_CHARS and "\n" not in text:
            wordings[row["expected"] if own else ""].append(text)
    order = lambda text: (not SENTENCE.fullmatch(text), -len(text) if own else len(text), text.isupper(), text)
    return [min(texts, key=order) for texts in wordings.values()][:OWN_QUESTIONS]
