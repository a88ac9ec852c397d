"""Load the exported Hugging Face directory with our own reader: its weights, its tokenizer, its template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from athanor.base.artifacts import read_json
from athanor.base.errors import InputError
from athanor.catalog.places import is_base, is_checkpoint, slot_folder, tokenizer_folder
from athanor.model.config import ModelConfig
from athanor.model.tensorfile import read_tensors
from athanor.model.transformer import Transformer
from athanor.model.weights import WEIGHTS, fill, load_model
from athanor.tokenizer.chat import check_made_with
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

FACTS_FILE, CONFIG = "athanor.json", "config.json"
MAKE_IT = "name the folder of an export; make repro makes one, models/export/hf"
EXPORT_IT = "export it again: dvc repro export"
QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}


def load_export(folder: str | Path, device: torch.device | str = "cpu") -> tuple[Transformer, Tokenizer]:
    """The exported model in evaluation mode, computing in fp32, and its tokenizer; or a base model's, or a checkpoint's.

    InputError if the directory is missing or incomplete, or if its model was
    trained with another tokenizer or another chat template than this code
    renders: it would answer, and worse.
    """
    folder = Path(folder)
    if is_checkpoint(folder):
        from athanor.catalog.checkpoints import checkpoint_source
        from athanor.export.parity import rebuilt

        source, _ = checkpoint_source(folder, slot_folder(folder))
        return rebuilt(source, "float32").to(device), source.tokenizer
    if is_base(folder):
        tokenizer = _tokenizer(tokenizer_folder(folder))
        model, facts = load_model(folder, device)
        check_made_with(facts, tokenizer, where=str(folder), fix="dvc repro pretrain")
        return model, tokenizer
    if folder.is_file():
        fix = f"name {folder.parent / 'hf'}; athanor chat and athanor serve take GGUF files, too"
        raise InputError("this is a file, and the directory of an export is needed", where=str(folder), fix=fix)
    if not folder.is_dir():
        raise InputError("no exported model here", where=str(folder), fix=MAKE_IT)
    facts = _read(folder, FACTS_FILE)
    tokenizer = _tokenizer(folder)
    check_made_with(facts, tokenizer, where=str(folder / FACTS_FILE), fix=EXPORT_IT)
    config = model_config(_read(folder, CONFIG), str(folder / CONFIG))
    with torch.device("meta"):
        model = Transformer(config)
    path = folder / WEIGHTS
    fill(model, {name: tensor.float() for name, tensor in read_tensors(path).items()}, str(path))
    return model.to(device).eval(), tokenizer


def model_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The shape from a Hugging Face config.json; InputError for an architecture that is not ours."""
    architecture = (values.get("architectures") or ["none"])[0]
    rope = values.get("rope_parameters") or {"rope_type": "default", "rope_theta": values.get("rope_theta")}
    unsupported = [
        architecture not in QK_NORM and f"architecture {architecture}",
        bool(values.get("attention_bias") or values.get("mlp_bias")) and "biases",
        values.get("hidden_act") != "silu" and f"activation {values.get('hidden_act')}",
        rope.get("rope_type", "default") != "default" and f"rope type {rope.get('rope_type')}",
    ]
    if any(unsupported):
        reasons = ", ".join(text for text in unsupported if text)
        raise InputError(f"cannot run a model with {reasons}", where=where, fix=EXPORT_IT)
    try:
        return ModelConfig(
            vocab_size=values["vocab_size"],
            layers=values["num_hidden_layers"],
            dim=values["hidden_size"],
            heads=values["num_attention_heads"],
            kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"],
            ffn_dim=values["intermediate_size"],
            context_tokens=values["max_position_embeddings"],
            rope_theta=float(rope["rope_theta"]),
            norm_eps=values["rms_norm_eps"],
            qk_norm=QK_NORM[architecture],
            tied_embeddings=values["tie_word_embeddings"],
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"a key is missing or odd ({error})", where=where, fix=EXPORT_IT) from None


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        raise InputError("missing; not a directory made by the export stage", where=str(folder / name), fix=MAKE_IT)
    return read_json(folder / name)


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / MODEL_FILE
    if not path.is_file():
        raise InputError("file not found", where=str(path), fix=EXPORT_IT)
    return Tokenizer(path.read_bytes(), str(path))
