"""A checkpoint without what only training needs: its weights as a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from athanor.artifacts import manifest_digest, new_dir, read_json, read_manifest
from athanor.errors import InputError
from athanor.export.huggingface import write_huggingface
from athanor.export.lineage import TOKENIZER
from athanor.export.source import make_source
from athanor.export.vocabulary import Vocabulary
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.tokenizer.tokenizer import Tokenizer
from athanor.training import checkpoint
from athanor.training.weights import fill, load_config

BASE = Path("models/base")
_WEIGHTS = "model."  # of the names in a checkpoint; the rest is optimiser, history, guard and random states


@dataclass(frozen=True)
class Shrunk:
    """Sizes in bytes of the checkpoint and of what was made of it."""

    step: int
    before: int
    after: int


def newest(slot: Path) -> Path:
    """The newest checkpoint of a slot, not looked into."""
    found = checkpoint.steps(slot)
    if not found:
        raise InputError("no checkpoint in it", where=str(slot), fix="athanor slots lists what there is")
    return found[0]


def shrink(source: Path, out: Path, dtype: str) -> Shrunk:
    """Write the weights of one checkpoint (`SLOT/step_N`) to `out`; InputError if any byte of it is torn.

    The shape comes from the slot for pretraining and from models/base for
    fine-tuning, the tokenizer from models/tokenizer; each must be the one that
    the slot was trained with.
    """
    facts = read_json(_slot(source) / "facts.json")
    tokenizer = Tokenizer.load(TOKENIZER)
    if facts["inputs"].get("tokenizer") not in (tokenizer.digest, manifest_digest(TOKENIZER)):
        raise InputError("was trained with another tokenizer", where=str(source), fix=f"dvc checkout {TOKENIZER}")
    config = _shape(facts, source)
    saved = checkpoint.load(source)
    tensors = {
        name.removeprefix(_WEIGHTS): tensor for name, tensor in saved.tensors.items() if name.startswith(_WEIGHTS)
    }
    with torch.device("meta"):
        model = Transformer(config)
    fill(model, tensors, str(source))
    name = f"{_slot(source).parent.name}-step-{saved.step}"
    vocabulary = Vocabulary.load(TOKENIZER / "tokenizer.model")
    with new_dir(out) as folder:
        write_huggingface(folder, make_source(name, model, tokenizer, vocabulary, {}), dtype)
    return Shrunk(saved.step, _size(source), _size(out))


def _slot(source: Path) -> Path:
    """The slot of a checkpoint; those from further back lie one folder deeper."""
    parent = source.resolve().parent
    slot = parent.parent if parent.name == checkpoint.ANCHORS else parent
    if not (slot / "facts.json").is_file():
        raise InputError("not a checkpoint of a slot", where=str(source), fix="name .athanor/slots/STAGE/ID/step_N")
    return slot


def _shape(facts: dict[str, Any], source: Path) -> ModelConfig:
    if "model" in facts["params"]:
        return ModelConfig.from_dict(facts["params"]["model"])
    read_manifest(BASE, "model", 1)
    if facts["inputs"].get("base") != manifest_digest(BASE):
        raise InputError(f"was trained from another {BASE}", where=str(source), fix=f"dvc checkout {BASE}")
    return load_config(BASE)[0]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
