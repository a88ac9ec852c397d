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
from athanor.evaluation.scoring import CONSTANT_CODE, NUMBER, number_value, score_many
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
EDGE_CHARS = " \t\n.,:;?!\"'`()[]{}"
POSITIONS = {"first": 0, "second": 1, "third": 2, "fourth": 3, "third last": -3, "second last": -2, "last": -1}
# A word of more than this share of a category's questions belongs to their frame. Which share tells the wordings
# from what is asked depends on the number of wordings and of words, so two are tried.
MAX_WORD_SHARE = {"rare": 0.1, "own": 0.2}
PLACEHOLDERS = ("\ue000", "\ue001")
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


def _line_per_part(prefix: Callable[[int], str]) -> Callable[[list[str]], str]:
    return lambda parts: "\n".join(prefix(number) + part for number, part in enumerate(parts, 1))


LISTS: dict[str, Callable[[list[str]], str]] = {
    "numbered": _line_per_part(lambda number: f"{number}. "),
    "numbered with colons": _line_per_part(lambda number: f"{number}: "),
    "in bullets": _line_per_part(lambda number: "- "),
    "in lines": _line_per_part(lambda number: ""),
    "with commas": ", ".join,
    "with spaces": " ".join,
}


def _by_position(kind: str, segments: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from (
        (f"{name} {kind}", segments[index])
        for name, index in POSITIONS.items()
        if -len(segments) <= index < len(segments)
    )


def pieces(text: str, shares: Mapping[str, float]) -> dict[str, str]:
    """Pieces of a question by name. `shares` tells in which share of the category's questions a word stands."""
    named = {"the question": text}
    for delimiter in DELIMITERS:
        if delimiter in text:
            segments = [segment.strip(EDGE_CHARS) for segment in text.split(delimiter)]
            named |= _by_position(f"piece cut at {delimiter!r}", [segment for segment in segments if segment])
            named[f"all behind the first {delimiter!r}"] = text.partition(delimiter)[2].strip(EDGE_CHARS)
            named[f"all before the last {delimiter!r}"] = text.rpartition(delimiter)[0].strip(EDGE_CHARS)
    clauses = [segment.strip(EDGE_CHARS) for segment in re.split(r"[:?!.\n]", text)]
    named |= _by_position("clause", [segment for segment in clauses if segment])
    words = [(match[0], *match.span()) for match in re.finditer(r"\w+", text)]
    for name, share in MAX_WORD_SHARE.items():
        rare_indices = [index for index, (word, _, _) in enumerate(words) if shares[word.lower()] <= share]
        starts = [index for index in rare_indices if index - 1 not in rare_indices]
        ends = [index for index in rare_indices if index + 1 not in rare_indices]
        runs = [text[words[start][1] : words[end][2]] for start, end in zip(starts, ends, strict=True)]
        named |= {
            **dict(_by_position(f"{name} words in a row", runs)),
            **dict(_by_position(f"{name} word", [words[n][0] for n in rare_indices])),
        }
        named[f"the {name} words"] = " ".join(words[index][0] for index in rare_indices)
    if numbers := NUMBER.findall(text):
        named |= _by_position("number", numbers)
        by_value = {"key": lambda number: number_value(number) or 0}
        named |= {"the smallest number": min(numbers, **by_value), "the largest number": max(numbers, **by_value)}
    return named


def null_answers(items: Sequence[Item]) -> dict[str, list[str]]:
    """Each strategy's answer to every item of one category, all spoken or all choices; "" where it finds no piece."""
    if items[0].choices:
        answers = {name: [pick(item.choices) for item in items] for name, pick in CHOICES.items()}
        return answers | {
            f"constant {text!r}": [text] * len(items) for text in dict.fromkeys(item.answer for item in items)
        }
    accepted = Counter(text for item in items for text in item.accepted)
    constants = dict.fromkeys((*CONSTANTS, *(text for text, _ in accepted.most_common(MAX_CONSTANTS))))
    answers = {f"constant {text!r}": [text] * len(items) for text in constants}
    first_answers = list(dict.fromkeys(item.accepted[0] for item in items))
    answers |= {
        f"all accepted answers, joined by {separator!r}": [separator.join(first_answers)] * len(items)
        for separator in ("\n", ", ", " ")
    }
    pieces_by_item = _pieces_of_items(items)
    for index, item_pieces in enumerate(pieces_by_item):
        for name, text in item_pieces.items():
            for form, formatted in _forms_of(text):
                answers.setdefault(name + form, [""] * len(items))[index] = formatted
    counts = Counter(
        key for item, item_pieces in zip(items, pieces_by_item, strict=True) for key in _templates(item, item_pieces)
    )
    max_templates = CODE_TEMPLATES if any(item.kind == "code" for item in items) else TEMPLATES
    for (template, *names), count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:max_templates]:
        if count > 1:
            shown = repr(re.sub("|".join(PLACEHOLDERS), "_", template))
            answers[f"{shown} with {' and '.join(names)}"] = [
                _fill_template(template, names, item_pieces) for item_pieces in pieces_by_item
            ]
    return answers


def _pieces_of_items(items: Sequence[Item]) -> list[dict[str, str]]:
    texts = ["\n".join(message.content for message in item.prompt) for item in items]
    question_counts = Counter(word for text in texts for word in {word.lower() for word in re.findall(r"\w+", text)})
    # A word of one question is that question's own, however few there are.
    shares = {word: (count - 1) / len(items) for word, count in question_counts.items()}
    return [pieces(text, shares) for text in texts]


def _forms_of(piece: str) -> Iterator[tuple[str, str]]:
    yield from (("", piece), (", in quotes", f'"{piece}"'), (", fenced", f"```\n{piece}\n```"))
    elements = re.split(r",\s*|\s+and\s+|\s+", piece)
    if len(elements) > 1:
        yield from ((f", {name}", form(elements)) for name, form in LISTS.items())


def _fill_template(template: str, names: Sequence[str], item_pieces: dict[str, str]) -> str:
    for placeholder, name in zip(PLACEHOLDERS, names, strict=False):
        if name not in item_pieces:
            return ""
        template = template.replace(placeholder, item_pieces[name])
    return template


def _templates(item: Item, item_pieces: dict[str, str]) -> set[tuple[str, ...]]:
    """The first accepted answer without one piece or two: (template, names of what fills it)."""
    answer = item.accepted[0]
    names_by_text: dict[str, list[str]] = {}
    for name, text in item_pieces.items():
        if text and text != answer and text in answer:
            names_by_text.setdefault(text, []).append(name)

    def without(text: str, placeholder: str, template: str) -> str:
        return re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", placeholder, template)

    keys: set[tuple[str, ...]] = set()
    for text, names in names_by_text.items():
        one_cut = without(text, PLACEHOLDERS[0], answer)
        if one_cut != answer:
            keys |= {(one_cut, name) for name in names}
            for other_text, other_names in names_by_text.items():
                two_cut = without(other_text, PLACEHOLDERS[1], one_cut)
                if two_cut != one_cut:
                    keys |= {(two_cut, name, other_name) for name in names for other_name in other_names}
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
    all_right = 0
    for category in sorted({item.category for item in items}):
        group = [item for item in items if item.category == category]
        subsets = [[item for item in group if bool(item.choices) == compared] for compared in (False, True)]
        best = [_best(subset, workers) for subset in subsets if subset]
        right = sum(right for right, _ in best)
        floors[category] = {"floor": right / len(group), "strategy": "; ".join(name for right, name in best if right)}
        all_right += right
    return floors | {
        ALL: {"floor": all_right / len(items), "strategy": "the best of each category" if all_right else ""}
    }


def _best(items: Sequence[Item], workers: int) -> tuple[int, str]:
    """How many items the best strategy has right, and its name, the first in the order of the search."""
    answers = null_answers(items)
    distinct = dict.fromkeys(
        (index, text) for texts in answers.values() for index, text in enumerate(texts) if text.strip()
    )
    # What an item accepts was proved by its gate, and functions need not run again for it.
    unproved = [(index, text) for index, text in distinct if text not in items[index].accepted]
    results = score_many([items[index] for index, _ in unproved], [text for _, text in unproved], workers)
    right = {key for key in distinct if key[1] in items[key[0]].accepted}
    right |= {key for key, result in zip(unproved, results, strict=True) if result}
    hits = {name: sum((index, text) in right for index, text in enumerate(texts)) for name, texts in answers.items()}
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
        subset = [result for item, result in zip(items, results, strict=True) if category in (ALL, item.category)]
        accuracy, stderr = sum(subset) / len(subset), standard_error(sum(subset), len(subset))
        stderrs_above = (accuracy - float(floor["floor"])) / stderr
        table[category] = {
            "n": len(subset),
            "right": sum(subset),
            "accuracy": accuracy,
            "stderr": stderr,
            **floor,
            "above_floor": stderrs_above,
        }
    return table
