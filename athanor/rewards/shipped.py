"""Rewards that come with the project: three for exercises, one for rows with an answer. From 0 to 1."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from athanor.base.strict import build
from athanor.evaluation.scoring import score
from athanor.rewards.form import MAX_LENGTH_FACTOR, has_form, longest
from athanor.text.conversations import Item


@cache
def item_of(text: str) -> Item:
    """Read the exercise of a row's column `item`."""
    return build(Item, json.loads(text), "item")


def correct(reply: str, item: str, **_: Any) -> float:
    """1 for an answer that has the form and that the exercise's own checker takes."""
    return form(reply, item) * score(item_of(item), reply)


def form(reply: str, item: str, **_: Any) -> float:
    """1 for the form of the accepted answers, right or wrong."""
    return float(has_form(item_of(item), reply))


def brevity(reply: str, item: str, **_: Any) -> float:
    """1 for a right answer as long as the longest accepted one, falling to 0 where its form ends; 0 for a wrong one."""
    limit = longest(item_of(item))
    excess = max(0, len(reply) - limit) / ((MAX_LENGTH_FACTOR - 1) * limit)
    return correct(reply, item) * max(0.0, 1 - excess)


def exact(reply: str, answer: Any, **_: Any) -> float:
    """1 for the text of the column `answer`, whatever the spaces between its words."""
    return float(reply.split() == str(answer).split() != [])


SHIPPED = {"correct": correct, "format": form, "brevity": brevity, "exact": exact}
