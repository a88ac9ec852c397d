"""Stateless samplers: the batch at a token position is a pure function of (seed, position, data).

Nothing is drawn and nothing is remembered, so a resumed run, another
micro-batch size or another number of workers reads the same samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from athanor.base.artifacts import manifest_digest
from athanor.base.errors import InputError, ParamsError
from athanor.data.order import permutation
from athanor.data.rows import PackedRows
from athanor.data.shards import (
    COOLDOWN,
    TRAIN,
    TokenStream,
    main_digest,
    open_cooldown,
    open_train,
    read_shards_manifest,
)

NO_DOCUMENT = -1  # document id of padding


class PretrainBatch(NamedTuple):
    """int64 [B, context + 1]: inputs are [:, :-1], targets [:, 1:]. Equal document ids mean the same document.

    source_BS: numbers in the names `sources`.
    """

    tokens_BS: np.ndarray
    document_BS: np.ndarray
    source_BS: np.ndarray
    sources: tuple[str, ...]


class SftBatch(NamedTuple):
    """[B, context + 1]: ids int64; mask uint8, 1 = supervised as a target; document int64.

    Each conversation of a row has its own document id; padding has -1 and mask 0. source_BS, int64: numbers in
    the names `sources`.
    """

    tokens_BS: np.ndarray
    mask_BS: np.ndarray
    document_BS: np.ndarray
    source_BS: np.ndarray
    sources: tuple[str, ...]


class _Sampler:
    """Common part: `samples` fixed windows or rows, one permutation of them per epoch."""

    def __init__(self, folder: str | Path, context_tokens: int, seed: int, samples: int) -> None:
        self.context_tokens, self.seed, self.samples = context_tokens, seed, samples
        self.tokens_per_epoch = samples * context_tokens
        self.manifest = manifest_digest(folder)
        self._orders: dict[int, np.ndarray] = {}

    def epoch(self, position_tokens: int) -> float:
        """How many times the data has been seen after `position_tokens`."""
        return position_tokens / self.tokens_per_epoch

    def sample_numbers(self, position_tokens: int, batch_tokens: int) -> list[int]:
        """The samples that make the batch at this position, in order."""
        for name, value in (("position_tokens", position_tokens), ("batch_tokens", batch_tokens)):
            if value % self.context_tokens or value < 0:
                raise ParamsError(
                    f"{name} {value} is not a multiple of the context", fix=f"use multiples of {self.context_tokens}"
                )
        first = position_tokens // self.context_tokens
        numbers = []
        for index in range(first, first + batch_tokens // self.context_tokens):
            epoch, rank = divmod(index, self.samples)
            orders = self._orders
            if epoch not in orders:
                # A batch touches two epochs at most unless the data is tiny; older orders are not needed again.
                orders = {e: o for e, o in orders.items() if e == epoch - 1}
                orders[epoch] = permutation(self.samples, self.seed, epoch)
                self._orders = orders  # whole, for a thread that reads ahead
            numbers.append(int(orders[epoch][rank]))
        return numbers


class _Windows(_Sampler):
    """Windows of `context_tokens` + 1 over a stream, each once per epoch; `facts` name the stream's sources."""

    def __init__(
        self,
        folder: str | Path,
        subfolder: str,
        stream: TokenStream,
        facts: dict[str, Any],
        context_tokens: int,
        seed: int,
    ) -> None:
        self._stream = stream
        unnamed = [f"source-{number}" for number in range(int(stream.sources.max(initial=0)) + 1)]
        self._names = tuple(sorted(facts.get("sources", {})) or unnamed)
        samples = (stream.tokens - 1) // context_tokens
        if samples < 1:
            raise InputError(
                f"{stream.tokens} tokens are fewer than one window of {context_tokens + 1}",
                where=str(Path(folder) / subfolder),
                fix="add text or lower the context length",
            )
        super().__init__(folder, context_tokens, seed, samples)

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> PretrainBatch:
        numbers = self.sample_numbers(position_tokens + skipped_tokens, batch_tokens)
        width = self.context_tokens + 1
        starts_B = np.array(numbers, dtype=np.int64) * self.context_tokens
        tokens_BS = np.stack([self._stream.read(int(start), width) for start in starts_B])
        document_BS = self._stream.document_of(starts_B[:, None] + np.arange(width))
        source_BS = self._stream.sources[document_BS].astype(np.int64)
        return PretrainBatch(tokens_BS, document_BS, source_BS, self._names)

    def source_of(self, document: int) -> str:
        """Name of a document's source."""
        return self._names[self._stream.sources[document]]


class PretrainSampler(_Windows):
    """Windows over the training stream, and from `cooldown_start` tokens on over the cooldown's, if the data has one.

    Neighbouring windows share one token, so every token but the first of the
    stream is a target exactly once; a tail shorter than a window is left out.
    `cooldown_start` is a whole number of steps, None for a schedule without a
    cooldown; the position in the cooldown's stream is counted from there.
    `manifest` stands for all the data, `trunk_manifest` for what comes before
    the cooldown and for the validation text.
    """

    def __init__(self, folder: str | Path, context_tokens: int, seed: int, cooldown_start: int | None = None) -> None:
        manifest = read_shards_manifest(folder)
        super().__init__(folder, TRAIN, open_train(folder), manifest, context_tokens, seed)
        self.trunk_manifest = main_digest(folder)
        stream = open_cooldown(folder)
        if stream is not None and cooldown_start is None:
            raise ParamsError(
                "the data has a mixture for the cooldown, but this schedule has no cooldown",
                where="pretrain.schedule",
                fix="use wsd, or set mixture.cooldown to null",
            )
        self._cooldown = stream and _Windows(folder, COOLDOWN, stream, manifest[COOLDOWN], context_tokens, seed)
        self._cooldown_start = cooldown_start or 0

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> PretrainBatch:
        """The batch that starts `position_tokens` into training; both count target tokens.

        `skipped_tokens` of data were left out before it. They move a batch on
        inside its stream, and never into the other one.
        """
        if self._cools(position_tokens):
            assert self._cooldown is not None
            return self._cooldown.batch(position_tokens - self._cooldown_start, batch_tokens, skipped_tokens)
        return super().batch(position_tokens, batch_tokens, skipped_tokens)

    def document_name(self, position_tokens: int, skipped_tokens: int, document: int) -> str:
        """A document of the batch's row at this position, by its number in the stream and its source."""
        cools = self._cools(position_tokens)
        source = (self._cooldown if cools and self._cooldown else self).source_of(document)
        return f"document {document} of {COOLDOWN if cools else TRAIN} ({source})"

    def _cools(self, position_tokens: int) -> bool:
        return self._cooldown is not None and position_tokens >= self._cooldown_start

    def epochs(self, position_tokens: int) -> dict[str, float]:
        """How many times each stream has been seen after `position_tokens`."""
        if self._cooldown is None:
            return {"epochs": self.epoch(position_tokens)}
        later = max(0, position_tokens - self._cooldown_start)
        return {"epochs": self.epoch(position_tokens - later), "cooldown_epochs": self._cooldown.epoch(later)}


class SftSampler(_Sampler):
    """Packed rows of whole conversations, each once per epoch.

    `split` is "train" or "val"; positions count `context_tokens` for a row, padding included.
    """

    def __init__(self, folder: str | Path, context_tokens: int, seed: int, split: str = "train") -> None:
        self._rows = PackedRows(folder, split)
        if self._rows.context_tokens != context_tokens:
            raise ParamsError(
                f"rows are packed for a context of {self._rows.context_tokens}, the model has {context_tokens}",
                where=str(folder),
                fix="set sft_data.context_tokens to the model's context_tokens",
            )
        super().__init__(folder, context_tokens, seed, len(self._rows))

    def batch(self, position_tokens: int, batch_tokens: int, skipped_tokens: int = 0) -> SftBatch:
        """The batch that starts `position_tokens` into training, when `skipped_tokens` of data were left out."""
        numbers = self.sample_numbers(position_tokens + skipped_tokens, batch_tokens)
        shape = (len(numbers), self.context_tokens + 1)
        tokens_BS = np.full(shape, self._rows.pad, dtype=np.int64)
        mask_BS = np.zeros(shape, dtype=np.uint8)
        document_BS = np.full(shape, NO_DOCUMENT, dtype=np.int64)
        source_BS = np.zeros(shape, dtype=np.int64)
        for row, number in enumerate(numbers):
            start = 0
            for index, entry in enumerate(self._rows.numbers(row=number)):
                ids, mask = self._rows.conversation(entry)
                end = start + len(ids)
                tokens_BS[row, start:end], mask_BS[row, start:end], document_BS[row, start:end] = ids, mask, index
                source_BS[row, start:end] = self._rows.source_number(entry)
                start = end
        return SftBatch(tokens_BS, mask_BS, document_BS, source_BS, self._rows.unique_names)

    def document_name(self, position_tokens: int, skipped_tokens: int, document: int) -> str:
        """An entry of the batch's row at this position: conversation or text, number in the packed rows, source."""
        (row,) = self.sample_numbers(position_tokens + skipped_tokens, self.context_tokens)
        return self._rows.name(self._rows.numbers(row)[document])
