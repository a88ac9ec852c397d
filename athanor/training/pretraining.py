"""The components of a pretraining run, for the run itself and for short runs of the same recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from athanor.data.order import permutation
from athanor.data.sampler import PretrainSampler
from athanor.data.shards import TokenStream
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.validation import bits_per_byte, pooled
from athanor.training.optimizer import OptimizerSettings
from athanor.training.schedule import Schedule
from athanor.training.vocabulary import Vocabulary
from athanor.training.world import SINGLE, World


class HeldOut:
    """Documents of each source's validation split in a fixed mixed order, until `max_bytes` of text."""

    def __init__(self, streams: Mapping[str, TokenStream], max_bytes: int, token_bytes: np.ndarray) -> None:
        self.token_bytes = token_bytes
        self.documents = {name: self._select(stream, max_bytes) for name, stream in streams.items()}

    def _select(self, stream: TokenStream, max_bytes: int) -> list[np.ndarray]:
        documents, text_bytes = [], 0
        for number in permutation(stream.documents, "validation").tolist():
            documents.append(stream.document(number))
            text_bytes += int(self.token_bytes[documents[-1]].sum())
            if text_bytes >= max_bytes:
                break
        return documents

    def scores(
        self, model: Transformer, precision: str, threads: int, world: World = SINGLE
    ) -> dict[str, dict[str, Any]]:
        """Bits per byte of each source, and of `all` together, as the fields of BitsPerByte."""
        options: dict[str, Any] = {"precision": precision, "threads": threads, "world": world}
        scores = {
            name: bits_per_byte(model, documents, self.token_bytes, model.config.context_tokens, **options)
            for name, documents in self.documents.items()
        }
        rows = {name: dataclasses.asdict(score) for name, score in {**scores, "all": pooled(scores)}.items()}
        for row in rows.values():
            del row["each"]  # of many documents, in every validation that a checkpoint holds
        return rows


class Prepared(NamedTuple):
    """What a training consists of, whatever machine runs it."""

    config: ModelConfig
    vocabulary: Vocabulary
    schedule: Schedule
    adam: OptimizerSettings
    sampler: PretrainSampler
    held_out: HeldOut
    inputs: dict[str, str]
