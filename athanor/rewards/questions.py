"""The questions of training by reward: exercises that the battery does not hold out, or the rows of a person's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from athanor.base.errors import ParamsError
from athanor.base.strict import build
from athanor.rewards.params import GrpoDataParams
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import draw_exercises
from athanor.text import globs
from athanor.text.conversations import Message, Messages, check_messages
from athanor.text.rows import json_object


def exercise_rows(params: GrpoDataParams, battery: BatteryParams) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and row of exercises, as JSON text in `item`, none of them the battery's. Facts are few, and may repeat.

    ParamsError for a category that does not exist or cannot be trained.
    """
    for category, count in sorted(params.categories.items()):
        for exercise in draw_exercises(category, count, f"{params.seed}/grpo", False, battery):
            item = replace(exercise.item, category=category)
            if item.kind == "code":  # it would have to run for each reward, and a table of its tests' results passes
                raise ParamsError("no reward runs programs", where=f"grpo_data.categories.{category}", fix="remove it")
            row = asdict(item)
            yield exercise.key, {"prompt": [*row["prompt"]], "category": category, "item": json.dumps(row)}


def file_rows(glob: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and row of a person's files, with prompts as messages. InputError or ParamsError with the line of one without."""
    for _, path in globs.find([glob]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path}:{number}"
            row = json_object(line, where)
            prompt = row.get("prompt")
            row["prompt"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            check_messages([*build(Messages, row["prompt"], where), Message("assistant", "-")], where)
            yield str(row["prompt"]), row
