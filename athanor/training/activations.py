"""The bytes that backward keeps of a model, measured on its real code.

Every storage that comes to life is counted. On a CPU that runs on a few tokens; for an accelerator it runs on the meta
device, which computes shapes only, so the numbers depend neither on the host nor on the card that is in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from athanor.model.config import ModelConfig
from athanor.model.cross_entropy import chunk_rows
from athanor.model.kernels import BLOCK_TOKENS, attention_by_torch
from athanor.model.loss import Targets, training_loss
from athanor.model.precision import AUTOCAST, autocast, meta_autocast, rounds_products
from athanor.model.transformer import Transformer

ACCELERATOR = torch.device("meta")  # any of them: sizes do not depend on which
LOGIT_BYTES = 6  # of a chunk on an accelerator: in the working format, and in fp32 where the compiler fails
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Growth:
    """Bytes of a row of T tokens: fixed + token · T + pair · T²; `fixed` once, however many rows."""

    fixed: float
    token: float
    pair: float

    def bytes(self, rows: int, row_tokens: int) -> float:
        return self.fixed + rows * (self.token * row_tokens + self.pair * row_tokens**2)


@dataclass(frozen=True)
class SavedActivations:
    """The bytes kept for backward: by each block, by the rest of the model without the loss, and by the loss at its peak.

    `input`: of a token, by a block that computes the rest again.
    """

    block: Growth
    rest: Growth
    loss: Growth
    input: float


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside and still alive: `now`, and at most `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is none to skip, and loading it takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._known or key in given:  # a view, or changed in place
                continue
            self._known[key] = storage.nbytes()
            self.now += self._known[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)


@functools.lru_cache(maxsize=64)
def measure_activations(
    config: ModelConfig, precision: str, documents: bool, by_hand: bool, tokens: int
) -> SavedActivations:
    """Measure what backward keeps of this model on a CPU in a precision.

    `by_hand`: with the attention of athanor/model/kernels.py. `tokens` of a micro-batch, of which the loss takes a chunk at once.
    """
    cpu_kernels = precision == "fp32" or rounds_products(precision, _CPU)
    unit = BLOCK_TOKENS // 4 if cpu_kernels else min(32, config.context_tokens // 3)  # by hand: each row one block
    widths = dataclasses.replace(config, vocab_size=64)

    def held(layers: int, T: int) -> int:
        return _run(dataclasses.replace(widths, layers=layers), T, 1, precision, documents)[0]

    with contextlib.nullcontext() if by_hand else attention_by_torch():
        block, rest = _growths(unit, held)
    # The loss alone: of a model so narrow that nothing else counts, with two numbers of targets beyond one chunk.
    narrow = dataclasses.replace(config, layers=1, dim=8, heads=1, kv_heads=1, head_dim=8, ffn_dim=8)
    step = max(1, min(chunk_rows(_CPU, config.vocab_size), tokens)) if cpu_kernels else unit
    peak_few, peak_many = (_run(narrow, 64, n, precision, False, backward=True)[1] for n in (step, 2 * step))
    slope = (peak_many - peak_few) / step
    fixed = max(0.0, peak_few - slope * step) + (4 * config.vocab_size * config.dim if cpu_kernels else 0)
    return SavedActivations(block, rest, Growth(fixed, slope + 3 * 4 * config.dim, 0.0), 4 * config.dim)


@functools.lru_cache(maxsize=64)
def trace_activations(
    config: ModelConfig, precision: str, documents: bool, math_attention: bool, tokens: int
) -> SavedActivations:
    """Count what backward keeps of this model on an accelerator; `math_attention` keeps every score."""
    widths = dataclasses.replace(config, vocab_size=64)
    inputs: set[float] = set()

    def held(layers: int, T: int) -> int:
        with ACCELERATOR:
            model = Transformer(dataclasses.replace(widths, layers=layers, context_tokens=T))
            model.restore_rotary()
            ids_1T = torch.zeros(1, T, dtype=torch.int64)
        model.model.layers[0].register_forward_pre_hook(lambda _, args: inputs.add(args[0].nbytes / T))
        # A foreign model keeps its residual stream in fp32.
        with (
            meta_autocast(None if config.adapters else AUTOCAST[precision]),
            _Autocast(AUTOCAST[precision], math_attention),
            LiveBytes() as live,
        ):
            graph = model.hidden(ids_1T, document_BT=ids_1T if documents else None).grad_fn  # keeps what backward needs
            return live.now if graph else 0

    block, rest = _growths(min(128, config.context_tokens // 3), held)
    # The output matrix's copy and gradient; a chunk's logits, then that gradient times what comes from above.
    half, matrix = AUTOCAST[precision] is not None, config.vocab_size * config.dim
    width, trained = 2 if half else 4, 0 if config.adapters else matrix
    chunk = min(tokens, chunk_rows(ACCELERATOR, config.vocab_size)) * config.vocab_size
    fixed = 2 * half * matrix + 4 * trained + max(LOGIT_BYTES * chunk + width * trained, 4 * trained)
    return SavedActivations(block, rest, Growth(fixed, (8 + width) * config.dim, 0.0), max(inputs))


class _Autocast(TorchFunctionMode):
    """Products and attention as on an accelerator, for tensors of the meta device, which has no autocast.

    Attention by a fused kernel, or by the math one. Weights are converted once, as autocast keeps them.
    """

    def __init__(self, dtype: torch.dtype | None, math_attention: bool) -> None:
        super().__init__()
        self.dtype, self.math_attention = dtype, math_attention
        self._weights: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return func(*map(self._converted, args), **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = map(self._converted, args)
        mask, causal = kwargs["attn_mask"], kwargs["is_causal"]
        if self.math_attention:
            return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, 0.0, causal)[0]
        if mask is not None:  # kernels take it as numbers of their own format
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf).expand(-1, q.shape[1], -1, -1)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal)[0]

    def _converted(self, x: Any) -> Any:
        if self.dtype is None or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if not isinstance(x, nn.Parameter):
            return x.to(self.dtype)
        return self._weights.setdefault(id(x), x.to(self.dtype))


def _run(
    config: ModelConfig, T: int, targets: int, precision: str, documents: bool, *, backward: bool = False
) -> tuple[int, int]:
    """Bytes alive after a forward pass over T ids by weights that nobody has set, and the peak (with backward)."""
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config, context_tokens=T))
    model = model.to_empty(device=_CPU)
    model.restore_rotary()
    ids_1T = torch.zeros(1, T, dtype=torch.int64)
    document_1T = torch.arange(T)[None] // (T - 1) if documents else None
    where_N = torch.arange(targets) % T
    with LiveBytes() as live:
        with autocast(precision, _CPU):
            loss = training_loss(model, Targets(ids_1T, document_1T, where_N, torch.zeros_like(where_N)), 1)
        held_bytes = live.now
        if backward:
            loss.backward()
        return held_bytes, live.peak


def _growths(unit: int, held: Callable[[int, int], int]) -> tuple[Growth, Growth]:
    """Split `held` bytes, by number of layers and tokens, into those of a block and of the rest."""
    one, two = ([held(layers, T) for T in (unit, 2 * unit, 3 * unit)] for layers in (1, 2))
    pairs = list(zip(one, two, strict=True))
    return _growth(unit, [b - a for a, b in pairs]), _growth(unit, [2 * a - b for a, b in pairs])


def _growth(unit: int, values: list[int]) -> Growth:
    """The parabola through the values at 1, 2 and 3 units."""
    first, second, third = values
    pair = (third - 2 * second + first) / (2 * unit * unit)
    token = (second - first) / unit - 3 * unit * pair
    return Growth(first - token * unit - pair * unit * unit, token, pair)
