"""Keys and values of answers that have ended, so that the next turn of a conversation reads only what is new.

It stands beside the engine: the pipeline's stages ask each question once.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from athanor.decoding.cache import KVCache
from athanor.decoding.engine import Engine, prefill

MIN_SHARED = 16  # ids at the beginning of two prompts: to read so many takes longer than to find and to copy them


class _Kept(NamedTuple):
    ids: list[int]
    keys_LKTE: Tensor
    values_LKTE: Tensor


class KeepingEngine(Engine):
    """The engine, which keeps at most `keep_bytes` of the answers that ended last, however they ended.

    A prompt takes over the longest beginning that it shares with one of them:
    keys and values depend on the ids before them alone, so answers are the
    same but for rounding.
    """

    def __init__(self, *words: Any, keep_bytes: int = 0, **options: Any) -> None:
        super().__init__(*words, **options)
        self.keep_tokens = keep_bytes // (2 * self.cache.keys_LBKSE[:, 0, :, 0].nbytes)
        self.kept: list[_Kept] = []  # the oldest first

    @torch.inference_mode()
    def cancel(self, key: Hashable) -> None:
        for index, row in enumerate(self.rows):
            if row.key == key:
                self._keep(index, row.ids[: min(row.length, self.keep_tokens)])
        super().cancel(key)

    def _keep(self, index: int, ids: list[int]) -> None:
        """Keep these ids of a row. What they go on from is given up, and of the others the oldest."""
        self.kept = [one for one in self.kept if one.ids != ids[: len(one.ids)]]
        while self.kept and sum(len(one.ids) for one in self.kept) + len(ids) > self.keep_tokens:
            del self.kept[0]
        keys, values = self.cache.keys_LBKSE[:, index], self.cache.values_LBKSE[:, index]
        self.kept.append(_Kept(ids, keys[:, :, : len(ids)].clone(), values[:, :, : len(ids)].clone()))

    def _read(self, prompts: Sequence[Sequence[int]], cache: KVCache) -> Tensor:
        starts = [0] * len(prompts)
        for row, prompt in enumerate(prompts):
            for one in self.kept:
                # The last id is read in any case: what comes after it is asked. (The function is not about paths.)
                count = len(os.path.commonprefix([one.ids, list(prompt[:-1])]))
                if count > max(MIN_SHARED - 1, starts[row]):
                    starts[row] = count
                    cache.keys_LBKSE[:, row, :, :count] = one.keys_LKTE[:, :, :count]
                    cache.values_LBKSE[:, row, :, :count] = one.values_LKTE[:, :, :count]
        cache.length = max(starts)
        rest = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        return prefill(self.model, rest, cache, starts)
