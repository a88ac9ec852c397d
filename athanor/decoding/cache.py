"""Preallocated keys and values for decoding in batches of rows of unequal length."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from athanor.model.config import ModelConfig


class KVCache:
    """Keys and values of up to `length` tokens for each of `batch` rows, all layers.

    A token's slot is its position in its row, so a row has no holes whatever
    the padding was, and "may see" is simply slot ≤ position. One spare slot
    at the end takes the padding; it is never read.

    `length` (attribute) counts the tokens placed so far in the longest row
    that could exist: every call adds its width. It needs no look at device
    memory, and may exceed the true longest row, never fall short of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 < length <= config.context_tokens:
            raise ValueError(f"cache length must be from 1 to the context of {config.context_tokens}, not {length}")
        shape = (config.layers, batch, config.kv_heads, length + 1, config.head_dim)
        self.keys_LBKSE = torch.zeros(shape, device=device, dtype=dtype)
        self.values_LBKSE = torch.zeros(shape, device=device, dtype=dtype)
        self.capacity = length
        self.length = 0
        self._slots_BT: Tensor | None = None  # of the call under way; None = the next slots, same in every row
        self._start = 0

    @property
    def batch(self) -> int:
        return self.keys_LBKSE.shape[1]

    def reserve(self, width: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Reserve slots for `width` new tokens per row.

        Returns their positions for the rotary table ([T] or [B, T], padding
        clamped to 0) and the attention mask [B or 1, 1, T, S], or None where
        plain causal attention says the same.
        """
        self._start, self.length = self.length, self.length + width
        if self.length > self.capacity and positions_BT is None:
            self.length = self._start
            raise ValueError(f"{self._start + width} tokens do not fit into a cache of {self.capacity}")
        self.length = min(self.length, self.capacity)
        device = self.keys_LBKSE.device
        if positions_BT is None:
            self._slots_BT = None
            positions_T = torch.arange(self._start, self.length, device=device)
            if self._start == 0 or width == 1:
                return positions_T, None
            return positions_T, self._visible(positions_T[None])
        self._slots_BT = torch.where(positions_BT < 0, self.capacity, positions_BT)
        # Padding looks at slot 0 rather than at nothing: a softmax over nothing is NaN.
        positions_BT = positions_BT.clamp(min=0)
        return positions_BT, self._visible(positions_BT)

    def store(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; returns all of the layer's, [B, K, S, E]."""
        keys, values = self.keys_LBKSE.select(0, layer), self.values_LBKSE.select(0, layer)
        if self._slots_BT is None:
            keys.narrow(2, self._start, self.length - self._start).copy_(k_BKTE)
            values.narrow(2, self._start, self.length - self._start).copy_(v_BKTE)
        else:
            rows_B1 = torch.arange(self.batch, device=keys.device)[:, None]
            keys[rows_B1, :, self._slots_BT] = k_BKTE.transpose(1, 2).to(keys.dtype)
            values[rows_B1, :, self._slots_BT] = v_BKTE.transpose(1, 2).to(values.dtype)
        return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)

    def first_rows(self, rows: int, length: int) -> KVCache:
        """The first rows as a cache of their own that shares their memory, `length` tokens placed in the longest."""
        if not (0 < rows <= self.batch and 0 <= length <= self.capacity):
            raise ValueError(f"no {rows} rows of {length} tokens in a cache of {self.batch} rows of {self.capacity}")
        view = copy(self)
        view.keys_LBKSE, view.values_LBKSE = self.keys_LBKSE[:, :rows], self.values_LBKSE[:, :rows]
        view.length = length
        return view

    def move(self, source: int, target: int) -> None:
        """Copy one row's tokens over those of another."""
        self.keys_LBKSE[:, target] = self.keys_LBKSE[:, source]
        self.values_LBKSE[:, target] = self.values_LBKSE[:, source]

    def write_rows(self, first: int, other: KVCache, sources: Sequence[int]) -> None:
        """Put the rows `sources` of another cache into the rows from `first` on."""
        rows, length = slice(first, first + len(sources)), other.length
        self.keys_LBKSE[:, rows, :, :length] = other.keys_LBKSE[:, sources, :, :length]
        self.values_LBKSE[:, rows, :, :length] = other.values_LBKSE[:, sources, :, :length]

    def _visible(self, positions_BT: Tensor) -> Tensor:
        slots_S = torch.arange(self.length, device=positions_BT.device)
        return (slots_S <= positions_BT[..., None])[:, None]
