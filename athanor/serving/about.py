"""What a person may want to know of a model: its card, how it came to be, and what its own evaluation says of it.

That is read beside the export, where it is of these very weights: what the model was taught, and questions to begin with.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from athanor.base.artifacts import manifest_digest, read_json
from athanor.catalog.discover import ODD, AvailableModel, materialise
from athanor.catalog.files import FACTS_FILE, read_bounded, read_object
from athanor.catalog.places import CARD, HF_DIR
from athanor.runtime.watch import FILE as HEALTH_FILE
from athanor.text.questions import WIDE_MARKS

CARDS = (CARD, "README.md")  # as our exports have it, and as published ones and foreign ones do
CARD_CHARS = 1 << 20
TRAINED = ("pretrain", "sft")
SHAPE = ("context_tokens", "parameters")
EVALUATION, ANSWERS, CHAT_MODEL = Path("data/eval"), "battery.jsonl", "sft"
MOST, MOST_CHARS, LEAST_RIGHT = 4, 90, 0.5
FIRST, OWN = "identity", "taught"  # the category that asks about the model; origin of one's own conversations
LIKELIHOOD, WRITTEN = "likelihood", "written"  # texts that it continues, and items by hand: neither is trained on
MARKS = ".?!" + WIDE_MARKS
SENTENCE = re.compile(rf"[A-Z\u0080-\U0010ffff].*[^{MARKS}][{MARKS}]")


def about(root: Path, model: AvailableModel) -> dict[str, Any]:
    """The card as Markdown, the topics of its evaluation, its commit, and what the monitor said of its training.

    Each is empty where it is not known: of a model from elsewhere there may be the card alone.
    """
    path = Path(model.path)
    with suppress(*ODD):  # then the card is missing, too
        materialise(root, model)
    checkout = checkout_of(path)
    health = {stage: _of_run(checkout, stage, f"files/{HEALTH_FILE}").get("status") for stage in TRAINED}
    return {
        "card": _card(path),
        "topics": [topic._asdict() for topic in topics(path)],
        "commit": model.fetch or str(_of_run(checkout, "export", "meta.json").get("commit", "")),
        "health": health if checkout else {},
    }


def _card(path: Path) -> str:
    """That of an export, or of the folder of a file, or of a folder."""
    folders = (path.parent, path) if path.name == HF_DIR or path.suffix == ".gguf" else (path,)
    for file in (folder / name for folder in folders for name in CARDS):
        with suppress(*ODD):
            return read_bounded(file).decode(errors="replace")[:CARD_CHARS]
    return ""


def _of_run(checkout: Path | None, stage: str, name: str) -> dict[str, Any]:
    """A file of the run that made what the checkout has of a stage; empty where that ran on another machine."""
    with suppress(*ODD):
        run = read_json(checkout / "metrics" / "runs" / f"{stage}.json")["run"]
        return dict(read_json(checkout / ".athanor" / "runs" / str(run) / name))
    return {}


# -- its evaluation ---------------------------------------------------------------------------------------


class Topic(NamedTuple):
    """A category of the battery: how its answers are judged, whether questions like these were trained on, the share
    of right answers, and a question answered rightly."""

    name: str
    kind: str
    taught: bool
    share: float
    question: str
    own: bool  # of one's own conversations


def starters(path: Path) -> list[dict[str, str]]:
    """Up to four questions, each with its category; `path` is a file or folder of models/export in a checkout."""
    best = [topic for topic in topics(path) if topic.share >= LEAST_RIGHT]
    best = [topic for topic in best if (topic.own and topic.question) or SENTENCE.fullmatch(topic.question)]
    first = {topic.kind: topic for topic in reversed(best)}  # one of each kind of answer before a second one
    chosen = sorted(best, key=lambda topic: (not topic.own, first[topic.kind] is not topic))[:MOST]
    return [{"title": topic.name.replace("_", " ").capitalize(), "text": topic.question} for topic in chosen]


def checkout_of(path: Path) -> Path | None:
    """The checkout that a file or folder of models/export lies in, if its evaluation is of these very weights."""
    with suppress(*ODD):
        root = path.parents[2]
        lineage = read_object(path.parent / HF_DIR / FACTS_FILE)["lineage"]
        return root if lineage.get("eval") == manifest_digest(root / EVALUATION) else None
    return None


def topics(path: Path) -> tuple[Topic, ...]:
    """What the model was asked in its evaluation: one's own questions first, then itself, then what it answers best."""
    with suppress(*ODD):
        if root := checkout_of(path):
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
        right = [row["prompt"][0]["content"] for row in rows if row["correct"] and len(row["prompt"]) == 1]
        texts = [text for text in right if len(text) <= MOST_CHARS and "\n" not in text]
        # Of one's own questions the longest: other wordings leave words or letters out.
        texts.sort(key=len, reverse=(own := OWN in origins))
        question = next(filter(SENTENCE.fullmatch, texts), texts[0] if texts else "")
        share = sum(bool(row["correct"]) for row in rows) / len(rows)
        found.append(Topic(name, kind, kind != LIKELIHOOD and origins != {WRITTEN}, share, question, own))
    return tuple(sorted(found, key=lambda topic: (not topic.own, topic.name != FIRST, -topic.share, topic.name)))
