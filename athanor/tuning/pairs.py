"""Pairs of a better and a worse answer to one prompt, in the shapes that data sets have, and the choice among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from athanor.base.errors import InputError, ParamsError
from athanor.sources import messages
from athanor.sources.addresses import is_local
from athanor.text.conversations import Message, Messages, check_messages
from athanor.text.rows import MalformedRow
from athanor.tuning.pair_params import PairsSource
from athanor.tuning.rows import Template
from athanor.words.decontaminate import ItemIndex


class Pair(NamedTuple):
    """The messages of a prompt, the better answer and the worse one."""

    prompt: Messages
    chosen: Message
    rejected: Message


def read_pairs(source: PairsSource, left_out: Counter[str]) -> Iterator[Pair]:
    """`max_rows` pairs of a source; other rows are counted by reason.

    InputError when more rows are malformed than the source tolerates, with the first of them.
    """
    if source.hub_id and not source.revision and not is_local(source.hub_id):
        raise ParamsError("the data set is not pinned", where=source.hub_id, fix="run `python -m athanor pin`")
    place = source.as_messages(*filter(None, (source.prompt, source.chosen, source.rejected)))
    rows = messages.source_rows(place)
    return messages.usable(
        place, rows, lambda row, where: parse(source, row, where), lambda why: left_out.update([why])
    )


def parse(source: PairsSource, row: Mapping[str, Any], where: str) -> Pair | str:
    """The pair of a row, or the reason for leaving it out. MalformedRow says what is wrong with the row."""
    asked = as_turns(row[source.prompt], "user") if source.prompt else []
    prompts, answers = [], []
    for column in (source.chosen, source.rejected):
        if not (turns := as_turns(row[column], "assistant")):
            return "empty"
        whole = {column: turns if len(turns) > 1 else asked + turns}
        *prompt, answer = messages.parse(source.as_messages(column), whole, where)
        if not answer.content.strip():
            return "empty"
        try:
            check_messages((*prompt, answer), where)
        except InputError as error:
            raise MalformedRow(error.what, where=error.where, fix="name the columns in params.yaml") from None
        prompts.append(tuple(prompt))
        answers.append(answer)
    if prompts[0] != prompts[1]:
        fix = "correct the row, or the columns in params.yaml"
        raise MalformedRow("chosen and rejected do not begin with the same messages", where=where, fix=fix)
    return "equal_answers" if answers[0] == answers[1] else Pair(prompts[0], *answers)


def as_turns(value: Any, role: str) -> list[Any]:
    """The messages of a column; a text is one of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value or [])


def choose(
    template: Template, pairs: Sequence[Pair], context_tokens: int, index: ItemIndex, left_out: Counter[str]
) -> Iterator[Pair]:
    """The pairs to train on, each once, those of `context_tokens` at most in the base's own tokens."""
    distinct = dict.fromkeys(pairs)
    left_out["copies"] += len(pairs) - len(distinct)
    # A pair is one text, so that its prompt counts once where n-grams of templates are told from those of items.
    texts = [(*prompt, *answers) for prompt, *answers in distinct]
    for pair, text, item in zip(distinct, texts, index.conversation_matches(texts), strict=True):
        prompt, *answers = pair
        if Pair(prompt, *answers[::-1]) in distinct:
            left_out["contradictions"] += 1
        elif template.forges(text):
            left_out["control_text"] += 1
        elif max(len(template.render((*prompt, answer))[0]) for answer in answers) > context_tokens:
            left_out["too_long"] += 1
        elif item is not None:
            left_out["battery_items"] += 1
        else:
            yield pair
