"""The battery's gate: no figure from items that contradict their scorer, or from a scorer that cannot tell.

Every item brings answers to take and to refuse. The gate adds its own, near
the accepted answer: more text before or after it, another case, a piece of it,
another number behind it. So a scorer that looks for the answer anywhere, takes
the first number or passes everything is found on the first item it judges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from athanor.base.errors import GateError
from athanor.evaluation.scoring import CONSTANT_CODE, choose, passes_check, read_list, score_many
from athanor.text.conversations import DIFFICULTIES, ITEM_KINDS, SPLITS, Item

CODE_PROBES = 2  # items of a category whose extra answers are executed: each of them is a process
JUNK = ("Yes", "No", "I don't know.")
CASE_SENSITIVE_CHECKS = (
    "yes_no",
    "one_of",
    "each_line",
    "starts",
    "json",
)  # checks that tell capitals from small letters


def check_items(items: Sequence[Item], counts: Mapping[str, int] | None = None, workers: int = 2) -> None:
    """GateError unless every item takes its accepted answers and refuses the rejected and the planted ones.

    With `counts`, each category must also hold exactly that many items.
    """
    tasks: list[tuple[Item, str, bool]] = []
    questions: set[object] = set()
    executed: dict[str, int] = {}
    for item in items:
        where = f"{item.category}/{item.id}"
        if item.question in questions:
            raise GateError("battery", "two items ask the same question", where=where)
        questions.add(item.question)
        _check_shape(item, where)
        tasks += [(item, text, True) for text in item.accepted]
        tasks += [(item, text, False) for text in (*item.rejected, "", "  \n")]
        executed[item.category] = executed.get(item.category, 0) + 1
        if item.kind != "code" or executed[item.category] <= CODE_PROBES:
            tasks += [(item, text, expected) for text, expected in planted(item)]
        if item.kind == "likelihood":
            _check_choice(item, where)
        if item.kind == "format":
            _check_checks(item, where)
    results = score_many([task[0] for task in tasks], [task[1] for task in tasks], workers)
    for (item, text, expected), result in zip(tasks, results, strict=True):
        if result != expected:
            verdict = "refuses its accepted" if expected else "takes a rejected"
            raise GateError("battery", f"the scorer {verdict} answer {text!r}", where=f"{item.category}/{item.id}")
    for category, count in (counts or {}).items():
        actual = sum(item.category == category for item in items)
        if actual != count:
            raise GateError("battery", f"{actual} items instead of {count}", where=f"battery.categories.{category}")


def _check_shape(item: Item, where: str) -> None:
    if item.kind not in ITEM_KINDS:
        raise GateError("battery", f"unknown item kind '{item.kind}'", where=where)
    if item.difficulty not in DIFFICULTIES or item.split not in SPLITS:
        raise GateError("battery", f"difficulty '{item.difficulty}', split '{item.split}'", where=where)
    if not item.accepted or len(set(item.rejected)) < (1 if item.kind == "likelihood" else 2):
        raise GateError("battery", "an item needs one accepted and two rejected answers", where=where)
    if (item.kind == "likelihood") != bool(item.choices) or (item.kind == "format") != bool(item.checks):
        raise GateError("battery", f"choices or checks do not belong to kind '{item.kind}'", where=where)
    if item.choices and (
        item.accepted != (item.answer,) or sorted(item.choices) != sorted({*item.accepted, *item.rejected})
    ):
        raise GateError("battery", "the choices are not the accepted and the rejected answers", where=where)


def planted(item: Item) -> Iterator[tuple[str, bool]]:
    """Answers near the accepted ones and whether they are right, as far as the kind alone decides it."""
    accepted = {text.strip() for text in item.accepted}
    if item.kind == "numeric":
        yield from _number_variants(item.answer)
    variants: list[str] = []
    if item.kind in ("exact", "likelihood", "list"):
        for text in item.accepted:
            variants += [f"{text}\nx", f"x\n{text}", f"so {text}", f"{text} {text}", text[:-1], text.swapcase()]
    if item.kind == "list":
        form, elements = read_list(item.answer)
        variants += [
            _format_list(form, elements[::-1]),
            _format_list(form, (*elements, "x")),
            _format_list(form, elements[:-1]),
        ]
        variants += [
            _format_list(other, elements) for other in ("bullets", "numbered", "commas", "lines") if other != form
        ]
        # One form may read as the other: a list of one item, or an order that does not change when turned round.
        variants = [text for text in variants if read_list(text) != read_list(item.answer)]
    if item.kind == "code":
        variants += [CONSTANT_CODE, f"{item.accepted[0]}\n\n{CONSTANT_CODE}", f"{item.accepted[0]}\nf = lambda x: x"]
        variants += [f"{item.accepted[0]}\nraise SystemExit", "# " + item.accepted[0].replace("\n", "\n# ")]
    if item.kind != "format":
        variants += JUNK
    yield from ((text, False) for text in variants if text.strip() not in accepted)
    names = [check.partition(" ")[0] for check in item.checks]
    if any(name.startswith("json") for name in names):
        yield from ((f"{item.accepted[0]} x", False), (json.dumps([item.accepted[0]]), False))
    other = item.accepted[0].swapcase()
    if any(name in CASE_SENSITIVE_CHECKS for name in names):
        yield from ((text, False) for text in (other, *JUNK) if text.strip() not in accepted)


def _number_variants(answer: str) -> Iterator[tuple[str, bool]]:
    value = Decimal(answer)
    yield from ((f"{value + 1}\nAnswer: {value}", True), (f"That makes {value}.", True))
    yield from ((f"{value}\nAnswer: {value + 1}", False), (f"{value}5", False), ("a number", False))
    if value > 0:
        yield from ((f"1{value}", False), (f"-{value}", False))


def _format_list(form: str, elements: Sequence[str]) -> str:
    if form == "bullets":
        return "\n".join(f"- {element}" for element in elements)
    if form == "numbered":
        return "\n".join(f"{number}. {element}" for number, element in enumerate(elements, 1))
    return (", " if form == "commas" else "\n").join(elements)


def _check_checks(item: Item, where: str) -> None:
    """Every check has to be the only reason for which some rejected answer fails; else nothing shows that it works."""
    failed = [[check for check in item.checks if not passes_check(check, text.strip())] for text in item.rejected]
    for check in item.checks:
        if [check] not in failed:
            raise GateError("battery", f"no rejected answer fails the check '{check}' alone", where=where)


def _check_choice(item: Item, where: str) -> None:
    """Check `choose`: the likeliest choice wins at every index, by the sum or per character; the first of equals."""
    sizes = [len(choice) for choice in item.choices]
    count = len(sizes)
    cases: list[tuple[list[float], bool, int]] = []
    for index in range(count):
        cases.append(([-1.0 if other == index else -2.0 for other in range(count)], False, index))
        cases.append(([-size * (1.0 if i == index else 2.0) for i, size in enumerate(sizes)], True, index))
    cases += [([-3.0] * count, False, 0), ([-3.0 * size for size in sizes], True, 0)]
    longest, shortest = sizes.index(max(sizes)), sizes.index(min(sizes))
    if sizes[shortest] < sizes[longest]:
        # Equal per character but for a hair in favour of the longest: the sums favour the shortest.
        values = [-float(size) for size in sizes]
        values[longest] *= 0.999999
        cases += [(values, True, longest), (values, False, shortest)]
    for values, normalised, index in cases:
        chosen = choose(values, item.choices, normalised=normalised)
        if chosen != index:
            rule = "per character" if normalised else "by the sum"
            raise GateError("battery", f"choice {chosen} is taken {rule} where {index} is the likeliest", where=where)
