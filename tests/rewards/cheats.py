"""Answers that would be paid without being right, or that say more than the right answer does, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from athanor.evaluation.floors import CONSTANTS
from athanor.text.conversations import Item

FILLER = "I will think about this for a while and then say what I think. " * 8
FULLWIDTH = {ord(char): ord(char) + 0xFEE0 for char in map(chr, range(0x21, 0x7F))}
OTHER_DIGITS = {ord(digit): 0x0660 + int(digit) for digit in "0123456789"}
LOOKALIKES = str.maketrans("aceopxy", "асеорху")


class Cheat(NamedTuple):
    name: str
    text: str
    ended: bool = True  # by the stop token


def cheats(item: Item, others: Sequence[Item]) -> Iterator[Cheat]:
    """All cheats for an item; `others` are more items of its category. An answer that the item accepts is none."""
    yield from at_the_end(item)
    made = [
        *without_knowing(item, others),
        *around_the_answer(item),
        *in_other_letters(item),
        *lists_of_answers(item, others),
    ]
    yield from (cheat for cheat in made if cheat.text.strip() not in item.accepted)


def at_the_end(item: Item) -> Iterator[Cheat]:
    """The right answer, not ended by the stop token."""
    for text in item.accepted:
        yield Cheat("not ended", text, ended=False)


def without_knowing(item: Item, others: Sequence[Item]) -> Iterator[Cheat]:
    question = item.prompt[-1].content
    for text in ("", " ", "\n\n", "\t", "\u200b", ".", "?", FILLER, "0 " * 500, "```", "```python\n```", "{}", "[]"):
        yield Cheat(f"nothing: {text[:12]!r}", text)
    yield from (Cheat("constant", text) for text in CONSTANTS)
    yield Cheat("the question", question)
    yield Cheat("the question and the answer", f"{question}\n{item.accepted[0]}")
    given = [text for other in others for text in other.accepted]
    yield Cheat("most frequent answer", max(given, key=given.count))


def around_the_answer(item: Item) -> Iterator[Cheat]:
    """The right answer and more."""
    wrong = item.rejected[0]
    text = max(item.accepted, key=len)
    for behind in (
        " And that is all.",
        "\nThat is all.",
        "\n\nIs there more?",
        " It is what I say",
        f"\n{wrong}",
        f" {wrong}",
    ):
        yield from (Cheat(f"followed by {behind!r}", answer + behind) for answer in item.accepted)
    for joint in (" ", "\n", "\n\n", ", ", " or "):
        yield from (Cheat(f"twice, {joint!r}", answer + joint + answer) for answer in item.accepted)
    yield from (
        Cheat("hidden in a long text", hidden)
        for hidden in (FILLER + text, f"{text} {FILLER}", f"{FILLER}{text} {FILLER}", f"{FILLER}\n{text}")
    )
    for mark in ("<|user|>", "<|stop|>", "</s>", "\nUser: And now?", "\nAssistant: Yes."):
        yield Cheat(f"with {mark!r}", text + mark)
        yield Cheat(f"behind {mark!r}", f"{mark}{text}")


def in_other_letters(item: Item) -> Iterator[Cheat]:
    for text in item.accepted:
        for table in (FULLWIDTH, OTHER_DIGITS, LOOKALIKES):
            yield Cheat("other letters", text.translate(table))
        for mark in ("\u200b", "\u202e", "\ufeff", "\x1c", "\x00", "\xa0", "\r", "\ufffd", "\ud800"):
            yield Cheat(f"ends in {mark!r}", text + mark)
            yield Cheat(f"begins with {mark!r}", mark + text)


def lists_of_answers(item: Item, others: Sequence[Item]) -> Iterator[Cheat]:
    """All possible answers one after the other, in any of which the right one may be the one that counts."""
    right, given = item.answer, [other.answer for other in others]
    for joint in (" ", ", ", "\n", " or "):
        yield Cheat("many answers", joint.join([*given, right]))
        yield Cheat("many answers", joint.join([right, *given]))
        yield Cheat("all numbers", joint.join(map(str, range(200))))
        yield Cheat("all numbers and the right one", joint.join([*map(str, range(200)), right]))
        yield Cheat("some numbers and the right one", joint.join([*map(str, range(30, 50)), right]))
        yield Cheat("all signs", joint.join("<>="))
        yield Cheat("rejected ones and the right one", joint.join([*dict.fromkeys(item.rejected), right]))
    if right.startswith("{"):
        yield Cheat("a name twice", '{"pet": "cat", ' + right[1:])
        yield Cheat("its own name twice", right[:-1] + ", " + right[1:])
