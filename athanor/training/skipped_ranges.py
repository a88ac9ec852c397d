"""The ranges of data that a run skips, as a checkpoint records them, and how a step finds its position in the data.

Positions of the data count tokens, skipped ones included; positions of
training count the tokens trained on. Schedule, curve and token counts use the
latter and never shift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SkippedRanges = Sequence[Mapping[str, Any]]


def entry(found_at: int, step: int, start: int, end: int, reason: str) -> dict[str, Any]:
    """`found_at`: the step that led to it; `step`: the first that trains on other data; [start, end) of the data."""
    return {"found": found_at, "step": step, "from": start, "to": end, "reason": reason}


def skipped_before(ranges: SkippedRanges, position: int) -> int:
    """Tokens of the data to leave out before the step that begins `position` tokens into training.

    The step reads at `position` plus these.
    """
    skipped = reached = 0
    for start, end in sorted((row["from"], row["to"]) for row in ranges):
        start = max(start, reached)  # ranges may overlap: a spike that comes back is skipped from further back
        if start < end and start <= position + skipped:
            skipped += end - start
        reached = max(reached, end)
    return skipped


def known_at(ranges: SkippedRanges, step: int) -> bool:
    """Whether a run that has come no further than `step` would have all of these rows."""
    return all(row["found"] <= step for row in ranges)
