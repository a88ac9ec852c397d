"""What every exporter starts from: weights, shape, vocabulary and template, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from athanor.errors import GateError, InputError
from athanor.export.vocabulary import CONTROL, Vocabulary
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.tokenizer.chat import CHAT_TEMPLATE_JINJA, check_made_with, template_hash
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training.weights import load_model, model_tensors


@dataclass(frozen=True)
class Source:
    """A model ready to be written in other formats.

    name: general name of the model; lineage: digests of the artifacts and metrics it was made from, by name;
    lock: the hashes that dvc.lock has for them, by path (see lineage.py).
    """

    name: str
    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: str
    template_hash: str
    lineage: Mapping[str, str]
    lock: Mapping[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """`qwen3` is exactly Llama plus a norm per query and key head; nothing else is mapped."""
        return "qwen3" if self.config.qk_norm else "llama"

    @property
    def controls(self) -> dict[str, int]:
        """Ids of the tokens that text can never produce, by role."""
        names = ("pad", "bos", "eos", "system", "user", "assistant", "stop")
        return {name: int(getattr(self.tokenizer, name)) for name in names}


def load_source(
    model_dir: str | Path,
    tokenizer_dir: str | Path,
    name: str,
    lineage: Mapping[str, str],
    lock: Mapping[str, str] | None = None,
) -> Source:
    """Read a model and its tokenizer; InputError or GateError if they do not belong together."""
    model, facts = load_model(model_dir)
    tokenizer = Tokenizer.load(tokenizer_dir)
    check_made_with(facts, tokenizer, where=str(model_dir), fix="dvc repro sft")
    vocabulary = Vocabulary.load(Path(tokenizer_dir) / "tokenizer.model")
    return make_source(name, model, tokenizer, vocabulary, lineage, lock)


def make_source(
    name: str,
    model: Transformer,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    lineage: Mapping[str, str],
    lock: Mapping[str, str] | None = None,
) -> Source:
    config = model.config
    # Extra rows would take probability in every runtime: nothing masks them.
    if not len(vocabulary) == tokenizer.vocab_size == config.vocab_size:
        raise GateError(
            "vocabulary size",
            f"{config.vocab_size} embedding rows for {len(vocabulary)} tokens",
            fix="train the model with vocab_size equal to the tokenizer's",
        )
    if not config.qk_norm and config.dim % config.heads:
        raise GateError(
            "exportable shape",
            f"transformers' Llama needs dim {config.dim} to be a multiple of heads {config.heads}",
            fix="choose another head count, or qk_norm: true",
        )
    source = Source(
        name=name,
        config=config,
        weights=dict(sorted(model_tensors(model).items())),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        template=CHAT_TEMPLATE_JINJA,
        template_hash=template_hash(tokenizer),
        lineage=dict(sorted(lineage.items())),
        lock=dict(sorted((lock or {}).items())),
    )
    for role, number in source.controls.items():
        if vocabulary.pieces[number].type != CONTROL:
            raise GateError("control ids", f"{role} is '{vocabulary.pieces[number].text}', not a control piece")
    for tensor_name, tensor in source.weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise GateError("finite weights", f"{tensor_name} holds NaN or infinity", fix="dvc repro sft")
    return source
