"""Exercises with numbers: sums, comparison, word problems.

Worked answers write out one column per line, ones first, because a small
model learns a single-digit table and a copying rule in minutes, but not a
two-digit sum in its head (in the first default 3 % of them were right).
"""

from __future__ import annotations

from typing import NamedTuple

from athanor.sources.exercises.exercise import WORDS, Draw, Exercise, ask, ask_number, category, level, wording


def sum_steps(a: int, b: int) -> str:
    """The column steps of a + b, one line per column, ones first."""
    lines, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        lines.append(f"{x} + {y}{' + 1' if carry else ''} = {total}")
        carry = total // 10
    return "\n".join(lines)


def difference_steps(a: int, b: int) -> str:
    """The column steps of a - b (a >= b), one line per column, ones first; a borrow makes the column ten larger."""
    lines, borrow = [], 0
    for x, y in _columns(a, b):
        top = x - borrow
        borrow = int(top < y)
        lines.append(f"{top + 10 * borrow} - {y} = {top + 10 * borrow - y}")
    return "\n".join(lines)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of both numbers by column, ones first."""
    width = len(str(max(a, b)))
    return [(int(x), int(y)) for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True)]


def carries(a: int, b: int) -> int:
    """How many columns of a + b hand something on to the next; the difficulty of sums follows it."""
    count = carry = 0
    for x, y in _columns(a, b):
        carry = (x + y + carry) // 10
        count += carry
    return count


def borrows(a: int, b: int) -> int:
    """How many columns of a - b take something from the next."""
    return carries(a - b, b)


def two_numbers(rng: Draw) -> tuple[int, int]:
    return rng.randint(10, 99), rng.randint(10, 99)


def falling_numbers(rng: Draw) -> tuple[int, int]:
    """Two numbers, the larger one first."""
    a, b = two_numbers(rng)
    return (max(a, b), min(a, b)) if a != b else (a + 1, b) if a < 99 else (a, b - 1)


class Problem(NamedTuple):
    """Two numbers, their sum or difference with its steps, its content key and its difficulty."""

    a: int
    b: int
    sign: str
    result: int
    steps: str
    key: str
    difficulty: str

    @property
    def worked(self) -> str:
        return f"{self.steps}\nAnswer: {self.result}"


def _sum(rng: Draw) -> Problem:
    return _sum_of(*two_numbers(rng))


def _sum_of(a: int, b: int) -> Problem:
    return Problem(a, b, "+", a + b, sum_steps(a, b), f"sum:{min(a, b)}+{max(a, b)}", level(carries(a, b), 1, 2))


def _difference(rng: Draw) -> Problem:
    a, b = falling_numbers(rng)
    return Problem(a, b, "-", a - b, difference_steps(a, b), f"difference:{a}-{b}", level(borrows(a, b), 1, 2))


def _exercise(rng: Draw, name: str, problem: Problem, reply: str, /, **values: str) -> Exercise:
    return ask_number(
        wording(rng, name, a=problem.a, b=problem.b, **values), reply, problem.key, problem.difficulty, problem.result
    )


@category
def addition(rng: Draw) -> Exercise:
    """A sum as people type it, in one line if both numbers have one digit, else worked out by columns."""
    digits = rng.choice(((1, 1), (1, 2), (2, 2)))
    a, b = sorted((rng.randint(10 ** (size - 1), 10**size - 1) for size in digits), key=lambda _: rng.random())
    problem = _sum_of(a, b)
    return _exercise(rng, "addition", problem, problem.steps if digits == (1, 1) else problem.worked)


@category
def worked_addition(rng: Draw) -> Exercise:
    problem = _sum(rng)
    return _exercise(rng, "worked_addition", problem, problem.worked)


@category
def worked_subtraction(rng: Draw) -> Exercise:
    problem = _difference(rng)
    return _exercise(rng, "worked_subtraction", problem, problem.worked)


@category
def comparison(rng: Draw) -> Exercise:
    """Two numbers of up to three digits, more often than not of equal length; either may stand first.

    One half of the questions asks for the sign between them, the others for the larger or the smaller, so that no end,
    no place and no sign answers more than a quarter.
    """
    digits = rng.choice((1, 2, 2, 3, 3, 3))
    x = rng.randint(10 ** (digits - 1), 10**digits - 1)
    other = digits if rng.random() < 0.7 else rng.choice((1, 2, 3))
    y = rng.randint(10 ** (other - 1), 10**other - 1)
    if x == y:
        y += 1
    low, high = sorted((x, y))
    first, second = (low, high) if rng.random() < 0.5 else (high, low)
    signs = ("<", ">") if first < second else (">", "<")
    ends = (("larger", str(high), str(low)), ("smaller", str(low), str(high)))
    name, answer, other = rng.choice((*ends, ("sign", *signs), ("sign", *signs)))
    prompt = wording(rng, name, x=first, y=second)
    # Easy where the lengths differ, hard where the first digit is the same and a later one decides.
    equal_lengths = len(str(low)) == len(str(high))
    difficulty = level(equal_lengths + (equal_lengths and str(low)[0] == str(high)[0]), 1, 2)
    return ask(prompt, answer, f"compare:{low},{high}", difficulty, (other, f"{low} and {high}"))


@category
def word_problems(rng: Draw) -> Exercise:
    """One step, gain or loss, two-digit numbers; the reply names the sum and works it out by columns."""
    values = {"name": rng.choice(WORDS["names"]), "things": rng.choice(WORDS["things"])}
    template, problem = ("gain", _sum(rng)) if rng.random() < 0.5 else ("loss", _difference(rng))
    return _exercise(rng, template, problem, f"{problem.a} {problem.sign} {problem.b}\n{problem.worked}", **values)
