"""Known troubles: what is wrong with a machine or behind a message, why, and what to type.

Each is an entry of a file in known/, so one more needs no line of Python (docs/troubles.md tells how). A trouble with
`log` or `exits` is found in what a run said; one without is found by a look at the machine (world.py). An
entry brings its own example, which must find it and no other one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from athanor.base.errors import ParamsError
from athanor.base.strict import build, param, read_yaml
from athanor.troubles.world import Condition, World

KNOWN = Path(__file__).parent / "known"
BLOCKING = ("ruins", "freezes")  # these stop a training before it begins
SEVERITIES = (*BLOCKING, "stops", "slows", "note")
EXIT = r"(?:exited with|exit ?code:?|exit status|died with|Error) \(?(?:{})\b"  # DVC, torchrun, Python, make


@dataclass(frozen=True)
class Example:
    """What finds the trouble: a real message, or the part of a machine that the conditions look at.

    files: path and text. denied: files that this user may not open. cards: their architectures.
    """

    log: str = ""
    files: dict[str, str] | None = None
    denied: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    cards: tuple[str, ...] = ()
    packages: dict[str, str] | None = None
    nvidia: dict[str, str] | None = None
    settings: dict[str, str] | None = None


@dataclass(frozen=True)
class Trouble:
    """One trouble.

    severity: ruins (results), freezes (the machine, or a run without a word), stops, slows, or note.
    fix: what to type. source: where the fact comes from.
    log: expressions, one of which is found in a line. exits: or a process that ended with one of these.
    when: conditions that all hold. symptom: it follows from another failure, which is told first if it is known.
    """

    name: str
    title: str
    severity: str = param(choices=SEVERITIES)
    cause: str = ""
    fix: str = ""
    source: str = ""
    example: Example = Example()
    log: tuple[str, ...] = ()
    exits: tuple[int, ...] = ()
    when: tuple[Condition, ...] = ()
    symptom: bool = False

    def __post_init__(self) -> None:
        for key in ("cause", "fix", "source"):
            if not getattr(self, key):
                raise ParamsError("is empty", where=key, fix="say it in a sentence")
        if not (self.log or self.exits or self.when):
            raise ParamsError("nothing finds it", where="log", fix="give log, exits or when")
        for pattern in self.log:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ParamsError(f"{pattern!r} is no regular expression ({error})", where="log") from None

    @property
    def on_machine(self) -> bool:
        return not (self.log or self.exits)


class Hit(NamedTuple):
    """A trouble found in a text, and the line that told it, counted from 1."""

    trouble: Trouble
    line: int
    text: str


@functools.cache
def troubles() -> tuple[Trouble, ...]:
    """All known ones."""
    found: dict[str, Trouble] = {}
    for path in sorted(KNOWN.glob("*.yaml")):
        for name, entry in read_yaml(path).items():
            if name in found:
                raise ParamsError("two troubles have this name", where=f"{path.name}: {name}", fix="rename one")
            if not isinstance(entry, dict):
                raise ParamsError("expected a mapping", where=f"{path.name}: {name}")
            found[name] = build(Trouble, {"name": name, **entry}, f"{path.name}: {name}")
    return tuple(found.values())


def shown(world: World, among: Iterable[Trouble] | None = None) -> list[Trouble]:
    """The troubles that the machine shows; nothing is changed and nothing is computed."""
    return [
        trouble
        for trouble in (troubles() if among is None else among)
        if trouble.on_machine and all(condition.holds(world) for condition in trouble.when)
    ]


def search(text: str, world: World | None = None) -> list[Hit]:
    """The troubles that a text tells, the likeliest cause first.

    That is the one seen first, for what follows from it is seen later; a bare exit status says less than words, and
    warnings rarely end a run. Without a world (the log of another machine), conditions on it are passed over.
    """
    ranked = []
    for trouble in (trouble for trouble in troubles() if not trouble.on_machine):
        if world is not None and not all(condition.holds(world) for condition in trouble.when):
            continue
        statuses = EXIT.format("|".join(map(str, trouble.exits)))
        matches = [match for pattern in trouble.log if (match := re.search(pattern, text, re.MULTILINE))]
        rank = 2 * (trouble.severity in ("slows", "note")) + (trouble.symptom or not matches)
        if not matches and trouble.exits:
            matches = list(re.finditer(statuses, text))[:1]
        if matches:
            start = min(match.start() for match in matches)
            begin, end = text.rfind("\n", 0, start) + 1, text.find("\n", start)
            line = text[begin : None if end < 0 else end].strip()
            ranked.append(((rank, start), Hit(trouble, text.count("\n", 0, start) + 1, line)))
    return [hit for _, hit in sorted(ranked, key=lambda pair: pair[0])]
