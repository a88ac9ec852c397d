"""The battery must not be in the training conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from athanor.base.errors import GateError
from athanor.text.conversations import Conversation, Item


def check(conversations: Mapping[str, Iterable[Conversation]], items: Sequence[Item]) -> int:
    """GateError when a held-out question stands in a conversation of any source, alone or after the same history.

    Returns the number of questions compared. Near twins are the business of
    the generators (they divide by content key) and of `clean`.
    """
    held_out = {item.prompt: item for item in items}
    compared = 0
    for name, rows in conversations.items():
        for row in rows:
            for number, message in enumerate(row.messages):
                if message.role != "user":
                    continue
                compared += 1
                item = held_out.get(row.messages[: number + 1]) or held_out.get((message,))
                if item is not None:
                    raise GateError(
                        "battery held out",
                        f"a question of the battery ({item.category}) is in the instruction source '{name}': "
                        f"{message.content[:80]!r}",
                        where=f"instruct.sources ({name})",
                        fix="remove it from the source, or reword the question",
                    )
    return compared
