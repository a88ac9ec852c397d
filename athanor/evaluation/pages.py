"""Pages to read: the battery's table, and a few answers of each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from athanor.base.templates import markdown
from athanor.evaluation.report import ALL, Answer
from athanor.text.conversations import Item

SAMPLE_LINES, SAMPLE_CHARS = 20, 300  # of an answer on the page of samples


def battery_markdown(
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]],
    compared: Mapping[str, Mapping[str, Any]],
    gold: Mapping[str, Mapping[str, Mapping[str, Any]]],
    conditions: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, int],
) -> str:
    """Scores with intervals and floors, the paired difference of the two models, bits per byte of accepted answers."""
    first, second = tables
    return markdown("athanor.evaluation", "battery.md.j2").render(
        first=first,
        second=second,
        categories=[*sorted(set(tables[first]) - {ALL}), ALL],
        tables=tables,
        compared=compared,
        gold=gold,
        conditions=conditions,
        left_out=left_out_line(left_out),
    )


def left_out_line(left_out: Mapping[str, int]) -> str:
    """Which items have no score, and why; nothing if all have one."""
    counts = ", ".join(f"{category} ({count})" for category, count in left_out.items())
    reason = "the machine has no system call filter (Linux, x86-64 or arm64), so code that a model wrote is not run"
    return f"Left out: {counts}; {reason}." if left_out else ""


def samples_markdown(items: Sequence[Item], answers: Sequence[Answer], per_category: int) -> str:
    """A page to read: the first `per_category` items of each category with each model's answer."""
    by_item_and_model = {(answer.item, answer.model): answer for answer in answers}
    models = list(dict.fromkeys(answer.model for answer in answers))
    groups: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: (item.category, item.id)):
        groups.setdefault(item.category, []).append(item)
    lines = ["# Answers to held-out prompts", ""]
    for category, group in groups.items():
        lines += [f"## {category}", ""]
        for item in group[:per_category]:
            for message in item.prompt:
                lines += [f"**{message.role}**", "", *_quoted(message.content), ""]
            lines += ["**expected**", "", *_quoted(item.accepted[0]), ""]
            for model in models:
                answer = by_item_and_model[item.id, model]
                verdict = "right" if answer.correct else "wrong"
                ending = "" if answer.stopped else ", did not stop by itself"
                lines += [f"**{model}** ({verdict}{ending})", "", *_quoted(answer.text), ""]
            lines += ["---", ""]
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    """The start of a text as an indented block: whatever a model writes, it cannot become markup."""
    if not text.strip():
        return [f"    ({len(text)} white-space characters)" if text else "    (nothing)"]
    lines = text.splitlines()
    rest = [f"    ({len(lines) - SAMPLE_LINES} more lines)"] if len(lines) > SAMPLE_LINES else []
    return [f"    {line[:SAMPLE_CHARS]}".rstrip() for line in lines[:SAMPLE_LINES]] + rest
