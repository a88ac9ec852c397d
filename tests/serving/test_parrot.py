"""The model that the tests of the server ask."""

from __future__ import annotations

import pytest

from athanor.corpus.conversations import Message
from athanor.decoding.generate import Sampling
from athanor.serving.chat import Chat
from athanor.serving.loading import load_export
from tests.serving.parrot import CONVERSATIONS, LONG, PLAIN, SYSTEM, WHO


@pytest.mark.parametrize("system", ["", SYSTEM])
@pytest.mark.parametrize("before", [None, PLAIN, WHO])
def test_the_exported_parrot_answers_what_it_learnt(parrot_dir, system, before):
    model, tokenizer = load_export(parrot_dir)
    # The long one once: it is ten others.
    for question, answer in [pair for pair in CONVERSATIONS if pair != LONG or not (system or before)]:
        chat = Chat(model, tokenizer, sampling=Sampling(), max_new_tokens=256, system=system)
        chat.turns = [Message("user", before[0]), Message("assistant", before[1])] if before else []
        assert "".join(chat.answer(question)) == answer
