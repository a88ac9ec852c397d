"""From answers to conversations, and how they are written down."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from athanor.corpus.synthetic.endpoint import Answer
from athanor.corpus.synthetic.replies import Malformed, parse
from athanor.corpus.synthetic.requests import Request
from athanor.corpus.synthetic.sift import Row
from athanor.errors import GateError
from athanor.params.synthetic import SyntheticParams

EARLY = 10  # answers without one good among them are enough to stop paying


def understood(
    params: SyntheticParams, answered: Sequence[tuple[Request, Answer]], failed: Mapping[str, str]
) -> tuple[list[Row], Counter[str]]:
    """The conversations of all answers, in the order of the requests, and the reasons for answers that hold none."""
    rows: list[Row] = []
    malformed = Counter({"no answer": len(failed)} if failed else {})
    for request, answer in answered:
        try:
            found = parse(answer, params.conversations_per_request, request.pairs)
        except Malformed as error:
            malformed[str(error)] += 1
        else:
            rows += [Row(messages, request) for messages in found]
    return rows, malformed


@dataclass
class Judge:
    """Looks at answers as they come: GateError as soon as paying for more cannot help."""

    params: SyntheticParams
    requests: int
    good: int = 0
    bad: int = 0

    def see(self, request: Request, answer: Answer) -> None:
        try:
            parse(answer, self.params.conversations_per_request, request.pairs)
        except Malformed as error:
            self.bad += 1
            allowed = self.params.gates.max_malformed_share * self.requests
            if self.bad > allowed or (self.bad >= EARLY and not self.good):
                what = f"{self.bad} of {self.bad + self.good} answers are malformed, the last: {error}"
                fix = "look at the answers, which are kept, before paying for more; then change the task or the model"
                raise GateError("malformed answers", what, where="synthetic", fix=fix) from None
        else:
            self.good += 1


def told(row: Row) -> dict[str, Any]:
    """A line of the result: `messages` for training, the rest says where they come from."""
    shown = row.request.shown
    return {
        "messages": [{"role": message.role, "content": message.content} for message in row.messages],
        "category": row.request.category,
        "request": row.request.identity,
        "document": shown and shown.document,
        "document_license": shown and shown.license,
    }


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
