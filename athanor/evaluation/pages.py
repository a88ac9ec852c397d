"""Pages to read: the battery's table, and a few answers of each category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from athanor.corpus.conversations import Item
from athanor.evaluation.report import ALL, Answer

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
    head = (
        "category", "items", first, second, "floor", "reached by", "difference", "p", "resolves", f"bits/byte {first}", second,
    )
    lines = [
        "# The battery",
        "",
        "Shares of right answers on the items for testing, with 95 % bootstrap intervals. Floor: the best answer without",
        "thought, found by a search on these items (a constant, a piece of the question, a template with one in it, a",
        "place among choices), and which one it is.",
        f"Difference: {second} - {first} on the same items; p: exact McNemar test; resolves: the smallest",
        "difference that so many items show with 80 % power at the disagreement seen here. Bits/byte: of the accepted",
        "answers.",
        "",
        _row(head),
        _row("---" for _ in head),
    ]
    for category in (*sorted(set(tables[first]) - {ALL}), ALL):
        pair = compared[category]
        spread = f"{pair['difference']:+.1%} [{pair['low']:+.1%}, {pair['high']:+.1%}]"
        resolves = "-" if pair["resolves"] is None else f"{pair['resolves']:.1%}"
        costs = [f"{gold[model][category]['bpb']:.2f}" for model in (first, second)]
        row = tables[first][category]
        scores = [_share(tables[model][category]) for model in (first, second)]
        floor = (f"{row['floor']:.1%}", row["floor_answer"])
        lines.append(_row((category, row["n"], *scores, *floor, spread, f"{pair['p']:.2g}", resolves, *costs)))
    if left_out:
        lines += ["", left_out_line(left_out)]
    similar = compared[ALL]["resolves_similar"]
    if similar is not None:
        lines += ["", f"Two models that disagree on one item in ten: these items can resolve {100 * similar:.1f} points."]
    if conditions:
        head = ("condition", "items", "score", "minus greedy", "stop")
        lines += ["", "## Ways to decode, on items for development", "", _row(head), _row("---" for _ in head)]
        for name, row in conditions.items():
            spread = f"{row['minus_greedy']['difference']:+.1%} ± {row['minus_greedy']['stderr']:.1%}"
            lines.append(_row((name, row["n"], _share(row), spread, f"{row['stop']['rate']:.1%}")))
    return "\n".join(lines) + "\n"


def left_out_line(left_out: Mapping[str, int]) -> str:
    """Which items have no score, and why; nothing if all have one."""
    counts = ", ".join(f"{category} ({count})" for category, count in left_out.items())
    why = "the machine has no system call filter (Linux, x86-64 or arm64), so code that a model wrote is not run"
    return f"Left out: {counts}; {why}." if left_out else ""


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['score']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"


def _row(cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def samples_markdown(items: Sequence[Item], answers: Sequence[Answer], per_category: int) -> str:
    """A page to read: the first `per_category` items of each category with each model's answer."""
    said = {(answer.item, answer.model): answer for answer in answers}
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
                answer = said[item.id, model]
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
    more = [f"    ({len(lines) - SAMPLE_LINES} more lines)"] if len(lines) > SAMPLE_LINES else []
    return [f"    {line[:SAMPLE_CHARS]}".rstrip() for line in lines[:SAMPLE_LINES]] + more
