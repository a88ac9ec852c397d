"""The gate of a person's own rewards: their examples first, then the attacks of attacks.yaml."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from athanor.base.errors import GateError
from athanor.base.strict import read_yaml
from athanor.rewards.params import OWN
from athanor.rewards.rewards import Example, Reward, Row, load

MIN_EXAMPLES = 10


def check(file: str = OWN) -> None:
    """GateError unless every reward of the file passes, InputError for one that fails."""
    for reward in load(file).values():
        check_reward(reward)


def check_reward(reward: Reward) -> None:
    """Attack a reward on the row of each example.

    GateError where the right answer earns no more than the wrong one, or a cheat the middle between them or more.
    """
    if len(reward.examples) < MIN_EXAMPLES or len({right for _, right, _ in reward.examples}) == 1:
        raise _refusal(reward, "has too few examples", f"write {MIN_EXAMPLES}, with different right answers")
    for columns, right, wrong in reward.examples:
        most, least = _earned(reward, columns, right), _earned(reward, columns, wrong)
        if most <= least:
            what = f"pays {most:.3g} for the right {right!r:.80} and {least:.3g} for the wrong {wrong!r:.80}"
            raise _refusal(reward, what, "a right answer has to earn more")
        for cheat, reply, fix in attacks(columns, right, reward.examples):
            if (paid := _earned(reward, columns, reply)) >= (most + least) / 2:
                raise _refusal(reward, f"pays {paid:.3g} for {cheat}: {reply!r:.80}, in place of {right!r:.80}", fix)


def attacks(columns: Row, right: str, examples: Sequence[Example]) -> Iterator[tuple[str, str, str]]:
    """Cheats for a row as name, reply and fix. A right answer of an example with equal columns is none."""
    answers = [text for _, text, _ in examples]
    accepted = {text.strip() for row, text, _ in examples if row == columns}
    others = [text for text in dict.fromkeys(answers) if text.strip() not in accepted]
    values = {
        "prompt": columns.get("prompt", ""),
        "right": right,
        "constant": max(answers, key=answers.count),
        "other": (others or ["no"])[0],
        "others": " ".join(others),
        "numbers": " ".join(f"{number}" for number in range(101) if f"{number}" != right),
        "digits": right.translate(str.maketrans("0123456789", "1234567890")),
        "copies": f"{right} " * 1000,
        "long": "I will think about it. " * 1000,
        "nines": "9" * 5000,  # more than int() reads
    }
    for cheat, table in read_yaml(Path(__file__).with_name("attacks.yaml")).items():
        for template in table["replies"]:
            reply = Template(template).substitute(values)
            if reply.strip() not in accepted:
                yield cheat, reply, table["fix"]


def _earned(reward: Reward, columns: Row, reply: str) -> float:
    """What an answer earns. GateError where it earns something else when asked again, or the columns are changed."""
    given = copy.deepcopy(columns)
    first, second = (reward.pay(reply, given) for _ in range(2))
    if (first, given) != (second, columns):
        what = f"pays {first:.3g} and then {second:.3g}, or changes its columns, for {reply!r:.80}"
        raise _refusal(reward, what, "use nothing but the reply and the columns, and change neither")
    return first


def _refusal(reward: Reward, what: str, fix: str) -> GateError:
    return GateError("rewards", f"{reward.name} {what}", where=reward.file, fix=f"{fix}; see docs/rewards.md")
