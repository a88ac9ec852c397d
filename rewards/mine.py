"""Rewards of your own for `athanor side grpo`: docs/rewards.md tells how one is written and what is tried on it.

`number` is an example, used once `grpo.rewards` names it: {number: 1.0}. It wants rows with a column `answer`.
"""

import re


def number(reply: str, *, prompt: str, answer: str, **_: object) -> float:
    """1 where the last number of a reply is the right one."""
    if len(reply) > 1000 or prompt in reply:  # neither padding nor an echo is paid
        return 0.0
    found = re.findall(r"-?\d+", reply)
    return float(bool(found) and found[-1] == str(answer))


# Ten rows or more: columns, a right answer, a wrong one. Every function named here is checked before each training.
EXAMPLES = {
    "number": [
        ({"prompt": "What is 40 + 2?", "answer": "42"}, "42", "41"),
        ({"prompt": "What is 7 + 6?", "answer": "13"}, "7 + 6 = 13", "7 + 6 = 12"),
        ({"prompt": "What is 9 - 12?", "answer": "-3"}, "-3", "3"),
        ({"prompt": "What is 8 times 8?", "answer": "64"}, "It is 64.", "It is 46."),
        ({"prompt": "How many legs have two spiders?", "answer": "16"}, "2 * 8 = 16", "8 legs"),
        ({"prompt": "Which is larger, 12 or 5?", "answer": "12"}, "12", "5"),
        ({"prompt": "How many days has a week?", "answer": "7"}, "A week has 7 days.", "A week has 6 days."),
        ({"prompt": "What is half of 100?", "answer": "50"}, "100 / 2 = 50", "half of 100"),
        ({"prompt": "What is 3 times 3?", "answer": "9"}, "3 * 3 = 9", "3 * 3 = 6"),
        ({"prompt": "How many minutes has an hour?", "answer": "60"}, "60", "I don't know."),
    ]
}
UNFINISHED = ()  # names of rewards that also pay answers which were cut off, or opened another speaker's turn
