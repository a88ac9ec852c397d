"""The floor of a category: the best score of an answer without thought, searched on the items themselves.

An answer is without thought if it is one of these, the same for all items:
a constant (usual ones, every accepted answer, all accepted answers joined),
a piece of the question, or a template with such a piece in it. Pieces are cut
at every delimiter, at the words that many questions of the category share, and
among the numbers. Templates are the forms of a list, quotes and a fence, and
whatever is left of an accepted answer when one piece or two are taken out.
Choices are taken by their place or their length. Nothing is put into another
order, calculated or looked up by a word of the question: that is the task.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from athanor.base.errors import GateError
from athanor.evaluation.scoring import CONSTANT_CODE, NUMBER, score_many
from athanor.evaluation.statistics import standard_error
from athanor.text.conversations import Item

ALL = "all"
CONSTANTS = (
    "",
    "Yes",
    "No",
    "None",
    "I don't know.",
    *map(str, range(8)),
    "42",
    "100",
    "- a\n- b\n- c",
    CONSTANT_CODE,
)
DELIMITERS = (":", "\n", ",", ";", ".", "?", '"', "'", "`", "(", ")", "[", "]", "{", "}", "<", ">", "=", "+", "-", " ")
EDGE = " \t\n.,:;?!\"'`()[]{}"
PLACES = {"first": 0, "second": 1, "third": 2, "fourth": 3, "third last": -3, "second last": -2, "last": -1}
# A word of more than this share of a category's questions belongs to their frame. Which share tells the wordings
# from what is asked depends on the number of wordings and of words, so two are tried.
SHARED = {"rare": 0.1, "own": 0.2}
SLOTS = ("\ue000", "\ue001")
MAX_CONSTANTS = 200  # of the accepted answers, the ones that most items accept
TEMPLATES = 12  # of the templates taken from accepted answers, so many of each category are scored,
CODE_TEMPLATES = 2  # and so many of functions, each of which runs in a process
FLOOR_LIMIT, FLOOR_ITEMS = 0.5, 10
CHOICES: dict[str, Callable[[Sequence[str]], str]] = {
    "the first choice": lambda choices: choices[0],
    "the last choice": lambda choices: choices[-1],
    "the shortest choice": lambda choices: min(choices, key=len),
    "the longest choice": lambda choices: max(choices, key=len),
}


def _lined(mark: Callable[[int], str]) -> Callable[[list[str]], str]:
    return lambda parts: "\n".join(mark(place) + part for place, part in enumerate(parts, 1))


LISTS: dict[str, Callable[[list[str]], str]] = {
    "numbered": _lined(lambda place: f"{place}. "),
    "numbered with colons": _lined(lambda place: f"{place}: "),
    "in bullets": _lined(lambda place: "- "),
    "in lines": _lined(lambda place: ""),
    "with commas": ", ".join,
    "with spaces": " ".join,
}


def _places(what: str, parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from ((f"{name} {what}", parts[n]) for name, n in PLACES.items() if -len(parts) <= n < len(parts))


def pieces(text: str, shares: Mapping[str, float]) -> dict[str, str]:
    """Pieces of a question by name. `shares` tells in which share of the category's questions a word stands."""
    found = {"the question": text}
    for mark in DELIMITERS:
        if mark in text:
            parts = [part.strip(EDGE) for part in text.split(mark)]
            found |= _places(f"piece cut at {mark!r}", [part for part in parts if part])
            found[f"all behind the first {mark!r}"] = text.partition(mark)[2].strip(EDGE)
            found[f"all before the last {mark!r}"] = text.rpartition(mark)[0].strip(EDGE)
    clauses = [part.strip(EDGE) for part in re.split(r"[:?!.\n]", text)]
    found |= _places("clause", [part for part in clauses if part])
    words = [(match[0], *match.span()) for match in re.finditer(r"\w+", text)]
    for name, share in SHARED.items():
        own = [place for place, (word, _, _) in enumerate(words) if shares[word.lower()] <= share]
        runs = [place for place in own if place - 1 not in own]
        ends = [place for place in own if place + 1 not in own]
        rows = [text[words[a][1] : words[b][2]] for a, b in zip(runs, ends, strict=True)]
        found |= {
            **dict(_places(f"{name} words in a row", rows)),
            **dict(_places(f"{name} word", [words[n][0] for n in own])),
        }
        found[f"the {name} words"] = " ".join(words[place][0] for place in own)
    if numbers := NUMBER.findall(text):
        found |= _places("number", numbers)
        found |= {"the smallest number": min(numbers, key=float), "the largest number": max(numbers, key=float)}
    return found


def null_answers(items: Sequence[Item]) -> dict[str, list[str]]:
    """What each strategy says to every item of one category, all spoken or all choices. "" is said for want of a piece."""
    if items[0].choices:
        said = {name: [take(item.choices) for item in items] for name, take in CHOICES.items()}
        return said | {
            f"constant {text!r}": [text] * len(items) for text in dict.fromkeys(item.answer for item in items)
        }
    accepted = Counter(text for item in items for text in item.accepted)
    constants = dict.fromkeys((*CONSTANTS, *(text for text, _ in accepted.most_common(MAX_CONSTANTS))))
    said = {f"constant {text!r}": [text] * len(items) for text in constants}
    first = list(dict.fromkeys(item.accepted[0] for item in items))
    said |= {f"all accepted answers, joined by {mark!r}": [mark.join(first)] * len(items) for mark in ("\n", ", ", " ")}
    cut = _cut(items)
    for place, found in enumerate(cut):
        for name, text in found.items():
            for form, filled in _filled(text):
                said.setdefault(name + form, [""] * len(items))[place] = filled
    counts = Counter(key for item, found in zip(items, cut, strict=True) for key in _templates(item, found))
    most = CODE_TEMPLATES if any(item.kind == "code" for item in items) else TEMPLATES
    for (template, *names), n in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most]:
        if n > 1:
            shown = repr(re.sub("|".join(SLOTS), "_", template))
            said[f"{shown} with {' and '.join(names)}"] = [_fill(template, names, found) for found in cut]
    return said


def _cut(items: Sequence[Item]) -> list[dict[str, str]]:
    texts = ["\n".join(message.content for message in item.prompt) for item in items]
    seen = Counter(word for text in texts for word in {word.lower() for word in re.findall(r"\w+", text)})
    # A word of one question is that question's own, however few there are.
    shares = {word: (n - 1) / len(items) for word, n in seen.items()}
    return [pieces(text, shares) for text in texts]


def _filled(piece: str) -> Iterator[tuple[str, str]]:
    yield from (("", piece), (", in quotes", f'"{piece}"'), (", fenced", f"```\n{piece}\n```"))
    parts = re.split(r",\s*|\s+and\s+|\s+", piece)
    if len(parts) > 1:
        yield from ((f", {name}", form(parts)) for name, form in LISTS.items())


def _fill(template: str, names: Sequence[str], found: dict[str, str]) -> str:
    for slot, name in zip(SLOTS, names, strict=False):
        if name not in found:
            return ""
        template = template.replace(slot, found[name])
    return template


def _templates(item: Item, found: dict[str, str]) -> set[tuple[str, ...]]:
    """The first accepted answer without one piece or two: (template, names of what fills it)."""
    answer = item.accepted[0]
    able: dict[str, list[str]] = {}
    for name, text in found.items():
        if text and text != answer and text in answer:
            able.setdefault(text, []).append(name)

    def without(text: str, slot: str, template: str) -> str:
        return re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", slot, template)

    keys: set[tuple[str, ...]] = set()
    for text, names in able.items():
        one = without(text, SLOTS[0], answer)
        if one != answer:
            keys |= {(one, name) for name in names}
            for other, others in able.items():
                two = without(other, SLOTS[1], one)
                if two != one:
                    keys |= {(two, name, also) for name in names for also in others}
    return keys


def null_floors(items: Sequence[Item], workers: int = 2) -> dict[str, dict[str, float | str]]:
    """By category, and for all: {"floor": the share that the best strategy has right, "strategy": its name}.

    It is the maximum on these very items, so a little higher than on others.
    Where a category holds spoken items and choices, the best of each are
    added, and all is the best of every category: a model may have one idea for each.
    """
    return _floors(tuple(items), workers)


@functools.lru_cache(maxsize=4)  # two models are asked the same items
def _floors(items: tuple[Item, ...], workers: int) -> dict[str, dict[str, float | str]]:
    floors: dict[str, dict[str, float | str]] = {}
    rights = 0
    for category in sorted({item.category for item in items}):
        group = [item for item in items if item.category == category]
        parts = [[item for item in group if bool(item.choices) == compared] for compared in (False, True)]
        best = [_best(part, workers) for part in parts if part]
        right = sum(right for right, _ in best)
        floors[category] = {"floor": right / len(group), "strategy": "; ".join(name for right, name in best if right)}
        rights += right
    return floors | {ALL: {"floor": rights / len(items), "strategy": "the best of each category" if rights else ""}}


def _best(items: Sequence[Item], workers: int) -> tuple[int, str]:
    """How many items the best strategy has right, and its name, the first in the order of the search."""
    said = null_answers(items)
    asked = dict.fromkeys((place, text) for texts in said.values() for place, text in enumerate(texts) if text.strip())
    # What an item accepts was proved by its gate, and functions need not run again for it.
    open_ = [(place, text) for place, text in asked if text not in items[place].accepted]
    marks = score_many([items[place] for place, _ in open_], [text for _, text in open_], workers)
    right = {key for key in asked if key[1] in items[key[0]].accepted}
    right |= {key for key, mark in zip(open_, marks, strict=True) if mark}
    hits = {name: sum((place, text) in right for place, text in enumerate(texts)) for name, texts in said.items()}
    best = max(hits, key=lambda name: hits[name])
    return hits[best], best


def check_floors(items: Sequence[Item], workers: int = 2) -> None:
    """GateError for a category of the test items that an answer without thought passes for the most part.

    Fewer than FLOOR_ITEMS right answers may be chance.
    """
    test = [item for item in items if item.split == "test"]
    sizes = Counter(item.category for item in test)
    for category, row in null_floors(test, workers).items() if test else ():
        floor = float(row["floor"])
        if category != ALL and floor > FLOOR_LIMIT and round(floor * sizes[category]) >= FLOOR_ITEMS:
            raise GateError(
                "battery",
                f"an answer without thought ({row['strategy']}) is right for {floor:.0%} of {sizes[category]} items",
                where=f"battery category {category}",
                fix="ask so that no one answer or piece of the question fits most items, or leave the category out; "
                "if it is near one half, ask more of them or take another battery.seed",
            )


def one_line(name: str, width: int = 56) -> str:
    """A strategy's name for a table: bars would divide its cell, and an accepted answer may be long."""
    name = name.replace("|", "/")
    return name if len(name) <= width else f"{name[: width - 3]}..."


def summarise(items: Sequence[Item], results: Sequence[bool]) -> dict[str, dict[str, float | int | str]]:
    """By category, and for all: n, right, accuracy, stderr, floor, strategy, how many standard errors above the floor."""
    table: dict[str, dict[str, float | int | str]] = {}
    for category, floor in null_floors(items).items():
        marks = [result for item, result in zip(items, results, strict=True) if category in (ALL, item.category)]
        accuracy, stderr = sum(marks) / len(marks), standard_error(sum(marks), len(marks))
        margin = (accuracy - float(floor["floor"])) / stderr
        table[category] = {
            "n": len(marks),
            "right": sum(marks),
            "accuracy": accuracy,
            "stderr": stderr,
            **floor,
            "above_floor": margin,
        }
    return table
