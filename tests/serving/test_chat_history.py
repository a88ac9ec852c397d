"""A conversation: pieces of text as they are made, and a history that is always what training could have seen."""

from __future__ import annotations

import pytest

from athanor.base.errors import AthanorError
from athanor.serving.backends.base import prepare
from athanor.serving.backends.torch_backend import TorchBackend
from athanor.serving.terminal import Chat
from athanor.text.conversations import Message
from athanor.tokenizer.chat import prompt_ids, render
from athanor.tokenizer.tokenizer import Tokenizer
from tests.evaluation.tiny import always_says, make_model, silence


def chat_with(model, tokenizer, **options):
    backend = TorchBackend(model, tokenizer, {"max_new_tokens": 8}, rows=1, cache_bytes=0)
    return Chat(backend, **{"sampling": {}, "max_new_tokens": 8} | options)


def test_a_character_in_several_tokens_arrives_whole(tokenizer):
    # No piece for this character, so it is spelled in bytes.
    spelled = tokenizer.encode("\U0001f702")
    assert len(spelled) == 4
    for count in range(1, 5):
        model = make_model(tokenizer)
        chat = chat_with(model, tokenizer)
        chat.backend.tokenizer = Spelling(tokenizer, spelled[:count])
        pieces = list(chat.answer("hello"))
        text = tokenizer.decode(spelled[:count])
        assert "".join(pieces).startswith(text if count == 4 else "\ufffd")
        assert all(piece for piece in pieces)


@pytest.mark.parametrize(("limit", "room"), [(400, 128), (100, 100), (128, 128)])
def test_up_to_a_quarter_of_the_context_is_kept_free_for_the_answer(tokenizer, limit, room):
    turns = [Message(role, f"{role} {n}") for n in range(200) for role in ("user", "assistant")]
    prompt = prepare(tokenizer, [*turns, Message("user", "?")], context_tokens=512, max_new_tokens=limit)
    exchange = len(prompt_ids(tokenizer, [*turns[:2], Message("user", "?")])) - len(
        prompt_ids(tokenizer, [Message("user", "?")])
    )
    assert room <= 512 - len(prompt.ids) < room + exchange + 4 and prompt.max_new_tokens == min(
        limit, 512 - len(prompt.ids)
    )
    assert 0 < prompt.forgotten < 200


class Spelling(Tokenizer):
    """The real tokenizer, except that the first ids of an answer are read as given ones."""

    def __init__(self, tokenizer, ids):
        self.real, self.left = tokenizer, list(ids)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def decode_bytes(self, ids):
        return self.real.decode_bytes([self.left.pop(0)] if self.left else ids)


def test_history_is_what_training_saw_and_forgets_the_oldest(tokenizer):
    model = silence(make_model(tokenizer, context=128), tokenizer)
    chat = chat_with(model, tokenizer, system="Be brief.")
    for number in range(12):
        "".join(chat.answer(f"question {number}"))
    assert chat.truncated and chat.tokens == 8 and 0 < chat.forgotten < 12
    assert [turn.role for turn in chat.turns] == ["user", "assistant"] * 12
    trained, _ = render(tokenizer, [Message("system", "Be brief."), *chat.turns])
    prompt = prompt_ids(tokenizer, [Message("system", "Be brief."), *chat.turns[:-1]])
    assert trained[: len(prompt)] == prompt
    chat.reset()
    assert chat.turns == [] and chat.system == "Be brief."


def test_an_answer_that_fails_or_is_stopped_leaves_a_well_formed_history(tokenizer):
    chat = chat_with(silence(make_model(tokenizer), tokenizer), tokenizer)
    "".join(chat.answer("first"))
    before = list(chat.turns)
    with pytest.raises(AthanorError, match="maximum context length"):
        list(chat.answer("word " * 500))
    assert chat.turns == before
    engine = chat.backend.engine
    right, engine.model = engine.model, None
    with pytest.raises(AthanorError, match="AttributeError"):
        list(chat.answer("second"))
    assert chat.turns == before
    engine.model = right
    pieces = chat.answer("third")
    piece = next(pieces)
    pieces.close()
    assert chat.turns == [*before, Message("user", "third"), Message("assistant", piece)]


def test_a_model_that_says_nothing(tokenizer):
    chat = chat_with(always_says(tokenizer, tokenizer.stop), tokenizer)
    assert list(chat.answer("hello")) == [] and not chat.truncated and chat.tokens == 0
    assert list(chat.answer("again")) == [] and len(chat.turns) == 4


def test_equal_seeds_repeat_a_conversation_and_turns_differ(tokenizer):
    model = silence(make_model(tokenizer), tokenizer)
    talks = []
    for seed in (1, 1, 2):
        chat = chat_with(model, tokenizer, sampling={"temperature": 4.0, "seed": seed})
        talks.append(["".join(chat.answer("hello")) for _ in range(2)])
    assert talks[0] == talks[1] != talks[2]
