"""Figures from answers: scores with floors, errors and intervals, comparisons, rates of habits. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from athanor.base.artifacts import digest
from athanor.base.errors import GateError, InputError
from athanor.evaluation import compression
from athanor.evaluation.floors import ALL, one_line, summarise
from athanor.evaluation.statistics import interval, paired, standard_error
from athanor.text import habits
from athanor.text.conversations import DIFFICULTIES, Item

REPEATS, LONGEST_NGRAM = 4, 8


@dataclass(frozen=True)
class Answer:
    """One model's answer to one item, and how it was scored."""

    item: str  # Item.id
    category: str
    model: str
    text: str
    tokens: int  # generated tokens, without the one that ended the answer
    stopped: bool  # ended by <|stop|> before the limit
    ended: bool  # ended by any control token, so not by the limit
    fake_turn: bool  # ended by a control token that opens another turn
    repeats: bool  # contains REPEATS equal n-grams in a row, n = 1..LONGEST_NGRAM
    correct: bool
    correct_norm: bool | None = None  # of a choice: by the likelihood per character
    log_likelihoods: tuple[float, ...] = ()  # nats of each choice; empty where the model spoke
    gold_bits: float = 0.0  # of the accepted answer
    gold_bytes: int = 0

    @property
    def spoken(self) -> bool:
        return not self.log_likelihoods


def repeats(ids: Sequence[int], times: int = REPEATS, longest: int = LONGEST_NGRAM) -> bool:
    """Whether some n-gram (n = 1..longest) stands `times` times in a row in `ids`."""
    for n in range(1, longest + 1):
        run = 0  # positions in a row that equal the one n before; `times` copies make n * (times - 1) of them
        for i in range(n, len(ids)):
            run = run + 1 if ids[i] == ids[i - n] else 0
            if run >= n * (times - 1):
                return True
    return False


def score_table(items: Sequence[Item], answers: Sequence[Answer], seed: int) -> dict[str, dict[str, Any]]:
    """Figures of one model by category and for "all", each beside the floor of the best thoughtless answer.

    GateError unless every item is scored exactly once: an empty or cut answer
    is a wrong one, never a missing one.
    """
    right = {answer.item: answer.correct for answer in answers}
    if len(answers) != len(items) or set(right) != {item.id for item in items}:
        raise GateError("battery", f"{len(items)} items, {len(answers)} answers scored", fix="score every item once")
    results = [right[item.id] for item in items]
    table = summarise(items, results)
    marks = grouped(answers, lambda answer: answer.correct)
    normalised = grouped((a for a in answers if a.correct_norm is not None), lambda answer: bool(answer.correct_norm))
    rows = {}
    for category, row in table.items():
        low, high = interval(marks if category == ALL else {category: marks[category]}, seed)
        rows[category] = {
            "n": row["n"],
            "correct": row["right"],
            "score": row["accuracy"],
            "stderr": row["stderr"],
            "low": low,
            "high": high,
            "floor": row["floor"],
            "floor_answer": one_line(str(row["strategy"])) or "none",
            "margin_stderrs": row["above_floor"],
            "each": [int(mark) for name in marks if category in (ALL, name) for mark in marks[name]],
        }
        if category in normalised:
            rows[category]["score_norm"] = sum(normalised[category]) / len(normalised[category])
    return rows


def grouped(answers: Iterable[Answer], value: Callable[[Answer], Any]) -> dict[str, list[Any]]:
    """A value of each answer by category, in order of item, so that two models' lists pair up."""
    groups: dict[str, list[Any]] = {}
    for answer in sorted(answers, key=lambda answer: (answer.category, answer.item)):
        groups.setdefault(answer.category, []).append(value(answer))
    return groups


def comparison(first: Sequence[Answer], second: Sequence[Answer], seed: int) -> dict[str, dict[str, Any]]:
    """second - first on the same items, by category and for "all"."""
    a, b = (grouped(answers, lambda answer: answer.correct) for answers in (first, second))
    if {answer.item for answer in first} != {answer.item for answer in second}:
        raise GateError("battery", "two models were not asked the same items", fix="ask both all of them")
    return {**{name: paired({name: a[name]}, {name: b[name]}, seed) for name in a}, ALL: paired(a, b, seed)}


def by_difficulty(items: Sequence[Item], answers: Sequence[Answer], seed: int) -> dict[str, dict[str, Any]]:
    """Share of right answers at each difficulty, items of a category together."""
    levels = {item.id: item.difficulty for item in items}
    rows = {}
    for level in DIFFICULTIES:
        marks = grouped((a for a in answers if levels[a.item] == level), lambda answer: answer.correct)
        count, right = sum(map(len, marks.values())), sum(map(sum, marks.values()))
        if count:
            low, high = interval(marks, seed)
            rows[level] = {
                "n": count,
                "score": right / count,
                "stderr": standard_error(right, count),
                "low": low,
                "high": high,
            }
    return rows


def gold_table(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Bits per UTF-8 byte of the accepted answers: it falls long before an answer is right as a whole."""
    groups = grouped(answers, lambda answer: (answer.gold_bits, answer.gold_bytes))
    groups[ALL] = [pair for pairs in groups.values() for pair in pairs]
    rows = {}
    for category, pairs in groups.items():
        gold_rate = compression.rate(*zip(*pairs, strict=True))
        each = [bits for bits, _ in pairs]
        rows[category] = {"bpb": gold_rate.bpb, "stderr": gold_rate.stderr, "n": gold_rate.documents, "each": each}
    return rows


def health(answers: Sequence[Answer]) -> dict[str, dict[str, float | int]]:
    """Shares of spoken answers with a good or bad habit, with counts and standard errors."""
    spoken = [answer for answer in answers if answer.spoken]
    return {
        "stop": share_of(answer.stopped for answer in spoken),
        "repetition": share_of(answer.repeats for answer in spoken),
        "fake_turn": share_of(answer.fake_turn for answer in spoken),
        "empty": share_of(not answer.text.strip() for answer in spoken),
        "truncated": share_of(hit_limit(answer) for answer in spoken),
        "hedge": share_of(habits.hedge_opening(answer.text) for answer in spoken),
        "refusal": share_of(habits.refusal_opening(answer.text) for answer in spoken),
        "identity_leak": share_of(habits.identity_leak(answer.text) for answer in spoken),
    }


def verbosity(answers: Sequence[Answer]) -> dict[str, float | int]:
    """The mean number of tokens of a spoken answer."""
    tokens = [answer.tokens for answer in answers if answer.spoken]
    return {"n": len(tokens), "mean_tokens": sum(tokens) / max(1, len(tokens))}


def hit_limit(answer: Answer) -> bool:
    """Whether the limit ended the answer, and no control id."""
    return not answer.ended


def truncation(answers: Sequence[Answer]) -> dict[str, dict[str, float | int]]:
    """The share of answers that the limit ended, by category."""
    return {name: share_of(marks) for name, marks in grouped((a for a in answers if a.spoken), hit_limit).items()}


def share_of(marks: Iterable[bool]) -> dict[str, float | int]:
    flags = [bool(mark) for mark in marks]
    n, count = len(flags), sum(flags)
    return {"n": n, "count": count, "rate": count / n if n else 0.0, "stderr": standard_error(count, n)}


def contamination(items: Sequence[Item], documents: Mapping[str, int], conversations: Mapping[str, int] | None) -> dict:
    """How many training texts were dropped for sharing an item's words, over all items; conversations None: not known."""
    ids = {item.id for item in items}
    dropped = {"documents_dropped": documents, "conversations_dropped": conversations}
    return {
        "items": len(ids),
        **{
            name: None if counts is None else sum(n for i, n in counts.items() if i in ids)
            for name, counts in dropped.items()
        },
        "items_touched": len(ids & (set(documents) | set(conversations or {}))),
    }


def table_rows(tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of the battery plot: a category, its floor, and each model's score with error and interval."""
    first = next(iter(tables.values()))
    return [
        {"category": category, "n": first[category]["n"], "floor": first[category]["floor"]}
        | {model: table[category]["score"] for model, table in tables.items()}
        | {
            f"{model}_{name}": table[category][name]
            for model, table in tables.items()
            for name in ("stderr", "low", "high")
        }
        for category in sorted(first, key=lambda name: (name != "all", name))
    ]


def answer_rows(
    items: Sequence[Item],
    answers: Sequence[Answer],
    documents: Mapping[str, int] | None = None,
    conversations: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Rows of battery.jsonl: every item with every model's answer, sorted by category, item and model.

    `documents` and `conversations` are how many of them were dropped from
    training for an item's sake (None: not known).
    """
    by_id = {item.id: item for item in items}
    rows = []
    for answer in sorted(answers, key=lambda answer: (answer.category, answer.item, answer.model)):
        item = by_id[answer.item]
        rows.append(
            {
                **asdict(answer),
                "kind": item.kind,
                "split": item.split,
                "difficulty": item.difficulty,
                "origin": item.origin,
                "prompt": [asdict(message) for message in item.prompt],
                "expected": item.accepted[0],
                "choices": item.choices,
                "documents_dropped": None if documents is None else documents.get(item.id, 0),
                "conversations_dropped": None if conversations is None else conversations.get(item.id, 0),
            }
        )
    return rows


def battery_facts(
    items: Sequence[Item],
    answers: Mapping[str, Sequence[Answer]],
    seed: int,
    documents: Mapping[str, int],
    conversations: Mapping[str, int] | None,
    left_out: Mapping[str, int],
) -> dict[str, Any]:
    """Blocks of the metrics. Scores, comparison and bits per byte are of the test split, rates of all answers.

    `answers` holds the models in order; the comparison is of the last with the first. `left_out`: items by category
    that this machine could not score; where there are none, nothing is said, so that all other machines write the same bytes.
    """
    tables, gold, difficulty, development = {}, {}, {}, {}
    test_answers: dict[str, list[Answer]] = {}
    test = [item for item in items if item.split == "test"]
    if not test:
        raise InputError("no item for testing", where="data/battery", fix="lower battery.development_fraction")
    dev_items = [item for item in items if item.split != "test"]
    for name, model_answers in answers.items():
        ids = {item.id for item in test}
        test_answers[name] = [answer for answer in model_answers if answer.item in ids]
        tables[name] = score_table(test, test_answers[name], seed)
        gold[name] = gold_table(test_answers[name])
        difficulty[name] = by_difficulty(test, test_answers[name], seed)
        if dev_items:
            row = score_table(dev_items, [answer for answer in model_answers if answer.item not in ids], seed)[ALL]
            development[name] = {key: row[key] for key in ("n", "correct", "score", "stderr", "low", "high", "floor")}
    first, *_, last = answers
    return {
        "battery": tables,
        "development": development,
        "difficulty": difficulty,
        "gold": gold,
        "paired": {f"{last}_minus_{first}": comparison(test_answers[first], test_answers[last], seed)},
        "health": {name: health(model_answers) for name, model_answers in answers.items()},
        "verbosity": {name: verbosity(model_answers) for name, model_answers in answers.items()},
        "truncation": {name: truncation(model_answers) for name, model_answers in answers.items()},
        "contamination": contamination(items, documents, conversations),
        **({"left_out": dict(left_out)} if left_out else {}),
    }


CLEAR_STDERRS = 2.0
GREEDY_NAME = "greedy"


def development_sample(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """At most `count` items for development that a model answers in words, drawn by seed."""
    candidates = [item for item in items if item.split == "development" and item.kind != "likelihood"]
    ranked = sorted(candidates, key=lambda item: digest([seed, item.id]))[:count]
    return sorted(ranked, key=lambda item: (item.category, item.id))


def condition_rows(
    items: Sequence[Item], answers: Mapping[str, Sequence[Answer]], seed: int
) -> dict[str, dict[str, Any]]:
    """Per condition its score, health and the paired difference to "greedy", which must be among `answers`."""
    rows = {}
    for name, condition_answers in answers.items():
        row = score_table(items, condition_answers, seed)[ALL]
        pair = comparison(answers[GREEDY_NAME], condition_answers, seed)[ALL]
        rates = health(condition_answers)
        rows[name] = {
            **{key: row[key] for key in ("n", "correct", "score", "stderr", "low", "high")},
            "minus_greedy": {key: pair[key] for key in ("difference", "stderr", "low", "high", "wins", "losses", "p")},
            **{key: rates[key] for key in ("stop", "repetition", "fake_turn", "truncated")},
        }
    return rows


def findings(rows: Mapping[str, Mapping[str, Any]], penalties: Mapping[str, float]) -> list[str]:
    """One sentence for each repetition penalty that clearly costs points."""
    sentences = []
    for name, penalty in penalties.items():
        pair = rows[name]["minus_greedy"]
        if penalty != 1 and pair["difference"] < -CLEAR_STDERRS * pair["stderr"]:
            sentences.append(
                f"condition {name}: a repetition penalty of {penalty:g} costs {-100 * pair['difference']:.1f} points "
                f"(± {100 * pair['stderr']:.1f}) against greedy on the same {rows[name]['n']} items"
            )
    return sentences
