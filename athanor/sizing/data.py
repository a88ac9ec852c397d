"""What there is to train on, from the stages' manifests where they ran and from params.yaml where not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.sizing.laws import PYTHON, WEB, LossLaw
from athanor.sources import messages
from athanor.sources.params import FilesSource, HuggingFaceSource, PythonSource
from athanor.text import globs

PYTHON_TOKENS, BYTES_PER_TOKEN = 2_500_000, 3.5  # of the standard library, with 4,096 ids
PROSE_BYTES_PER_TOKEN = 4.3
MADE_TOKENS, WRITTEN_TOKENS = 35, 350  # of a conversation: an exercise of ours; one of a person or a large model
# Of a smaller vocabulary more: by the micro build (1,024 ids) and the default's (4,096).
MADE_VOCABULARY, VOCABULARY_EXPONENT = 4096, -0.27
# Of a novel in Japanese, 5,184 ids: English by the letter, and Japanese by 7 bytes a token.
SPELLED, IN_SCRIPT = 3.2, 0.5
IDENTITY_ROWS = 102  # of each repeat of the source identity
DOCSTRINGS_FOUND = 0.9  # of the rows that its maxima allow
TEMPLATE_TOKENS = 5  # of a question with its answer
SUPERVISED = 0.42  # of the tokens of conversations
PACKED = 0.985  # of the rows are tokens


LOOK_BYTES = 4_000_000  # of conversations of one's own that are read


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


def conversation_tokens(built: Mapping[str, Any], counted: Mapping[str, int] | None = None) -> int:
    """The same from params.yaml and files of one's own alone: within some percent of the micro and the default build.

    `counted`: rows of sources that are files, where they were other files.
    """
    vocabulary = built["model"].vocab_size or built["tokenizer"].vocab_size
    made = own_text = (vocabulary / MADE_VOCABULARY) ** VOCABULARY_EXPONENT
    if built["clean"].rules.prose.min_ascii_fraction is None:  # as `athanor new` writes it for text in another script
        made, own_text = SPELLED, IN_SCRIPT
    sources = [(source, *_rows(source, built, made, own_text)) for source in built["instruct"].sources]
    sources = [
        (source, (counted or {}).get(source.name, rows) if getattr(source, "files", None) else rows, each)
        for source, rows, each in sources
    ]
    mean = sum(rows * each for _, rows, each in sources) / max(sum(rows for _, rows, _ in sources), 1)
    tokens = own = 0.0
    # One's own first: they bound others.
    for source, rows, each in sorted(sources, key=lambda source: not getattr(source[0], "files", None)):
        use = built["sft_data"].sources.get(source.name)
        if use is not None and use.repeats:  # a follow-up comes after another conversation
            read = rows * (each * (use.repeats + use.follow_ups) + mean * use.follow_ups)
            own += read if getattr(source, "files", None) else 0.0
            tokens += min(read, use.times_own * own) if use.times_own and own else read
    share = built["sft_data"].replay_share
    return int(tokens * (1 + SUPERVISED * share / (1 - share)) / PACKED)


def _rows(source: Any, built: Mapping[str, Any], made: float, own_text: float) -> tuple[float, float]:
    """Conversations of a source, and the tokens of one."""
    if source.type == "exercises":
        return sum(source.categories.values()) + source.multi_turn_rows, MADE_TOKENS * made
    if source.type == "docstrings":
        return max(DOCSTRINGS_FOUND * sum(source.max_rows.values()), source.min_rows), MADE_TOKENS * made
    if source.type == "identity":
        return IDENTITY_ROWS * source.repeats, MADE_TOKENS * made
    if source.files:
        with contextlib.suppress(InputError):  # told by the stage
            files = [path for _, path in messages.find(source)]
            if sum(path.stat().st_size for path in files) <= LOOK_BYTES:
                texts = [[message.content for message in row.messages] for row in messages.conversations(source, 1.0)]
                size = sum(len(text.encode()) for row in texts for text in row)
                pairs = sum(len(row) for row in texts) / 2
                tokens = size / BYTES_PER_TOKEN * own_text + TEMPLATE_TOKENS * pairs
                return len(texts), min(tokens / max(len(texts), 1), built["model"].context_tokens)
    return (source.max_rows or 10_000) * (2 if source.as_typed else 1), min(
        WRITTEN_TOKENS, built["model"].context_tokens
    )
