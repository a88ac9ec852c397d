"""Figures from answers: scores with floors and errors, health rates, a page of samples. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from athanor.corpus.conversations import Item
from athanor.errors import GateError
from athanor.evaluation.scoring import standard_error, summarise

REPEATS, LONGEST_NGRAM = 4, 8
ALL = "all"
SAMPLE_LINES, SAMPLE_CHARS = 20, 300  # of an answer on the page of samples


@dataclass(frozen=True)
class Answer:
    """What one model said to one item."""

    item: str  # Item.id
    category: str
    model: str
    text: str
    tokens: int  # generated tokens, without the one that ended the answer
    stopped: bool  # ended by <|stop|> before the limit
    fake_turn: bool  # ended by a control token that opens another turn
    repeats: bool  # contains REPEATS equal n-grams in a row, n = 1..LONGEST_NGRAM
    correct: bool


def repeats(ids: Sequence[int], times: int = REPEATS, longest: int = LONGEST_NGRAM) -> bool:
    """Whether some n-gram (n = 1..longest) stands `times` times in a row in `ids`."""
    for n in range(1, longest + 1):
        run = 0  # positions in a row that equal the one n before; `times` copies make n * (times - 1) of them
        for i in range(n, len(ids)):
            run = run + 1 if ids[i] == ids[i - n] else 0
            if run >= n * (times - 1):
                return True
    return False


def score_table(items: Sequence[Item], answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Figures of one model by category and for "all", each beside the floor of the best thoughtless answer.

    GateError unless every item is scored exactly once: an empty or cut answer
    is a wrong one, never a missing one.
    """
    right = {answer.item: answer.correct for answer in answers}
    if len(answers) != len(items) or set(right) != {item.id for item in items}:
        raise GateError("battery", f"{len(items)} items, {len(answers)} answers scored", fix="score every item once")
    results = [right[item.id] for item in items]
    table = summarise(items, results) | summarise([replace(item, category=ALL) for item in items], results)
    return {
        category: {
            "n": row["n"],
            "correct": row["right"],
            "score": row["accuracy"],
            "stderr": row["stderr"],
            "floor": row["floor"],
            "floor_answer": row["strategy"] if row["floor"] else "none",
            "margin_stderrs": row["above_floor"],
        }
        for category, row in table.items()
    }


def health(answers: Sequence[Answer]) -> dict[str, dict[str, float | int]]:
    """Shares of answers that stopped, repeat themselves, fake a turn or are empty, with standard errors."""
    n = len(answers)
    counts = {
        "stop": sum(answer.stopped for answer in answers),
        "repetition": sum(answer.repeats for answer in answers),
        "fake_turn": sum(answer.fake_turn for answer in answers),
        "empty": sum(not answer.text.strip() for answer in answers),
    }
    return {
        name: {"n": n, "count": count, "rate": count / n, "stderr": standard_error(count, n)}
        for name, count in counts.items()
    }


def table_rows(tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of the battery plot: a category, its floor, and each model's score and standard error."""
    first = next(iter(tables.values()))
    return [
        {"category": category, "n": first[category]["n"], "floor": first[category]["floor"]}
        | {model: table[category]["score"] for model, table in tables.items()}
        | {f"{model}_stderr": table[category]["stderr"] for model, table in tables.items()}
        for category in sorted(first)
    ]


def answer_rows(items: Sequence[Item], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Rows of battery.jsonl: every item with every model's answer, sorted by category, item and model."""
    by_id = {item.id: item for item in items}
    rows = []
    for answer in sorted(answers, key=lambda answer: (answer.category, answer.item, answer.model)):
        item = by_id[answer.item]
        prompt = [asdict(message) for message in item.prompt]
        rows.append({**asdict(answer), "kind": item.kind, "prompt": prompt, "expected": item.accepted[0]})
    return rows


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
