"""The tokenizer and the chat layout of a foreign model, as our rows need them.

The layout is derived from the control tokens that the model knows: ChatML
(`<|im_start|>role`, newline, content, `<|im_end|>`, newline) or Llama 3's headers.
It is the one that these models were trained with, so what they have learnt
about turns is kept. Each content is encoded on its own and control tokens are
never parsed out of it, so text cannot forge a turn.

One liberty is taken with the text: blank lines before a content's first line
go. Other runtimes encode the newline of the header together with them, and
would make other ids of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from athanor.base.artifacts import digest, read_json, sha256_file
from athanor.base.errors import GateError, InputError
from athanor.text.conversations import ROLES, Message
from athanor.tokenizer.chat import Layout, render

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
LAYOUT_VERSION = 1
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_BLANK = re.compile(r"\A\s*[\r\n]+")
_JINJA = (
    "{start}{{% for message in messages %}}"
    "{{{{ '{open}' + message['role'] + '{header}' + message['content'] + '{close}' }}}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{open}assistant{header}' }}}}{{% endif %}}"
)
# Contents that a tokenizer with hidden rules would encode otherwise in their place than alone.
_PROBES = (" two  spaces ", "    indented\n\tand\n", "1 + 1 = 2\n\n", "'quoted'", "e\u0301\u00a0\u3042", "x")


class ForeignTokenizer:
    """Encoder and decoder of a Hugging Face directory, with the layout of its chats.

    `template` is the Jinja text that renders this layout in other runtimes; `template_hash` stands for both.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / FILE
        if not path.is_file():
            fix = "convert it once: AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
            raise InputError("no tokenizer.json", where=str(folder), fix=fix)
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise InputError("tokenizers is not installed", where="sft.base", fix="pip install tokenizers") from None
        try:
            self._fast = Fast.from_file(str(path))
        except Exception as error:  # the package raises plain exceptions
            fix = "fetch the file again, or update the package: pip install --upgrade tokenizers"
            raise InputError(f"not understood ({error})", where=str(path), fix=fix) from None
        self._fast.encode_special_tokens = True  # their text stays text
        self._fast.no_truncation()
        self._fast.no_padding()
        self.digest = sha256_file(path)
        self.vocab_size: int = self._fast.get_vocab_size()
        added = self._fast.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        self.layout, self.template = self._derive()
        ids = {"start": self.layout.start, "opening": dict(self.layout.opening), "closing": self.layout.closing}
        self.template_hash = digest({"version": LAYOUT_VERSION, "ids": ids, "jinja": self.template})
        self._controls = {*self.layout.start, self.layout.stop, *(ids[0] for ids in self.layout.opening.values())}
        self._check()

    @property
    def stop(self) -> int:
        return self.layout.stop

    @property
    def pad(self) -> int:
        """An id to fill rows with, where nothing is learnt: the model's own, or else the stop."""
        config = self.folder / CONFIG
        pad_token = read_json(config).get("pad_token") if config.is_file() else None
        text = pad_token.get("content") if isinstance(pad_token, dict) else pad_token
        return self._special.get(text, self.stop)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each content on its own, without the blank lines before its first line; never a control id."""
        encoded = [
            encoding.ids for encoding in self._fast.encode_batch(list(map(content, texts)), add_special_tokens=False)
        ]
        for number, ids in enumerate(encoded):
            if self._controls.intersection(ids):
                raise GateError("control ids", f"text {number} encodes to one", where=str(self.folder))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))

    def rendered(self, messages: Sequence[Message]) -> list[int]:
        """Ids as another runtime makes them: the template's text, with control tokens parsed out of it."""
        first, opener, header, close = self._texts
        text = first + "".join(f"{opener}{m.role}{header}{content(m.content)}{close}" for m in messages)
        self._fast.encode_special_tokens = False
        try:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        finally:
            self._fast.encode_special_tokens = True

    def check_rendered(self, messages: Sequence[Message]) -> None:
        """GateError where another runtime would make other ids of a conversation; one with control text is left out."""
        if any(text in message.content for text in self._special for message in messages):
            return
        if self.rendered(messages) != render(self, messages)[0]:
            excerpt = json.dumps([message.content[:40] for message in messages[:2]], ensure_ascii=False)
            fix = "leave the conversation out, or use a base whose tokenizer adds nothing to text"
            what = f"runtimes encode {excerpt} otherwise in its place"
            raise GateError("template", what, where=str(self.folder), fix=fix)

    def _derive(self) -> tuple[Layout, str]:
        missing = {kind: [text for text in kind if text not in self._special] for kind in (CHATML, LLAMA3)}
        if not missing[CHATML]:
            start, opener, header, close, tail = self._bos_text(), CHATML[0], "\n", CHATML[1], "\n"
        elif not missing[LLAMA3]:
            start, opener, header, close, tail = LLAMA3[0], LLAMA3[1], f"{LLAMA3[2]}\n\n", LLAMA3[3], ""
        else:
            missing_tokens = min(missing.values(), key=len)
            raise InputError(
                f"no chat layout: the tokenizer has no special token {', '.join(missing_tokens)}",
                where=str(self.folder / FILE),
                fix=f"use a base with {' and '.join(CHATML)} (ChatML), or with {', '.join(LLAMA3)} (Llama 3)",
            )
        self._texts = (start, opener, header, close + tail)
        opening = {role: self._encode_with_controls(f"{opener}{role}{header}") for role in ROLES}
        layout = Layout(self._encode_with_controls(start), opening, self._encode_with_controls(close + tail))
        escaped = {"header": header.replace("\n", "\\n"), "close": (close + tail).replace("\n", "\\n"), "open": opener}
        return layout, _JINJA.format(start=f"{{{{ '{start}' }}}}" if start else "", **escaped)

    def _bos_text(self) -> str:
        """What the tokenizer itself puts before a text: its bos, or nothing."""
        ids = self._fast.encode("", add_special_tokens=True).ids
        return "".join(text for number in ids[:1] for text, special in self._special.items() if special == number)

    def _encode_with_controls(self, text: str) -> tuple[int, ...]:
        self._fast.encode_special_tokens = False
        ids = tuple(self._fast.encode(text, add_special_tokens=False).ids)
        self._fast.encode_special_tokens = True
        return ids

    def _check(self) -> None:
        for text in (*CHATML, *LLAMA3):
            if text in self._special and self._special[text] in self._fast.encode(text, add_special_tokens=False).ids:
                raise GateError("control ids", f"the text {text} becomes its id", where=str(self.folder / FILE))
        for probe in _PROBES:
            self.check_rendered([Message("user", probe), Message("assistant", probe)])


def content(text: str) -> str:
    """A message's content as it is laid out."""
    return _BLANK.sub("", text)
