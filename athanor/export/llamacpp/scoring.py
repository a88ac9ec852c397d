"""Log-probabilities of given tokens, by llama.cpp's C interface.

Its HTTP server gives the next token alone, and none for a token that ends no character, so a text of 250 tokens takes up
to 20 s of requests. The library inside xllamacpp exports the C functions; they take 0.1 s.

Structs of parameters are passed by value and change with each version. The callee reads its own part of a larger block;
a version whose defaults are not those below, field by field, is refused.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from athanor.base.errors import InputError

BLOCK_WORDS = 256  # larger than either struct
# Defaults of llama_context_params in words of 32 bits, from n_ctx to the types of keys and values.
CONTEXT_DEFAULTS = [512, 2048, 512, 1, 0, 0, 1, 4, 4, 0, *[-1] * 4, 0, 0, *[-1.0] * 4, 0, -1.0, *[0] * 4, 1, 1]
THREADS, FLASH_ATTENTION, CACHE_TYPES = (7, 8), 13, (26, 27)
GPU_LAYERS = 4  # of llama_model_params, where -1 is all


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
    "llama_adapter_lora_init": (_POINTER, [_POINTER, ctypes.c_char_p]),
    "llama_set_adapters_lora": (
        _INT,
        [_POINTER, ctypes.POINTER(_POINTER), ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)],
    ),
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
    pack = lambda value: struct.unpack("I", struct.pack("f" if isinstance(value, float) else "i", value))[0]  # noqa: E731
    expected = [pack(value) for value in CONTEXT_DEFAULTS]
    if (found := list(library.llama_context_default_params().words)[: len(expected)]) != expected:
        raise _unknown(f"its context parameters begin with {found}")
    return library


def _unknown(what: str) -> InputError:
    fix = "install the version that requirements.txt names"
    return InputError(f"this xllamacpp has another C interface ({what})", where="llama.cpp", fix=fix)


class Scorer:
    """A GGUF file with a context of its own; for one thread at a time. InputError where this build cannot serve.

    The arguments are those of `server.start_server`.
    """

    def __init__(
        self, path: str, *, context_tokens: int, threads: int, exact: bool, accelerator: bool, lora: Sequence[str]
    ) -> None:
        self._library, self.context_tokens = (library := _library()), context_tokens
        model_params, params = library.llama_model_default_params(), library.llama_context_default_params()
        if (found := ctypes.c_int32(model_params.words[GPU_LAYERS]).value) != -1:
            raise _unknown(f"the number of layers on a card is {found}")
        if not accelerator:
            model_params.words[GPU_LAYERS] = 0
        model = library.llama_model_load_from_file(path.encode(), model_params)
        if not model:
            raise InputError("llama.cpp cannot load it", where=path)
        params.words[0], params.words[1] = context_tokens, max(context_tokens, params.words[1])  # decoded in one batch
        for word in THREADS:
            params.words[word] = threads
        if exact:
            for word in (FLASH_ATTENTION, *CACHE_TYPES):
                params.words[word] = 0  # disabled, and fp32
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise InputError(f"no memory for {context_tokens:,} tokens", where=path)
        self._batch = library.llama_batch_init(context_tokens, 0, 1)
        self.vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        if lora:
            adapters = (_POINTER * len(lora))(*(library.llama_adapter_lora_init(model, one.encode()) for one in lora))
            scales = (ctypes.c_float * len(lora))(*[1.0] * len(lora))
            if not all(adapters) or library.llama_set_adapters_lora(self._context, adapters, len(lora), scales):
                raise InputError("llama.cpp cannot add it", where=", ".join(lora))

    def score(self, ids: Sequence[int], top: int = 0, positions: Sequence[int] | None = None) -> Iterator[Scored]:
        """The ids at `positions` (1 or more; None for all after the first), each given those before it, with the `top`
        likeliest in its place."""
        import numpy as np

        if not 0 < len(ids) <= self.context_tokens:
            raise InputError(f"{len(ids):,} tokens, and the context has {self.context_tokens:,}", where="prompt")
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        positions = range(1, len(ids)) if positions is None else positions
        batch, asked = self._batch, {position - 1 for position in positions}
        batch.n_tokens = len(ids)
        for position, number in enumerate(ids):
            batch.token[position], batch.pos[position] = number, position
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            batch.logits[position] = position in asked
        if status := self._library.llama_decode(self._context, batch):
            raise InputError(f"llama.cpp could not compute it (status {status})", where="prompt")
        for position in positions:
            row = self._library.llama_get_logits_ith(self._context, position - 1)
            logits_V = np.ctypeslib.as_array(row, (self.vocab_size,)).astype(np.float64)
            logits_V -= logits_V.max()
            logits_V -= np.log(np.exp(logits_V).sum())
            likeliest = np.argsort(-logits_V, kind="stable")[:top]
            tops = [(int(n), float(logits_V[n])) for n in likeliest]
            yield Scored(ids[position], float(logits_V[ids[position]]), tops)
