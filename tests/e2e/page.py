"""Pages of the documentation whose commands are run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    heading: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks, each with the heading it stands under."""
    found, heading = [], ""
    for match in re.finditer(r"(?ms)^## (.*?)$|^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8")):
        heading = match[1] or heading
        if match[1] is None:
            found.append(Block(heading, match[2], match[3]))
    return found


def promised(command: str) -> int:
    """The exit status that the page promises in a comment."""
    said = re.search(r"# exit status (\d+)", command)
    return int(said[1]) if said else 0
