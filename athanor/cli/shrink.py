"""A checkpoint's weights without optimiser state, as a Hugging Face directory.

    python -m athanor shrink SOURCE OUT [--dtype float32 | bfloat16 | float16]

SOURCE: an id from `athanor slots` (its newest checkpoint), or a checkpoint's
folder. `athanor chat --model OUT`, transformers and lm_eval read OUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from athanor.base.artifacts import manifest_digest, new_dir, read_json, read_manifest, sha256_file
from athanor.base.errors import InputError
from athanor.cli import slots
from athanor.export.huggingface import DTYPES, write_huggingface
from athanor.export.source import TOKENIZER, Source, make_source
from athanor.export.vocabulary import Vocabulary
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import fill, load_config
from athanor.runtime.machine import anchor
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer
from athanor.training import checkpoint


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a slot's id, or a checkpoint's folder")
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise InputError("exists", where=str(args.out), fix="name a directory that does not exist")
    source = Path(args.source)
    if not source.is_dir():
        source = newest_checkpoint(slots.choose(slots.find(anchor()), args.source).path)
    step, bytes_before, bytes_after = shrink(source, args.out, args.dtype)
    result = f"{slots.size(bytes_after)} in {args.out} ({bytes_after / bytes_before:.0%})"
    print(f"step {step:,}: {slots.size(bytes_before)} with optimiser state, {result}")
    return 0


# A checkpoint's weights, checked against its slot and without what only training needs; as a Hugging Face directory.

BASE = Path("models/base")
_WEIGHTS = "model."  # of the names in a checkpoint; the rest is optimiser, history, guard and random states


def newest_checkpoint(slot: Path) -> Path:
    """The newest checkpoint of a slot; it is not read."""
    checkpoints = checkpoint.steps(slot)
    if not checkpoints:
        raise InputError("no checkpoint in it", where=str(slot), fix="athanor slots lists what there is")
    return checkpoints[0]


def shrink(source: Path, out: Path, dtype: str) -> tuple[int, int, int]:
    """Write the weights of one checkpoint (`SLOT/step_N`) to `out`; returns its step, its bytes and those of `out`.

    InputError if any byte of it is torn.
    """
    source = source.resolve()
    model_source = checkpoint_source(source, slot_of(source))[0]
    with new_dir(out) as folder:
        write_huggingface(folder, model_source, dtype)
    return checkpoint.step_of(source), slots.bytes_of(source), slots.bytes_of(out)


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
    """The slot of a checkpoint; those from further back lie one folder deeper."""
    source = source.resolve()
    parent = source.parent
    slot = parent.parent if parent.name == checkpoint.ANCHORS else parent
    if source not in checkpoint.steps(parent) or not (slot / "facts.json").is_file():
        raise InputError("not a checkpoint of a slot", where=str(source), fix="name .athanor/slots/STAGE/ID/step_N")
    return slot


def _model_config(facts: dict[str, Any], slot: Path) -> ModelConfig:
    if "model" in facts["params"]:
        return ModelConfig.from_dict(facts["params"]["model"])
    read_manifest(BASE, "model", 1)
    if facts["inputs"].get("base") != manifest_digest(BASE):
        raise InputError(f"was trained from another {BASE}", where=str(slot), fix=f"dvc checkout {BASE}")
    return load_config(BASE)[0]
