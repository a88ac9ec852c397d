"""Rewards, shipped ones and a person's own, and their form for TRL's GRPOTrainer.

A reward is a function `name(reply: str, **columns) -> float` from 0 to 1. The columns are those of the question's row,
and `prompt`, the text of its last message. A person's own are the functions of one file that its EXAMPLES name.
"""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from athanor.base.errors import InputError, ParamsError, suggest
from athanor.rewards.form import CONTROL
from athanor.rewards.params import OWN
from athanor.rewards.shipped import SHIPPED

Batch = Callable[..., list[float]]  # as TRL calls it: prompts, completions, completion_ids and columns, as lists
Row = Mapping[str, Any]
Example = tuple[Row, str, str]  # columns with the prompt, a right answer, a wrong answer


class Reward(NamedTuple):
    name: str
    function: Callable[..., float]
    file: str = "shipped rewards"
    examples: Sequence[Example] = ()
    unfinished: bool = False  # an answer that did not end, or opened another turn, is paid like others

    def pay(self, reply: str, row: Row) -> float:
        """What an answer earns. InputError with file and line where the function raises or returns no such number."""
        if CONTROL.search(reply) and not self.unfinished:
            return 0.0
        try:
            value = self.function(reply, **row)
            if not 0 <= value <= 1:
                raise ValueError(f"returned {value}, which is not from 0 to 1")
        except Exception as error:
            what = f"reward '{self.name}' on {reply!r:.80}: {error!r:.200}"
            raise InputError(what, where=_place(error, self.file), fix="see docs/rewards.md") from error
        return float(value)


def load(file: str = OWN) -> dict[str, Reward]:
    """A person's own rewards. InputError with the line where the file cannot be run."""
    try:
        names = runpy.run_path(file)
        unfinished = names.get("UNFINISHED", ())
        return {
            name: Reward(name, names[name], file, rows, name in unfinished) for name, rows in names["EXAMPLES"].items()
        }
    except Exception as error:
        raise InputError(repr(error), where=_place(error, file), fix="see docs/rewards.md") from error


def functions(
    weights: Mapping[str, float], file: str = OWN, stop_ids: Collection[int] = ()
) -> tuple[list[Batch], list[float]]:
    """Rewards in TRL's signature, and their weights, in order; names that are not shipped are functions of `file`.

    An answer earns nothing unless its last id is one of `stop_ids`. ParamsError for a name that does not exist.
    """
    known = {name: Reward(name, function) for name, function in SHIPPED.items()}
    if not known.keys() >= weights.keys():
        known = load(file) | known
    for name in weights:
        if name not in known:
            what = f"neither a shipped reward nor one with EXAMPLES in {file}"
            raise ParamsError(what, where=f"grpo.rewards.{name}", fix=suggest(name, known))
    return [_as_trl(known[name], stop_ids) for name in weights], list(weights.values())


def _as_trl(reward: Reward, stop_ids: Collection[int]) -> Batch:
    def paid(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}  # TRL adds its own state
        earned = []
        for index, ids in enumerate(completion_ids):
            row = {name: values[index] for name, values in lists.items()}
            row["prompt"] = prompts[index][-1]["content"]
            ended = reward.unfinished or (ids and ids[-1] in stop_ids)
            earned.append(reward.pay(completions[index][-1]["content"], row) if ended else 0.0)
        return earned

    paid.__name__ = reward.name
    return paid


def _place(error: Exception, file: str) -> str:
    """File with its last line that an error came through; its first for a syntax error, which names the line itself."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{[1, *lines][-1]}"
