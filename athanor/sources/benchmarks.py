"""The items of public benchmarks, which decontamination searches for beside the battery's; nothing here asks them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from athanor.base.errors import InputError
from athanor.sources import huggingface
from athanor.sources.battery_params import Benchmark
from athanor.text.conversations import Item, Message


def items(benchmark: Benchmark) -> Iterator[Item]:
    """Each question with each of its answers, right or wrong: a text that has both has seen the benchmark."""
    columns = (*benchmark.question, *benchmark.answers)
    place = (benchmark.hub_id, benchmark.hub_config, benchmark.hub_split, benchmark.revision)
    number = 0
    for row in huggingface.rows_of(huggingface.open_stream(*place, columns), benchmark.hub_id, lambda: number):
        number += 1
        question = "\n".join(text for column in benchmark.question for text in texts(row[column]))
        answers = tuple(text for column in benchmark.answers for text in texts(row[column]))
        if question.strip():
            yield Item(benchmark.name, (Message("user", question),), "exact", "", answers, (), origin=benchmark.hub_id)
    if not number:
        raise InputError("no row was found", where=benchmark.hub_id, fix="correct battery.benchmarks")


def texts(value: Any) -> Iterator[str]:
    """The texts of a column: one, a list of them, or choices with their letters, which are left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts(value.get("text"))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
