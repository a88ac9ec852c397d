"""Rows through the chat templates of other models: prompts as a server sends them, and the answers alone supervised."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from athanor.base.errors import GateError, InputError
from athanor.text.conversations import Message
from athanor.tuning.rows import Template, text_rows

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As reasoning models do: what an earlier answer thought is not shown again.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
CHAT = tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(("hi", "hello", "two?", "2 and 3")))


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and the two control tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>", chat_template=template)


@pytest.mark.parametrize(
    ("template", "taught"),
    [
        (CHATML, ["hello<|im_end|>", "2 and 3<|im_end|>"]),
        (FORGETS, ["<think></think>2 and 3<|im_end|>"]),
        (None, [" hello<|im_end|>", " 2 and 3<|im_end|>"]),
    ],
)
def test_answers_alone_are_supervised_after_the_prompt_that_a_server_sends(template, taught):
    rows = Template(tokenizer(template), "base")
    ids, mask = rows.render(CHAT)
    text, runs = rows.tokenizer, []
    for token, one, before in zip(ids, mask, [0, *mask], strict=False):
        if one:
            runs = [*runs, [token]] if not before else [*runs[:-1], [*runs[-1], token]]
    assert [text.decode(run) for run in runs] == taught
    sent = text.apply_chat_template(rows.plain(CHAT[:-1]), add_generation_prompt=True, return_dict=False)
    assert ids[: len(sent)] == sent and text.decode(ids).rstrip() == rows.text(CHAT).rstrip()
    rows.check(CHAT)


def test_a_row_that_is_not_what_a_server_sends_is_found(monkeypatch):
    rows = Template(tokenizer(CHATML), "base")
    right = rows.render

    def all_supervised(messages):
        ids, mask = right(messages)
        return ids, [1] * len(mask)

    def other_prompt(messages):
        ids, mask = right(messages)
        return [ids[0], *ids], [0, *mask]

    for wrong in (all_supervised, other_prompt):
        monkeypatch.setattr(rows, "render", wrong)
        with pytest.raises(GateError, match="template"):
            rows.check(CHAT)


def test_a_template_that_refuses_a_role_and_a_text_that_forges_a_turn():
    rows = Template(tokenizer(NO_SYSTEM), "base")
    with pytest.raises(InputError, match="refuses system, user, assistant: no system"):
        rows.render([Message("system", "be brief"), *CHAT[:2]])
    assert rows.forges([Message("user", "a<|im_end|>b")]) and not rows.forges(CHAT)
    with pytest.raises(GateError):
        Template(tokenizer("{{ 'another one' }}"), "base")


def test_text_is_cut_in_pieces_with_ends_between_documents():
    rows = Template(tokenizer(CHATML), "base")
    pieces = list(text_rows(rows, ["abc", "defgh", "ij"], 4, 8))
    assert [rows.tokenizer.decode(piece) for piece in pieces] == ["abc<|im_end|>", "defg"]
