"""Log-probabilities of given tokens, by llama.cpp's C interface.

Its HTTP server gives the next token alone, and none for a token that ends no character, so a text of 250 tokens takes up
to 20 s of requests. The library inside xllamacpp exports the C functions; they take 0.1 s.

Structs of parameters are passed by value and change with each version. The callee reads its own part of a larger block,
of which only `n_ctx` is set here; `_check_layout` refuses a version in which the first fields are others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from athanor.base.errors import InputError

BLOCK_WORDS = 256  # larger than either struct
FIRST_FIELDS = [512, 2048, 512, 1]  # n_ctx, n_batch, n_ubatch, n_seq_max: the defaults of llama_context_params


class Scored(NamedTuple):
    id: int
    log_probability: float
    top: list[tuple[int, float]]  # likeliest ids in its place, with their log-probabilities


class _Block(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * BLOCK_WORDS)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_quiet = _Log(lambda level, text, data: None)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (_Block, []),
    "llama_context_default_params": (_Block, []),
    "llama_model_load_from_file": (_POINTER, [ctypes.c_char_p, _Block]),
    "llama_init_from_model": (_POINTER, [_POINTER, _Block]),
    "llama_batch_init": (_Batch, [_INT, _INT, _INT]),
    "llama_decode": (_INT, [_POINTER, _Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_POINTER, _INT]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, ctypes.c_bool]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (_INT, [_POINTER]),
}


def _library() -> Any:
    import xllamacpp.xllamacpp as extension

    library = ctypes.CDLL(extension.__file__)
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise _unknown(str(error)) from None
    library.llama_log_set(_quiet, None)
    if (fields := list(library.llama_context_default_params().words)[: len(FIRST_FIELDS)]) != FIRST_FIELDS:
        raise _unknown(f"context parameters begin with {fields}")
    return library


def _unknown(what: str) -> InputError:
    fix = "install the version that requirements.txt names"
    return InputError(f"this xllamacpp has another C interface ({what})", where="llama.cpp", fix=fix)


class Scorer:
    """A GGUF file with a context of its own; for one thread at a time. InputError where this build cannot serve."""

    def __init__(self, path: str | Path, context_tokens: int) -> None:
        self._library, self.context_tokens = _library(), context_tokens
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise InputError("llama.cpp cannot load it", where=path)
        params = self._library.llama_context_default_params()
        params.words[0] = context_tokens
        self._context = self._library.llama_init_from_model(self._model, params)
        self._batch = self._library.llama_batch_init(context_tokens, 0, 1)
        self.vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))

    def score(self, ids: Sequence[int], top: int = 0) -> list[Scored]:
        """Each id after the first, given those before it, with the `top` likeliest in its place."""
        import numpy as np

        if not 0 < len(ids) <= self.context_tokens:
            raise InputError(f"{len(ids):,} tokens, and the context has {self.context_tokens:,}", where="prompt")
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(ids)
        for position, number in enumerate(ids):
            batch.token[position], batch.pos[position] = number, position
            batch.n_seq_id[position], batch.seq_id[position][0], batch.logits[position] = 1, 0, 1
        if status := self._library.llama_decode(self._context, batch):
            raise InputError(f"llama.cpp could not compute it (status {status})", where="prompt")
        scored = []
        for position, number in enumerate(ids[1:]):
            row = self._library.llama_get_logits_ith(self._context, position)
            logits_V = np.ctypeslib.as_array(row, (self.vocab_size,)).astype(np.float64)
            logits_V -= logits_V.max()
            logits_V -= np.log(np.exp(logits_V).sum())
            likeliest = np.argsort(-logits_V, kind="stable")[:top]
            scored.append(Scored(number, float(logits_V[number]), [(int(n), float(logits_V[n])) for n in likeliest]))
        return scored
