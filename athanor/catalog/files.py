"""What the files of a model say without loading it: why it cannot be served, "" if nothing is known."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from athanor.base.errors import InputError
from athanor.catalog.places import HF_DIR
from athanor.export.gguf_reader import read_header
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

FACTS_FILE, CONFIG, WEIGHTS = "athanor.json", "config.json", "model.safetensors"
MAX_BYTES = 64 << 20  # of a file that is read whole while looking; the largest, a tokenizer, has some megabytes
ADAPTED, TEMPLATE = "base.gguf", "chat_template.jinja"  # what a LoRA in the same folder is added to, and its layout


def read_bounded(path: Path) -> bytes:
    """Content of a file. InputError for a pipe or device, which may block or have no end, and for a very large file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            what = f"not an ordinary file of at most {MAX_BYTES >> 20} MiB"
            raise InputError(what, where=path, fix="export or fetch it again")
        return file.read(MAX_BYTES)


def read_object(path: Path) -> dict[str, Any]:
    """A bounded file of JSON that is an object."""
    return dict(json.loads(read_bounded(path)))


def own_problem(files: Mapping[str, Path], facts_file: str = FACTS_FILE) -> str:
    """Of an export, or of a base model, whose facts are in its configuration."""
    for name in (facts_file, CONFIG, MODEL_FILE, WEIGHTS):
        if name not in files or not files[name].is_file():
            return f"{name} is missing. Fix: make it again: athanor repro"
    facts = read_object(files[facts_file])
    facts = facts.get("facts", facts)  # of a stage's own weights they are below the shape
    return _mismatch_problem(facts.get("tokenizer_digest"), facts.get("template_hash"), files[MODEL_FILE])


def gguf_problem(path: Path) -> str:
    """Why a GGUF file cannot be served, as far as its header shows; InputError if it has none."""
    if path.suffix != ".gguf":
        return f"{path.name} is no .gguf file. Fix: name a .gguf file or the directory of an export"
    header = read_header(path)
    if (kind := header.get("general.type", "model")) == "adapter":
        base = path.with_name(ADAPTED)
        fix = f"write it by llama.cpp's convert_hf_to_gguf.py as {base}"
        return "" if base.is_file() else f"it is a LoRA, and its base is missing. Fix: {fix}"
    if kind != "model":
        return f"it holds no model but a part of one ({kind})"
    if "athanor.template_hash" not in header:
        return ""
    if (tokenizer := tokenizer_beside(path)) is None:
        return f"its tokenizer is missing. Fix: put the export's {HF_DIR}/{MODEL_FILE} into {path.parent}"
    return _mismatch_problem(header.get("athanor.tokenizer_digest"), header["athanor.template_hash"], tokenizer)


def tokenizer_beside(path: Path) -> Path | None:
    """The SentencePiece model of one of our GGUF files, as the export lays it out or in the same folder."""
    candidates = (path.parent / HF_DIR / MODEL_FILE, path.parent / MODEL_FILE)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def template_beside(adapter: Path) -> str:
    """The chat template that a LoRA was trained with; "" where only its base has one."""
    path = adapter.parent / HF_DIR / TEMPLATE
    return read_bounded(path).decode() if path.is_file() else ""


def _mismatch_problem(tokenizer: str | None, template: str | None, path: Path) -> str:
    own, rendered = identity(read_bounded(path))
    for name, wanted, here in (("tokenizer", tokenizer, own), ("chat template", template, rendered)):
        if wanted != here:
            return f"it was trained with another {name} ({wanted}) than the one here ({here})"
    return ""


@lru_cache(maxsize=8)
def identity(model: bytes) -> tuple[str, str]:
    """Digest of a SentencePiece model and hash of the template that this code renders with it."""
    tokenizer = Tokenizer(model)
    return tokenizer.digest, template_hash(tokenizer)
