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
# Tokens of a conversation, and of its answers: of 4,096 ids, and where another script has these and English is spelled.
MADE = {"exercises": (35.0, 12.5), "docstrings": (32.0, 15.0), "identity": (35.0, 17.5)}
SPELLED = {"exercises": (77.0, 17.0), "docstrings": (77.0, 36.0), "identity": (91.0, 56.0)}
WRITTEN_TOKENS, SUPERVISED = 350, 0.42  # of one by a person or a large model, and the share of its answers
# Of a smaller vocabulary more: by the micro build (1,024 ids) and the default's (4,096).
MADE_VOCABULARY, VOCABULARY_EXPONENT = 4096, -0.27
IN_SCRIPT = 0.7  # of conversations on a novel in Japanese: 5 bytes a token
IDENTITY_ROWS = (102, 82)  # of each repeat of the source identity: without text of one's own, and with it
DOCSTRINGS_FOUND = 0.9  # of the rows that its maxima allow
TEMPLATE_TOKENS = 5  # of a question with its answer
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
    uses, rows, sizes, own = built["sft_data"].sources, {}, {}, 0.0
    # One's own first: they bound others, by the tokens of answers, as chat_data.rows does.
    for source in sorted(built["instruct"].sources, key=lambda source: not getattr(source, "files", None)):
        name, use = source.name, uses.get(source.name)
        if use is None or not use.repeats:
            continue
        rows[name], *sizes[name] = _rows(source, built)
        times = use.repeats + use.follow_ups
        if getattr(source, "files", None):
            rows[name] = (counted or {}).get(name, rows[name])
            own += rows[name] * times * sizes[name][1]
        elif use.times_own and own:
            rows[name] = min(rows[name], use.times_own * own / times / sizes[name][1])
    share = built["sft_data"].replay_share
    tokens, answers = (_epoch(rows, {name: size[i] for name, size in sizes.items()}, uses) for i in (0, 1))
    return int((tokens + answers * share / (1 - share)) / PACKED)


def _epoch(rows: Mapping[str, float], each: Mapping[str, float], uses: Mapping[str, Any]) -> float:
    """The sum over an epoch; a follow-up comes after another conversation, every second time one of its own source."""
    total = 0.0
    for name, count in rows.items():
        others = {other: rows[other] for other in rows if other != name} or rows
        before = sum(each[other] * n for other, n in others.items()) / max(sum(others.values()), 1)
        again = uses[name].follow_ups
        total += count * (each[name] * (uses[name].repeats + again + again // 2) + before * (again - again // 2))
    return total


def _rows(source: Any, built: Mapping[str, Any]) -> tuple[float, float, float]:
    """Conversations of a source, the tokens of one and those of its answers."""
    longest, made = built["model"].context_tokens, MADE
    own_text = more = (
        (built["model"].vocab_size or built["tokenizer"].vocab_size) / MADE_VOCABULARY
    ) ** VOCABULARY_EXPONENT
    if built["clean"].rules.prose.min_ascii_fraction is None:  # as `athanor new` writes it for text in another script
        made, more, own_text = SPELLED, 1.0, IN_SCRIPT
    if source.type in made:
        tokens, answers = (more * each for each in made[source.type])
        if source.type == "exercises":
            return sum(source.categories.values()) + source.multi_turn_rows, tokens, answers
        if source.type == "docstrings":
            return max(DOCSTRINGS_FOUND * sum(source.max_rows.values()), source.min_rows), tokens, answers
        own = any(isinstance(text, FilesSource) for text in built["download"].sources)
        return IDENTITY_ROWS[own] * source.repeats + own * source.text_rows, tokens, answers
    if source.files:
        with contextlib.suppress(InputError):  # told by the stage
            if sum(path.stat().st_size for _, path in messages.find(source)) <= LOOK_BYTES:
                texts = [row.messages for row in messages.conversations(source, 1.0)]
                count, turns = max(len(texts), 1), [turn for row in texts for turn in row]
                tokens, answers = (
                    sum(len(turn.content.encode()) for turn in turns if role in turn.role) * own_text / BYTES_PER_TOKEN
                    for role in ("", "assistant")
                )
                tokens += TEMPLATE_TOKENS * len(turns) / 2
                return len(texts), min(tokens / count, longest), min(answers / count, longest)
    tokens = min(WRITTEN_TOKENS, longest)
    return (source.max_rows or 10_000) * (2 if source.as_typed else 1), tokens, SUPERVISED * tokens
