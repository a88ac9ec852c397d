"""A checkpoint's weights, checked against its slot and without what only training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from athanor.base.artifacts import manifest_digest, read_json, read_manifest, sha256_file
from athanor.base.errors import InputError
from athanor.catalog.places import BASE, slot_folder
from athanor.export.source import TOKENIZER, Source, make_source
from athanor.export.vocabulary import Vocabulary
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import fill, load_config
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer
from athanor.training import checkpoint

_WEIGHTS = "model."  # of the names in a checkpoint; the rest is optimiser, history, guard and random states


def checkpoint_source(folder: Path, slot: Path, tokenizer_dir: Path = TOKENIZER) -> tuple[Source, str]:
    """The model of a checkpoint of a slot, and the hash of the checkpoint's tensors; InputError if any byte is torn.

    The shape comes from the slot for pretraining and from models/base for
    fine-tuning; that and the tokenizer must be those the slot was trained with.
    """
    facts = read_json(slot / "facts.json")
    tokenizer = Tokenizer.load(tokenizer_dir)
    if facts["inputs"].get("tokenizer") not in (tokenizer.digest, manifest_digest(tokenizer_dir)):
        raise InputError("was trained with another tokenizer", where=str(slot), fix=f"dvc checkout {tokenizer_dir}")
    config = _model_config(facts, slot)
    expected_sha256, path = read_json(folder / checkpoint.STATE).get("tensors_sha256"), folder / checkpoint.TENSORS
    if not path.is_file() or sha256_file(path) != expected_sha256:
        raise InputError("missing or damaged", where=str(path))
    with safe_open(path, framework="pt") as file:  # the optimiser's tensors, two thirds of it, are not read
        names = [name for name in file.keys() if name.startswith(_WEIGHTS)]
        tensors = {name.removeprefix(_WEIGHTS): file.get_tensor(name).float() for name in names}
    with torch.device("meta"):
        model = Transformer(config)
    fill(model, tensors, str(path))
    vocabulary = Vocabulary.load(tokenizer_dir / MODEL_FILE)
    name = f"{slot.parent.name}-step-{checkpoint.step_of(folder)}"
    return make_source(name, model.eval(), tokenizer, vocabulary, {}), expected_sha256


def slot_of(source: Path) -> Path:
    """The slot of a checkpoint; InputError if it is none."""
    source = source.resolve()
    slot = slot_folder(source)
    if source not in checkpoint.steps(source.parent) or not (slot / "facts.json").is_file():
        raise InputError("not a checkpoint of a slot", where=str(source), fix="name .athanor/slots/STAGE/ID/step_N")
    return slot


def _model_config(facts: dict[str, Any], slot: Path) -> ModelConfig:
    if "model" in facts["params"]:
        return ModelConfig.from_dict(facts["params"]["model"])
    read_manifest(BASE, "model", 1)
    if facts["inputs"].get("base") != manifest_digest(BASE):
        raise InputError(f"was trained from another {BASE}", where=str(slot), fix=f"dvc checkout {BASE}")
    return load_config(BASE)[0]
