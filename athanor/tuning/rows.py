"""Rows for a base: conversations through its own chat template, with a mask that a gate proves, and plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from athanor.base.artifacts import digest
from athanor.base.errors import GateError, InputError
from athanor.text.conversations import Message

# For a base without a chat template; the export carries it.
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' }}{{ '\n' }}{% endfor %}"
    "{{ 'Assistant:' if add_generation_prompt }}"
)
PROBE = ("What is 2 + 3?", "2 + 3 = 5", "    indented\n\tand\n", "e\u0301\u00a0\u3042")


class Template:
    """A base's tokenizer and chat template, used like our own tokenizer where rows are made."""

    def __init__(self, tokenizer: Any, base: str) -> None:
        self.tokenizer, self.base = tokenizer, base
        if tokenizer.chat_template is None:
            tokenizer.chat_template = PLAIN
        self.template_hash = digest({"template": tokenizer.chat_template})
        roles = ("user", "assistant") * 2
        self.check([Message(role, text) for role, text in zip(roles, PROBE, strict=True)])

    def plain(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in messages]

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """A conversation as the template writes it; `prompt`: up to the beginning of the next answer."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                self.plain(messages), tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message.role for message in messages)
            fix = "leave such conversations out of sft_data.sources, or give the base another chat_template.jinja"
            raise InputError(f"its chat template refuses {roles}: {error}", where=self.base, fix=fix) from None
        return str(rendered)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids of a conversation and its loss mask (1 = supervised): the assistant's answers with their end token.

        Text is encoded in pieces that meet where an answer begins or ends, as a server sees it. Where the template
        shows earlier turns otherwise than the last one (Qwen3 drops their reasoning), the last answer alone is
        supervised.
        """
        whole = self.text(messages)
        spans = []
        for number, message in enumerate(messages):
            if message.role == "assistant":
                prompt, turn = self.text(messages[:number], prompt=True), self.text(messages[: number + 1]).rstrip()
                follows = len(prompt) < len(turn) and whole.startswith(turn) and turn.startswith(prompt)
                spans.append((len(prompt), len(turn)) if follows else None)
        if None in spans:
            spans = spans[-1:]
        if None in spans:
            raise GateError("template", "an answer does not follow its prompt", where=self.base, fix=self._fix)
        pieces, position = [], 0
        for start, end in filter(None, spans):
            pieces += [(whole[position:start], 0), (whole[start:end], 1)]
            position = end
        ids: list[int] = []
        mask: list[int] = []
        for text, supervised in pieces:
            encoded = self.ids(text)
            if supervised and not {encoded[-1]} & set(self.tokenizer.all_special_ids):
                encoded.append(self.tokenizer.eos_token_id)  # without it no answer would ever end
            ids += encoded
            mask += [supervised] * len(encoded)
        return ids, mask

    def check(self, messages: Sequence[Message]) -> None:
        """GateError unless the row begins with what another runtime sends, and its supervised parts are the answers."""
        ids, mask = self.render(messages)
        *before, last = messages
        sent = self.tokenizer.apply_chat_template(self.plain(before), add_generation_prompt=True, return_dict=False)
        answers = [message.content.strip() for message in messages if message.role == "assistant"]
        runs = [[i for i, _ in run] for one, run in groupby(zip(ids, mask, strict=True), lambda pair: pair[1]) if one]
        taught = [self.tokenizer.decode(run, skip_special_tokens=True).strip() for run in runs]
        agree = all(text.endswith(answer) for text, answer in zip(taught, answers[-len(taught) :], strict=True))
        given = self.tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if not one])
        agree = agree and all(message.content.strip() in given for message in before if message.role != "assistant")
        if last.role != "assistant" or ids[: len(sent)] != list(sent) or not agree:
            what = f"its row of {messages[0].content[:40]!r} is not what a server sends, with the answers supervised"
            raise GateError("template", what, where=self.base, fix=self._fix)

    def forges(self, messages: Sequence[Message]) -> bool:
        """True where a text holds a special token, which every runtime would read as one."""
        tokens = [token for token in self.tokenizer.all_special_tokens if token.strip()]
        return any(token in message.content for message in messages for token in tokens)

    _fix = "report it with the base's name; another base or another chat_template.jinja helps meanwhile"


def text_rows(template: Template, texts: Iterable[str], context_tokens: int, max_tokens: int) -> Iterator[list[int]]:
    """Ids of documents, each ended by eos, one after the other in pieces of `context_tokens`; the rest is left out."""
    ids: list[int] = []
    written = 0
    for text in texts:
        ids += [*template.ids(text), template.tokenizer.eos_token_id]
        while len(ids) >= context_tokens:
            yield ids[:context_tokens]
            ids, written = ids[context_tokens:], written + context_tokens
            if written >= max_tokens:
                return
