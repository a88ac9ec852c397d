"""Rewards as TRL calls them, and a person's file: its line in every error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from athanor.base.errors import AthanorError
from athanor.rewards.rewards import functions

FILE = """def half(reply, prompt, answer, **_):
    return 0.5 * (f"{prompt} {reply}" == answer)
def any_length(reply, **columns):
    return 1 / len(reply)
EXAMPLES = {"half": [], "any_length": []}
UNFINISHED = ["any_length"]
"""
BATCH: dict[str, Any] = {
    "prompts": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]] * 4,
    "completions": [[{"role": "assistant", "content": text}] for text in ("two", "two", "two\nUser: three", "")],
    "completion_ids": [[5, 9], [5, 5], [5, 9], []],
    "answer": ["one two"] * 4,
    "trainer_state": None,
    "log_metric": print,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_names_weights_columns_and_how_an_answer_has_to_end(file: Path) -> None:
    rewards, weights = functions({"half": 2.0, "exact": 1.0}, str(file), stop_ids={9})
    assert ([each.__name__ for each in rewards], weights) == (["half", "exact"], [2.0, 1.0])
    assert rewards[0](**BATCH) == [0.5, 0.0, 0.0, 0.0]
    assert rewards[1](**BATCH | {"answer": ["two", "two", "two", ""]}) == [1.0, 0.0, 0.0, 0.0]


def test_what_did_not_end_is_paid_where_the_file_says_so_and_errors_name_the_line(file: Path) -> None:
    (reward,), _ = functions({"any_length": 1.0}, str(file), stop_ids={9})
    three = {name: value[:3] for name, value in BATCH.items() if isinstance(value, list)}
    assert reward(**three) == [1 / 3, 1 / 3, 1 / 15]
    with pytest.raises(AthanorError, match="ZeroDivisionError") as caught:
        reward(**BATCH)
    assert caught.value.where == f"{file}:4" and "'any_length' on ''" in caught.value.what


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (FILE + "x = 1 +\n", "mine.py:1", "SyntaxError"),
        (FILE + "x = unknown\n", "mine.py:7", "unknown"),
        (FILE.replace("EXAMPLES", "EXAMPLE"), "mine.py:1", "EXAMPLES"),
        (FILE, "grpo.rewards.hal", "neither a shipped reward"),
    ],
)
def test_files_that_cannot_be_used(file: Path, text: str, where: str, what: str) -> None:
    file.write_text(text)
    with pytest.raises(AthanorError) as caught:
        functions({"hal": 1.0}, str(file))
    assert caught.value.where.endswith(where) and what in caught.value.what and caught.value.fix


def test_a_missing_column_is_named() -> None:
    (reward,), _ = functions({"correct": 1.0}, stop_ids={9})
    with pytest.raises(AthanorError, match="'item'"):
        reward(**BATCH)
