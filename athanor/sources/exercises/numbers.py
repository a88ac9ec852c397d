"""Exercises with numbers: plain and worked sums, comparison, word problems, series.

Worked answers write out one column per line, ones first, because a small
model learns a single-digit table and a copying rule in minutes, but not a
two-digit sum in its head (plain `addition` is kept to show that).
"""

from __future__ import annotations

from athanor.sources.exercises.exercise import WORDS, Draw, Exercise, ask, ask_number, category, level, wording

STEPS = (1, 2, 3, 5, 10)


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


def _sum(rng: Draw) -> tuple[int, int, str, str]:
    """Two numbers, the key of their sum, and how hard it is."""
    a, b = two_numbers(rng)
    return a, b, f"sum:{min(a, b)}+{max(a, b)}", level(carries(a, b), 1, 2)


def _difference(rng: Draw) -> tuple[int, int, str, str]:
    a, b = falling_numbers(rng)
    return a, b, f"difference:{a}-{b}", level(borrows(a, b), 1, 2)


@category
def addition(rng: Draw) -> Exercise:
    a, b, key, difficulty = _sum(rng)
    return ask_number(wording(rng, "addition", a=a, b=b), str(a + b), key, difficulty, a + b)


@category
def worked_addition(rng: Draw) -> Exercise:
    a, b, key, difficulty = _sum(rng)
    reply = f"{sum_steps(a, b)}\nAnswer: {a + b}"
    return ask_number(wording(rng, "worked_addition", a=a, b=b), reply, key, difficulty, a + b)


@category
def worked_subtraction(rng: Draw) -> Exercise:
    a, b, key, difficulty = _difference(rng)
    reply = f"{difference_steps(a, b)}\nAnswer: {a - b}"
    return ask_number(wording(rng, "worked_subtraction", a=a, b=b), reply, key, difficulty, a - b)


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
    name, want, other = rng.choice((*ends, ("sign", *signs), ("sign", *signs)))
    prompt = wording(rng, name, x=first, y=second)
    # Easy where the lengths differ, hard where the first digit is the same and a later one decides.
    same = len(str(low)) == len(str(high))
    difficulty = level(same + (same and str(low)[0] == str(high)[0]), 1, 2)
    return ask(prompt, want, f"compare:{low},{high}", difficulty, (other, f"{low} and {high}"))


@category
def word_problems(rng: Draw) -> Exercise:
    """One step, gain or loss, two-digit numbers; the reply names the sum and works it out by columns."""
    name, things = rng.choice(WORDS["names"]), rng.choice(WORDS["things"])
    if rng.random() < 0.5:
        problem, sign, (a, b, key, difficulty) = "gain", "+", _sum(rng)
        steps, result = sum_steps(a, b), a + b
    else:
        problem, sign, (a, b, key, difficulty) = "loss", "-", _difference(rng)
        steps, result = difference_steps(a, b), a - b
    prompt = wording(rng, problem, a=a, b=b, name=name, things=things)
    return ask_number(prompt, f"{a} {sign} {b}\n{steps}\nAnswer: {result}", key, difficulty, result)


@category
def next_number(rng: Draw) -> Exercise:
    """The next term of a series of three with a constant step; harder with a larger step over a new ten."""
    step, start = rng.choice(STEPS), rng.randint(1, 99)
    *shown, answer = (start + step * place for place in range(4))
    prompt = wording(rng, "next_number", list=", ".join(map(str, shown)))
    difficulty = level((step > 1) + (shown[-1] // 10 != answer // 10), 1, 2)
    return ask_number(prompt, str(answer), f"series:{start}+{step}", difficulty, answer)
