"""Exercises with numbers: plain and worked sums, comparison, word problems.

Worked answers write out one column per line, ones first, because a small
model learns a single-digit table and a copying rule in minutes, but not a
two-digit sum in its head (plain `addition` is kept to show that).
"""

from __future__ import annotations

import random

from athanor.corpus.exercises.exercise import Exercise, Side, exact, level, numeric
from athanor.corpus.exercises.words import NAMES, THINGS

PLAIN = (
    "What is {a} + {b}?",
    "{a} + {b} =",
    "How much is {a} plus {b}?",
    "Calculate {a} + {b}. Only the result, please.",
)
WORKED_SUM = (
    "Add {a} and {b} step by step.",
    "Work out {a} + {b} and show the steps.",
    "Compute {a} + {b} column by column.",
    "Show me how to add {a} and {b}.",
)
WORKED_DIFFERENCE = (
    "Subtract {b} from {a} step by step.",
    "Work out {a} - {b} and show the steps.",
    "Compute {a} - {b} column by column.",
    "Show me how to take {b} away from {a}.",
)
LARGER = (
    "Which is larger, {x} or {y}?",
    "Which number is bigger: {x} or {y}?",
    "Give me the greater of {x} and {y}.",
    "What is the maximum of {x} and {y}?",
)
SMALLER = (
    "Which is smaller, {x} or {y}?",
    "Which number is less: {x} or {y}?",
    "Give me the lesser of {x} and {y}.",
    "What is the minimum of {x} and {y}?",
)
SIGN = (  # without the signs: the first or the last of two that are named would be right in one half
    "Which comparison sign belongs between {x} and {y}?",
    "Put the right comparison sign between {x} and {y}. Only the sign, please.",
    "Compare {x} with {y}. Answer with the sign alone.",
    "Which sign compares {x} and {y}?",
)
GAIN = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in a box. {name} puts in {b} more. How many {things} are in the box?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} is that in total?",
    "A shop sold {a} {things} in the morning and {b} in the evening. How many {things} did it sell?",
)
LOSS = (
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "There are {a} {things} in a box. {name} takes out {b}. How many {things} remain?",
    "{name} had {a} {things} and lost {b} of them. How many {things} does {name} still have?",
    "A shop had {a} {things} and sold {b}. How many {things} does it have left?",
)
STEPS = (1, 2, 3, 5, 10)
NEXT = (
    "Which number comes next: {list}?",
    "Continue the series with one number: {list}",
    "What follows {list}?",
    "Give the next number after {list}.",
)


def sum_steps(a: int, b: int) -> str:
    """The column steps of a + b, one line per column, ones first."""
    lines, carry = [], 0
    for x, y in zip(_digits(a, b), _digits(b, a), strict=True):
        total = x + y + carry
        lines.append(f"{x} + {y}{' + 1' if carry else ''} = {total}")
        carry = total // 10
    return "\n".join(lines)


def difference_steps(a: int, b: int) -> str:
    """The column steps of a - b (a >= b), one line per column, ones first; a borrow makes the column ten larger."""
    lines, borrow = [], 0
    for x, y in zip(_digits(a, b), _digits(b, a), strict=True):
        top = x - borrow
        borrow = int(top < y)
        lines.append(f"{top + 10 * borrow} - {y} = {top + 10 * borrow - y}")
    return "\n".join(lines)


def _digits(number: int, other: int) -> list[int]:
    width = max(len(str(number)), len(str(other)))
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def carries(a: int, b: int) -> int:
    """How many columns of a + b hand something on to the next; the difficulty of sums follows it."""
    count = carry = 0
    for x, y in zip(_digits(a, b), _digits(b, a), strict=True):
        carry = (x + y + carry) // 10
        count += carry
    return count


def borrows(a: int, b: int) -> int:
    """How many columns of a - b take something from the next."""
    return carries(a - b, b)


def _sum_key(a: int, b: int) -> str:
    return f"sum:{min(a, b)}+{max(a, b)}"


def _two(rng: random.Random) -> tuple[int, int]:
    return rng.randint(10, 99), rng.randint(10, 99)


def _falling(rng: random.Random) -> tuple[int, int]:
    a, b = _two(rng)
    return (max(a, b), min(a, b)) if a != b else (a + 1, b) if a < 99 else (a, b - 1)


def addition(rng: random.Random, number: int, side: Side) -> Exercise:
    a, b = _two(rng)
    return numeric(rng.choice(PLAIN).format(a=a, b=b), str(a + b), _sum_key(a, b), a + b, level(carries(a, b), 1, 2))


def worked_addition(rng: random.Random, number: int, side: Side) -> Exercise:
    a, b = _two(rng)
    reply = f"{sum_steps(a, b)}\nAnswer: {a + b}"
    return numeric(rng.choice(WORKED_SUM).format(a=a, b=b), reply, _sum_key(a, b), a + b, level(carries(a, b), 1, 2))


def worked_subtraction(rng: random.Random, number: int, side: Side) -> Exercise:
    a, b = _falling(rng)
    reply = f"{difference_steps(a, b)}\nAnswer: {a - b}"
    key, difficulty = f"difference:{a}-{b}", level(borrows(a, b), 1, 2)
    return numeric(rng.choice(WORKED_DIFFERENCE).format(a=a, b=b), reply, key, a - b, difficulty)


def comparison(rng: random.Random, number: int, side: Side) -> Exercise:
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
    ends = ((LARGER, str(high), str(low)), (SMALLER, str(low), str(high)))
    wordings, want, other = rng.choice((*ends, (SIGN, *signs), (SIGN, *signs)))
    prompt = rng.choice(wordings).format(x=first, y=second)
    # Easy where the lengths differ, hard where the first digit is the same and a later one decides.
    same = len(str(low)) == len(str(high))
    difficulty = level(same + (same and str(low)[0] == str(high)[0]), 1, 2)
    return exact(prompt, want, f"compare:{low},{high}", (other, f"{low} and {high}"), difficulty)


def word_problems(rng: random.Random, number: int, side: Side) -> Exercise:
    """One step, gain or loss, two-digit numbers; the reply names the sum and works it out by columns."""
    facts = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    if rng.random() < 0.5:
        a, b = _two(rng)
        key, sign, steps, result = _sum_key(a, b), "+", sum_steps(a, b), a + b
        wording, difficulty = rng.choice(GAIN), level(carries(a, b), 1, 2)
    else:
        a, b = _falling(rng)
        key, sign, steps, result = f"difference:{a}-{b}", "-", difference_steps(a, b), a - b
        wording, difficulty = rng.choice(LOSS), level(borrows(a, b), 1, 2)
    reply = f"{a} {sign} {b}\n{steps}\nAnswer: {result}"
    return numeric(wording.format(a=a, b=b, **facts), reply, key, result, difficulty)


def next_number(rng: random.Random, number: int, side: Side) -> Exercise:
    """The next term of a series of three with a constant step; harder with a larger step over a new ten."""
    step, start = rng.choice(STEPS), rng.randint(1, 99)
    shown, answer = [start + step * place for place in range(3)], start + 3 * step
    prompt = rng.choice(NEXT).format(list=", ".join(map(str, shown)))
    difficulty = level((step > 1) + (shown[-1] // 10 != answer // 10), 1, 2)
    return numeric(prompt, str(answer), f"series:{start}+{step}", answer, difficulty)
