"""What a person may want to know of a model: its card, what it was taught, and how it came to be."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.export.places import CARD, HF_DIR
from athanor.runtime.watch import FILE as HEALTH_FILE
from athanor.serving.discover import ODD, AvailableModel, materialise
from athanor.serving.files import read_bounded
from athanor.serving.starters import checkout_of, topics

CARDS = (CARD, "README.md")  # as our exports have it, and as published ones and foreign ones do
CARD_CHARS = 1 << 20
TRAINED = ("pretrain", "sft")
SHAPE = ("context_tokens", "parameters")


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
    """That of an export, of a folder, or of the folder of a file."""
    folders = (path.parent, path) if path.name == HF_DIR else (path if path.is_dir() else path.parent,)
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
