"""What there is to train on, from the stages' manifests where they ran and from params.yaml where not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.sizing.laws import PYTHON, WEB, LossLaw
from athanor.sources.params import FilesSource, HuggingFaceSource, PythonSource
from athanor.text import globs

PYTHON_TOKENS, BYTES_PER_TOKEN = 2_500_000, 3.5  # of the standard library, with 4,096 ids
PROSE_BYTES_PER_TOKEN = 4.3
MADE_TOKENS, WRITTEN_TOKENS = 47, 350  # of a conversation: an exercise of ours; one of a person or a large model
PACKED = 0.96  # of the rows are tokens of conversations


@dataclass(frozen=True)
class Data:
    """What there is to train on: documents (tokens, of which so many are different) and conversations."""

    unique_tokens: float
    bytes_per_token: float
    sft_tokens: int  # of one epoch
    vocab_size: int | None  # None: by the size of the model
    law: LossLaw
    eval_tokens: int = 0  # of held-out text, read by all models
    cuttable: bool = False  # of the hub: less of it can be read, of documents and of conversations

    @property
    def most_weights(self) -> float:
        return self.law.most_weights * self.unique_tokens


def data_of(root: Path, built: Mapping[str, Any]) -> Data:
    """What these parameters, built, give to train on."""
    hub = _of_hub(built)
    law: LossLaw = WEB if hub else PYTHON
    unique, bytes_per_token = _documents(root, built, hub)
    vocabulary = None if hub else built["model"].vocab_size or built["tokenizer"].vocab_size
    return Data(unique, bytes_per_token, _conversations(root, built), vocabulary, law, eval_tokens(built), hub)


def eval_tokens(built: Mapping[str, Any]) -> int:
    """Tokens of held-out text that `eval` reads, with both models."""
    read = 2 * len(built["mixture"].sources) * built["eval"].bpb_max_bytes_per_source
    return int(read / (PROSE_BYTES_PER_TOKEN if _of_hub(built) else BYTES_PER_TOKEN))


def _of_hub(built: Mapping[str, Any]) -> bool:
    return any(isinstance(source, HuggingFaceSource) for source in built["download"].sources)


def _documents(root: Path, built: Mapping[str, Any], hub: bool) -> tuple[float, float]:
    """Different tokens, and bytes for each. A preset of hub sources reads its text about once."""
    sources = built["download"].sources
    if hub:
        return float(built["pretrain"].tokens), PROSE_BYTES_PER_TOKEN
    manifest = root / "data/shards/manifest.json"
    if manifest.is_file():
        made = read_json(manifest)["sources"]
        if set(made) == set(built["mixture"].sources):
            tokens = sum(source["unique_tokens"] for source in made.values())
            text = sum(source["unique_tokens"] * source["bytes_per_token"] for source in made.values())
            return float(tokens), text / tokens
    tokens = 0.0
    for source in sources:
        if isinstance(source, PythonSource):
            tokens += PYTHON_TOKENS
        elif isinstance(source, FilesSource):
            tokens += sum(path.stat().st_size for _, path in globs.find(source.globs)) / BYTES_PER_TOKEN
        else:
            tokens += (getattr(source, "max_bytes", None) or 0) / BYTES_PER_TOKEN or PYTHON_TOKENS
    return max(tokens, 1.0), BYTES_PER_TOKEN


def _conversations(root: Path, built: Mapping[str, Any]) -> int:
    """Tokens of an epoch of fine-tuning, with what fills the rows up."""
    manifest = root / "data/sft/manifest.json"
    if manifest.is_file():
        made = read_json(manifest)
        if set(made.get("sources", built["sft_data"].sources)) == set(built["sft_data"].sources):
            return int(made["counts"]["train"]["rows"] * made["context_tokens"])
    return conversation_tokens(built)


def conversation_tokens(built: Mapping[str, Any]) -> int:
    """The same from params.yaml alone, about."""
    tokens = 0.0
    for source in built["instruct"].sources:
        if source.type == "exercises":
            tokens += MADE_TOKENS * (sum(source.categories.values()) + source.multi_turn_rows)
        elif source.type == "messages":
            tokens += min(WRITTEN_TOKENS, built["model"].context_tokens) * (source.max_rows or 10_000)
        else:
            tokens += MADE_TOKENS * source.min_rows
    return int(tokens / PACKED / (1 - built["sft_data"].replay_share / 4))
