"""What a GGUF file says of itself, as far as a score needs it: shape, vocabulary and lineage. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from athanor.errors import InputError
from athanor.tokenizer.tokenizer import SPACE_MARK

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


@dataclass(frozen=True)
class GgufFacts:
    """token_bytes: int64 [vocab], UTF-8 bytes of each id; None for a vocabulary that is not SentencePiece's.

    bos: None where the file asks for none; dtype: of the file, as llama.cpp names it.
    """

    context_tokens: int
    vocab_size: int
    dtype: str
    bos: int | None
    token_bytes: np.ndarray | None
    tokenizer_digest: str | None
    template_hash: str | None


def read_facts(path: str | Path) -> GgufFacts:
    """InputError if it is no whole GGUF file."""
    from gguf import GGUFReader, LlamaFileType

    path = Path(path)
    if not path.is_file():
        raise InputError("file not found", where=str(path), fix="dvc repro export")
    try:
        fields = GGUFReader(path).fields

        def value(key: str, default: Any = None) -> Any:
            return fields[key].contents() if key in fields else default

        arch = value("general.architecture")
        model = value("tokenizer.ggml.model")
        tokens = value("tokenizer.ggml.tokens")
        bytes_V = None
        if model == "llama":
            types = value("tokenizer.ggml.token_type", [1] * len(tokens))
            bytes_V = np.array([_bytes(token, kind) for token, kind in zip(tokens, types, strict=True)])
        kind = value("general.file_type")
        return GgufFacts(
            context_tokens=int(value(f"{arch}.context_length")),
            vocab_size=len(tokens),
            dtype="unknown" if kind is None else LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower(),
            bos=int(value("tokenizer.ggml.bos_token_id", 1)) if value("tokenizer.ggml.add_bos_token", model == "llama") else None,
            token_bytes=bytes_V,
            tokenizer_digest=value("athanor.tokenizer_digest"),
            template_hash=value("athanor.template_hash"),
        )
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise InputError(f"not a whole GGUF file ({error})", where=str(path), fix="dvc repro export") from None


def _bytes(token: str, kind: int) -> int:
    if kind in (_CONTROL, _UNKNOWN):
        return 0
    if kind == _BYTE:
        return 1
    return len((token if kind == _USER_DEFINED else token.replace(SPACE_MARK, " ")).encode())
