"""A foreign model with its LoRA merged, as the directory that transformers reads: the base's files, with other weights.

Files of weights keep their names and their share of the tensors, so a large
model is merged one file at a time. The template is the layout it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from athanor.adapters import lora
from athanor.adapters.foreign import load_foreign
from athanor.adapters.foreign_files import COPIED, INDEX, files_of, weight_files
from athanor.adapters.lora import LoraSettings
from athanor.adapters.tokenizer import CONFIG as TOKENIZER_CONFIG
from athanor.adapters.tokenizer import ForeignTokenizer
from athanor.base.artifacts import read_json, write_bytes, write_json, write_text
from athanor.base.errors import GateError
from athanor.base.templates import markdown
from athanor.model.tensorfile import read_tensors, write_tensors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HF_DIR = "hf"
WIDER_DTYPE_FIX = "set export.dtype to bfloat16 or float32"
# Tokens of a window, for processors that are slow in 16 bits; what overflows does so at the first ones.
MAX_EXPORT_DTYPE_TOKENS = 64
MAX_KL = 0.05  # nats; far above what rounding to 16 bits does to a model that is sure of its words


def write_merged(
    folder: Path, base: Path, tokenizer: ForeignTokenizer, adapters: Mapping[str, Tensor], scale: float, dtype: str
) -> None:
    """Write the directory. Equal inputs make equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files, remaining = files_of(base), lora.pairs(adapters)
    size = 0
    for name in weight_files(base):
        weights = read_tensors(base / name)
        for key, weight in weights.items():
            factors = remaining.pop(key.removesuffix(".weight"), None)
            merged = weight if factors is None else lora.merged(weight, *factors, scale)
            weights[key] = merged.to(DTYPES[dtype])
            if not bool(torch.isfinite(weights[key]).all()):
                raise GateError("finite weights", f"{key} overflows {dtype}", fix=WIDER_DTYPE_FIX)
            size += weights[key].nbytes
        write_tensors(folder / name, weights, {"format": "pt"})
    if remaining:
        raise GateError("mapped weights", f"the base has no weight for '{min(remaining)}'", where=str(base))
    if (base / INDEX).is_file():
        write_json(folder / INDEX, {**read_json(base / INDEX), "metadata": {"total_size": size}})
    for path in files:
        if COPIED.fullmatch(path.name):
            write_bytes(folder / path.name, path.read_bytes())
    write_json(folder / "config.json", {**read_json(base / "config.json"), "dtype": dtype, "torch_dtype": dtype})
    write_json(folder / "generation_config.json", generation_config(base, tokenizer))
    write_json(folder / TOKENIZER_CONFIG, tokenizer_config(base))
    write_text(folder / "chat_template.jinja", tokenizer.template)


def generation_config(base: Path, tokenizer: ForeignTokenizer) -> dict[str, Any]:
    """Greedy decoding that ends where the base ends and where a turn ends. No other setting of the base is kept, such
    as a penalty on repetition, which would punish the words of the question."""
    path = base / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    ends = values.get("eos_token_id", read_json(base / "config.json").get("eos_token_id"))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    copied = {key: values[key] for key in ("bos_token_id", "pad_token_id") if key in values}
    return {**copied, "eos_token_id": [*dict.fromkeys([tokenizer.stop, *ends])], "do_sample": False}


def tokenizer_config(base: Path) -> dict[str, Any]:
    """The base's tokenizer_config.json without its template, which stands in chat_template.jinja alone."""
    path = base / TOKENIZER_CONFIG
    values = read_json(path) if path.is_file() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {key: item for key, item in values.items() if key != "chat_template"}


@torch.no_grad()
def check_merged(
    folder: Path,
    base: Path,
    settings: LoraSettings,
    adapters: Mapping[str, Tensor],
    windows: Sequence[Tensor],
    dtype: str,
    tolerance: float,
) -> dict[str, float]:
    """The merged directory in transformers against base and adapter: largest logit difference, KL (nats), same top id.

    GateError where they are apart by more than `tolerance` (of logits up to 10, more in proportion) in fp32, by more
    than rounding explains in 16 bits, or where the directory, run in its own type, gives no numbers. One model at a
    time is in memory.
    """
    max_tokens = max(window.shape[1] for window in windows)
    model = load_foreign(base, settings, max_tokens, seed=0)
    for name, weight in model.named_parameters():
        weight.copy_(adapters[name])
    expected = [model(window) for window in windows]
    del model
    no_adapter = LoraSettings(1, 1.0, 0.0, settings.targets)  # its B is zero
    merged = load_foreign(folder, no_adapter, max_tokens, seed=0)
    logits = [merged(window) for window in windows]
    for weight in merged.causal.parameters():
        weight.data = weight.data.to(DTYPES[dtype])
    if not bool(torch.isfinite(merged(windows[0][:, :MAX_EXPORT_DTYPE_TOKENS])).all()):
        what = f"activations overflow {dtype}: the logits are no numbers"
        raise GateError("merged model", what, where=folder.name, fix=WIDER_DTYPE_FIX)
    max_difference = max(
        float((actual - reference).abs().max()) for actual, reference in zip(logits, expected, strict=True)
    )
    max_logit = max(float(actual.abs().max()) for actual in expected)
    pairs = [
        (actual.log_softmax(-1), reference.log_softmax(-1)) for actual, reference in zip(logits, expected, strict=True)
    ]
    kl = max(float((reference.exp() * (reference - actual)).sum(-1).mean()) for actual, reference in pairs)
    agreement = sum(int((actual.argmax(-1) == reference.argmax(-1)).sum()) for actual, reference in pairs) / sum(
        window.numel() for window in windows
    )
    limit = tolerance * max(1.0, max_logit / 10)
    if (dtype == "float32" and max_difference > limit) or not kl <= MAX_KL:
        what = f"logits are apart by {max_difference:.3g} (limit {limit:.3g}), KL {kl:.3g} (limit {MAX_KL:g})"
        raise GateError("merged model", what, where=folder.name, fix="export.dtype: float32, or report it")
    return {"max_logit_difference": max_difference, "kl_nats": max(0.0, kl), "same_top_token": agreement}


def card(name: str, facts: Mapping[str, Mapping[str, Any]], digests: Mapping[str, str]) -> str:
    """MODEL_CARD.md: what it was made from and how, and how to use it; nothing that differs between equal runs."""
    sections = [(title, _flatten(values)) for title, values in facts.items()]
    return markdown("athanor.adapters", "lora_card.md.j2").render(name=name, facts=sections, digests=digests)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, item in values.items():
        if key == "each":  # values of single items
            continue
        nested = isinstance(item, Mapping)
        rows += (
            _flatten(item, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", json.dumps(item, ensure_ascii=False))]
        )
    return rows
