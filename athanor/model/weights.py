"""Model artifacts: a folder with fp32 weights, the config and a manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from athanor.base.artifacts import new_dir, read_json, read_manifest, write_json, write_manifest
from athanor.base.errors import InputError
from athanor.model.config import ModelConfig
from athanor.model.tensorfile import read_tensors, write_tensors
from athanor.model.transformer import Transformer

KIND, VERSION = "model", 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def model_tensors(model: Transformer) -> dict[str, Tensor]:
    """Every parameter in fp32 on the CPU, by its Hugging Face name; a tied matrix once."""
    return {name: weight.detach().to("cpu", torch.float32) for name, weight in model.named_parameters()}


def save_model(
    folder: str | os.PathLike[str],
    model: Transformer,
    config: ModelConfig,
    facts: Mapping[str, Any],
    *,
    parents: Mapping[str, str] | None = None,
    history: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a model artifact whole or not at all; returns its manifest.

    `facts` go into config.json beside the shape (tokenizer digest, template
    hash, ...); equal weights and facts make equal bytes. `history` goes into
    the manifest alone.
    """
    with new_dir(folder) as temporary:
        write_tensors(temporary / WEIGHTS, model_tensors(model), {"format": "pt"})
        write_json(temporary / CONFIG, {"model": config.to_dict(), "facts": dict(facts)})
        counts = {"parameters": config.parameter_count()}
        return write_manifest(temporary, kind=KIND, version=VERSION, counts=counts, parents=parents, **(history or {}))


def load_config(folder: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """The shape and the facts of a model artifact, without its weights."""
    read_manifest(folder, KIND, VERSION)
    content = read_json(Path(folder) / CONFIG)
    return ModelConfig.from_dict(content["model"]), content["facts"]


def load_model(
    folder: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[Transformer, dict[str, Any]]:
    """The model in evaluation mode, and its facts; InputError if weights and config disagree."""
    config, facts = load_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    path = Path(folder) / WEIGHTS
    fill(model, read_tensors(path), str(path))
    return model.to(device).eval(), facts


def fill(model: Transformer, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give a model built on the meta device its weights; names and shapes must match exactly."""
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != actual:
        odd = sorted(set(expected.items()) ^ set(actual.items()))[0]
        raise InputError(
            f"weights do not fit the model's config, first at {odd[0]}", where=where, fix="rebuild it: dvc repro"
        )
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    for weight in model.parameters():
        weight.requires_grad_(True)
    model.restore_rotary()
