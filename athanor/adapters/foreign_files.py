"""The directory of a foreign model: which ones can be trained here, and which files decide the result."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from athanor.base.artifacts import read_json, sha256_file
from athanor.base.errors import InputError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others depend on the length of the row
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"[\w-][\w.-]*\.safetensors")
# Of the base, what a tokenizer needs besides its configuration; a licence goes along with the weights.
COPIED = re.compile(
    r"tokenizer\.(json|model)|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json|added_tokens\.json"
    r"|licen[cs]e.*|notice.*|use_policy\.md",
    re.IGNORECASE,
)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a foreign directory; InputError if such a model cannot be trained here."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        fix = "name a directory with config.json, tokenizer.json and *.safetensors"
        raise InputError("no Hugging Face model", where=str(folder), fix=fix)
    values = read_json(path)
    model_type = values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InputError(
            f"model_type '{model_type}' is not supported", where=str(path), fix=f"use {', '.join(MODEL_TYPES)}"
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        fix = f"use {', '.join(ROPE_TYPES)}"
        raise InputError(f"rope type '{rope_type}' is not supported", where=str(path), fix=fix)
    if "sliding_attention" in (values.get("layer_types") or ()) or values.get("use_sliding_window"):
        raise InputError("sliding windows are not supported", where=str(path), fix="set use_sliding_window to false")
    if values.get("quantization_config"):
        fix = "use the checkpoint that they were made from"
        raise InputError("the weights are quantised", where=str(path), fix=fix)
    return values


def trained_in_bf16(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says so. Such a model has activations beyond fp16's range."""
    return values.get("dtype", values.get("torch_dtype")) == "bfloat16"


def weight_files(base: str | os.PathLike[str]) -> list[str]:
    """Names of the files with weights, in order. InputError for an index that names anything but files beside it."""
    base = Path(base)
    if (base / INDEX).is_file():
        index = read_json(base / INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        for name in names:
            if not isinstance(name, str) or not WEIGHTS.fullmatch(name) or not (base / name).is_file():
                what = f"'{name}' is no name of a safetensors file beside it"
                raise InputError(what, where=str(base / INDEX), fix="fetch the whole model again, from one you trust")
        if names:
            return sorted(set(names))
    elif (base / "model.safetensors").is_file():
        return ["model.safetensors"]
    fix = "save it again with transformers: save_pretrained writes safetensors"
    raise InputError("no safetensors with weights", where=str(base), fix=fix)


def files_of(base: str | os.PathLike[str]) -> list[Path]:
    """Every file of the base that decides what is trained and written, by name.

    InputError for a link that leads out of the directory: what it points to would
    be copied into the export. Only links into a hub's own cache are as they should be.
    """
    names = {"config.json", "generation_config.json", "tokenizer_config.json", INDEX, *weight_files(base)}
    folder = Path(base).resolve()
    paths = sorted(path for path in folder.iterdir() if path.name in names or COPIED.fullmatch(path.name))
    for path in paths:
        target = path.resolve()
        in_hub_cache = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
        if not in_hub_cache and folder not in target.parents:
            fix = "put the file itself there, if you trust it"
            raise InputError(f"it is a link to {target}, outside the model", where=str(path), fix=fix)
    return [path for path in paths if path.is_file()]


def base_digests(base: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of each of `files_of`, by name."""
    read_config(base)
    return {path.name: sha256_file(path) for path in files_of(base)}
