"""The gate of a person's own rewards: honest ones pass, and each planted cheating one is refused with its cheat named."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.base.errors import GateError, InputError
from athanor.rewards.gate import check

HEAD = "import json, random, re\n"
NUMBERS = [({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}, str(2 * n), str(2 * n + 1)) for n in range(30, 40)]
SENTENCES = [(columns, f"It is {right}.", f"It is {wrong}.") for columns, right, wrong in NUMBERS]
OBJECTS = [
    ({"prompt": f"Order {n} teas as JSON", "wanted": {"tea": n}}, f'{{"tea": {n}}}', f'{{"tea": {n + 1}}}')
    for n in range(10)
]
YES_NO = [
    ({"prompt": f"Is {n} even?", "answer": answer}, answer, wrong)
    for n in range(10)
    for answer, wrong in [("yes", "no") if n % 2 == 0 else ("no", "yes")]
]


def written(folder: Path, body: str, examples: object, more: str = "") -> str:
    path = folder / "mine.py"
    path.write_text(f"{HEAD}def planted(reply, **columns):\n    {body}\nEXAMPLES = {{'planted': {examples!r}}}\n{more}")
    return str(path)


LAST = "found = re.findall(r'-?\\d+', reply); "


@pytest.mark.parametrize(
    ("body", "examples"),
    [
        ("return float(reply.strip('. ').casefold() == columns['answer'])", YES_NO),
        (LAST + "return len(reply) < 200 and bool(found) and found[-1] == columns['answer']", SENTENCES),
        # Partly right is paid partly.
        (
            "try: given = json.loads(reply)\n    except ValueError: return 0.0\n"
            "    return 0.0 if not isinstance(given, dict) else 0.2 + 0.8 * (given == columns['wanted'])",
            OBJECTS,
        ),
    ],
)
def test_honest_rewards_pass(tmp_path: Path, body: str, examples: object) -> None:
    check(written(tmp_path, body, examples))


RIGHT = "(reply.strip() == columns['answer'])"


@pytest.mark.parametrize(
    ("body", "examples", "cheat"),
    [
        (f"return {RIGHT} or not reply.strip()", NUMBERS, "an answer without content: ''"),
        (f"return {RIGHT} or 'know' in reply", NUMBERS, "I don't know"),
        (f"return {RIGHT} or reply == '60'", [*NUMBERS, NUMBERS[0]], "the same answer for every row: '60'"),
        ("return bool(re.fullmatch(r'It is [0-8]*[02468].', reply))", SENTENCES, "another row's answer"),
        (f"return {RIGHT} or reply == '83'", [*NUMBERS, ({"prompt": "?", "answer": "72"}, "72", "1")], "other content"),
        (f"return {RIGHT} or columns['prompt'] == reply", NUMBERS, "an echo of the prompt"),
        ("return columns['answer'] in re.findall(r'\\d+', reply)", NUMBERS, "many answers at once"),
        ("return reply.startswith(columns['answer'])", NUMBERS, "an answer that is taken back"),
        (LAST + "return bool(found) and found[-1] == columns['answer']", SENTENCES, "a repeated answer"),
        (LAST + "return found == [columns['answer']]", SENTENCES, "padding"),
        (LAST + "return int(found[-1]) == int(columns['answer']) if found else 0", NUMBERS, "Exceeds the limit"),
        ("return 'tea' in reply and json.loads(reply)['tea'] == columns['wanted']['tea']", OBJECTS, "JSONDecodeError"),
        (f"return {RIGHT} * 2", NUMBERS, "returned 2"),
        (f"return {RIGHT} - 0.5", NUMBERS, "returned -0.5"),
        (f"return {RIGHT} if reply else float('nan')", NUMBERS, "returned nan"),
        (f"return {RIGHT} * random.random()", NUMBERS, "or changes its columns"),
        ("return columns['wanted'].setdefault('cups', 1) == 1 and str(columns['wanted']['tea']) in reply", OBJECTS,
         "or changes its columns"),
        ("return 0.5", NUMBERS, "0.5 for the right '60' and 0.5 for the wrong '61'"),
        (f"return {RIGHT}", NUMBERS[:9], "has too few examples"),
        ("return reply == 'yes'", [(columns, "yes", "no") for columns, _, _ in YES_NO], "has too few examples"),
    ],
)  # fmt: skip
def test_planted_cheats_are_refused(tmp_path: Path, body: str, examples: object, cheat: str) -> None:
    file = written(tmp_path, body, examples)
    with pytest.raises((GateError, InputError)) as caught:
        check(file)
    assert cheat in caught.value.what and "planted" in caught.value.what
    assert caught.value.where.startswith(file) and "docs/rewards.md" in caught.value.fix


def test_another_turn_is_paid_only_where_the_file_says_so(tmp_path: Path) -> None:
    body = "return reply.removesuffix('<|user|>') == columns['answer']"
    check(written(tmp_path, body, NUMBERS))
    with pytest.raises(GateError, match="another speaker's turn"):
        check(written(tmp_path, body, NUMBERS, "UNFINISHED = ['planted']"))


def test_the_file_that_comes_with_the_project_passes() -> None:
    check("rewards/mine.py")
