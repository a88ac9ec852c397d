"""The model that the tests of the server ask."""

from __future__ import annotations

import pytest
from athanor.serving.backends.torch_backend import open_backend

from athanor.serving.terminal import Chat
from athanor.text.conversations import Message
from tests.serving.parrot import CONVERSATIONS, LONG, PLAIN, SYSTEM, WHO


@pytest.mark.parametrize("system", ["", SYSTEM])
@pytest.mark.parametrize("before", [None, PLAIN, WHO])
def test_the_exported_parrot_answers_what_it_learnt(parrot_dir, system, before):
    backend = open_backend({"path": parrot_dir, "device": "cpu", "threads": 1, "rows": 1, "cache_bytes": 0})
    # The long one once: it is ten others.
    for question, answer in [pair for pair in CONVERSATIONS if pair != LONG or not (system or before)]:
        chat = Chat(backend, sampling={}, max_new_tokens=256, system=system)
        chat.turns = [Message("user", before[0]), Message("assistant", before[1])] if before else []
        assert "".join(chat.answer(question)) == answer
    backend.close()
