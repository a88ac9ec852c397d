from __future__ import annotations

import random

import jinja2.sandbox
import pytest

from athanor.base.errors import InputError
from athanor.text.conversations import Message
from athanor.tokenizer import chat
from athanor.tokenizer.chat import CHAT_TEMPLATE_JINJA, prompt_ids, render, render_text, template_hash
from athanor.tokenizer.tokenizer import BOS
from athanor.tokenizer_training.gate import fuzz_texts

TALK = (
    Message("system", "Be brief."),
    Message("user", "hi"),
    Message("assistant", "hello\n"),
    Message("user", " 2+2? "),
    Message("assistant", "4"),
)


def test_layout_is_control_ids_around_plain_content(tokenizer):
    t = tokenizer
    ids, _ = render(t, TALK[1:3])
    assert ids == [t.bos, t.user, *t.encode("hi"), t.stop, t.assistant, *t.encode("hello\n"), t.stop]


def test_only_assistant_content_and_its_stop_are_supervised(tokenizer):
    ids, mask = render(tokenizer, TALK)
    supervised = [i for i, m in zip(ids, mask, strict=True) if m]
    expected = [*tokenizer.encode("hello\n"), tokenizer.stop, *tokenizer.encode("4"), tokenizer.stop]
    assert supervised == expected


@pytest.mark.parametrize("end", [2, 4])
def test_the_prompt_is_a_prefix_of_the_rendered_conversation(tokenizer, end):
    prompt = prompt_ids(tokenizer, TALK[:end])
    ids, mask = render(tokenizer, TALK[: end + 1])
    assert ids[: len(prompt)] == prompt
    assert mask[len(prompt)] == 1 and mask[len(prompt) - 1] == 0


def test_an_empty_earlier_answer_is_allowed_in_a_prompt_but_not_in_training(tokenizer):
    history = [Message("user", "a"), Message("assistant", ""), Message("user", "b")]
    assert prompt_ids(tokenizer, history)[-1] == tokenizer.assistant
    with pytest.raises(InputError, match="empty"):
        render(tokenizer, history[:2])


@pytest.mark.parametrize("roles", [[], ["assistant"], ["user", "assistant"], ["user", "user"], ["system"], ["tool"]])
def test_a_prompt_must_end_with_a_user_turn(tokenizer, roles):
    with pytest.raises(InputError, match="roles are"):
        prompt_ids(tokenizer, [Message(role, "x") for role in roles])


def test_jinja_template_writes_the_same_text():
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CHAT_TEMPLATE_JINJA)
    rng = random.Random(1)
    for text in fuzz_texts(1, 100):
        talk = [*TALK, Message("user", text)][rng.randint(0, 1) :]
        rows = [{"role": m.role, "content": m.content} for m in talk]
        for prompt in (False, True):
            written = template.render(messages=rows, bos_token=BOS, add_generation_prompt=prompt)
            assert written == render_text(talk, prompt=prompt)


def test_hash_covers_version_ids_and_jinja(tokenizer, monkeypatch):
    before = template_hash(tokenizer)
    assert before == template_hash(tokenizer)
    for name, value in (("TEMPLATE_VERSION", 99), ("CHAT_TEMPLATE_JINJA", "x")):
        with monkeypatch.context() as patch:
            patch.setattr(chat, name, value)
            assert template_hash(tokenizer) != before
    monkeypatch.setitem(tokenizer.control_ids, "<|stop|>", 99)
    assert template_hash(tokenizer) != before
