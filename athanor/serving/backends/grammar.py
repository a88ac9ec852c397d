"""Answers that are JSON, of a schema if there is one: at each step only ids that can still become it are left.

The grammar engine is llguidance, one wheel without dependencies. llama.cpp has
it built in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from athanor.base.errors import InputError
from athanor.tokenizer.tokenizer import Tokenizer

WHERE, INSTALL = "response_format", "pip install 'llguidance>=1.3,<2'"
# As json.dumps writes it. Were white space free, a small model would go on with it for ever.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def checked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with the layout, as the engine and llama.cpp, which has it built in, take it.

    InputError without the engine, and for a schema that it cannot follow (llama.cpp would go on without one).
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise InputError("JSON needs a grammar engine", where=WHERE, fix=INSTALL) from None
    laid_out = {**_closed(schema), "x-guidance": LAYOUT}
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(laid_out)))
    if reason and not reason.startswith("WARNING"):
        raise InputError(
            f"the schema cannot be followed ({' '.join(reason.split())[:300]})", where=WHERE, fix="make it simpler"
        )
    return laid_out


def _closed(schema: Any) -> Any:
    """The schema, where objects with named properties have no others unless it says so: as llama.cpp understands it.

    A small model would go on with names of its own for ever.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: part if name == "allOf" else _closed(part) for name, part in schema.items()}
    return (
        {"additionalProperties": False, **closed}
        if "properties" in schema and schema.get("type") == "object"
        else closed
    )


class Grammars:
    """Makes the grammars of one tokenizer, which the engine learns when the first is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._vocabulary: Any = None

    def of_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """InputError as `checked` has it."""
        laid_out = checked(schema)
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer)))
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(laid_out))
        return Grammar(llguidance.LLMatcher(self._vocabulary, text, log_level=0), self.tokenizer.vocab_size)


class Grammar:
    """Of one answer, at one place in it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size

    def allowed(self) -> np.ndarray | None:
        """Which ids can come next; None where the engine has given up, and the answer ends as it likes."""
        if self.matcher.is_error():
            return None
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return bits[: self.vocab_size].astype(bool)

    def take(self, token: int) -> None:
        self.matcher.consume_token(token)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it. Control ids get bytes that no text has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id, self.bos_token_id, self.tokenizer = tokenizer.stop, tokenizer.bos, tokenizer
        self.special_token_ids = sorted(tokenizer.control_ids.values())
        texts = (tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size))
        self.tokens = [text or f"\xff<{i}>".encode("latin-1") for i, text in enumerate(texts)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self.tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))
