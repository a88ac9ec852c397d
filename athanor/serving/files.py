"""What the files of a model say without loading it: why it cannot be served, "" if nothing is known."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from athanor.base.errors import InputError
from athanor.export.gguf_reader import read_header
from athanor.export.places import HF_DIR
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

FACTS_FILE, CONFIG, WEIGHTS = "athanor.json", "config.json", "model.safetensors"
MAX_BYTES = 64 << 20  # of a file that is read whole while looking; the largest, a tokenizer, has some megabytes
ADAPTED = "base.gguf"  # what a LoRA in the same folder is added to


def read_bounded(path: Path) -> bytes:
    """Content of a file. InputError for a pipe or device, which may block or have no end, and for a very large file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InputError("not an ordinary file", where=path, fix="export or fetch it again")
        if status.st_size > MAX_BYTES:
            raise InputError(f"larger than {MAX_BYTES >> 20} MiB", where=path, fix="export or fetch it again")
        return file.read(MAX_BYTES)


def own_problem(files: Mapping[str, Path], facts_file: str = FACTS_FILE, stage: str = "export") -> str:
    for name in (facts_file, CONFIG, MODEL_FILE, WEIGHTS):
        if name not in files or not files[name].is_file():
            return f"{name} is missing. Fix: make it again: dvc repro {stage}"
    facts = json.loads(read_bounded(files[facts_file]))
    facts = facts.get("facts", facts)  # of a stage's own weights they stand beside the shape
    return _mismatch_problem(facts.get("tokenizer_digest"), facts.get("template_hash"), files[MODEL_FILE])


def gguf_problem(path: Path) -> str:
    """Why a GGUF file cannot be served, as far as its header shows; InputError if it has none."""
    if path.suffix != ".gguf":
        return f"{path.name} is no .gguf file. Fix: name a .gguf file or the directory of an export"
    header = read_header(path)
    if header.get("general.type") == "adapter":
        base = path.with_name(ADAPTED)
        fix = f"write it by llama.cpp's convert_hf_to_gguf.py as {base}"
        return "" if base.is_file() else f"it is a LoRA, and its base is missing. Fix: {fix}"
    if header.get("general.type", "model") != "model":
        return f"it holds no model but a part of one ({header['general.type']})"
    if "athanor.template_hash" not in header:
        return ""
    tokenizer = tokenizer_beside(path)
    if tokenizer is None:
        return f"its tokenizer is not beside it. Fix: put the export's {HF_DIR}/{MODEL_FILE} into {path.parent}"
    return _mismatch_problem(header.get("athanor.tokenizer_digest"), header["athanor.template_hash"], tokenizer)


def tokenizer_beside(path: Path) -> Path | None:
    """The SentencePiece model of one of our GGUF files, as the export lays it out or right beside it."""
    candidates = (path.parent / HF_DIR / MODEL_FILE, path.parent / MODEL_FILE)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _mismatch_problem(tokenizer: str | None, template: str | None, path: Path) -> str:
    actual_digest, actual_template = identity(read_bounded(path))
    if tokenizer != actual_digest:
        return f"it was trained with another tokenizer ({tokenizer}) than the one beside it ({actual_digest})"
    if template != actual_template:
        return f"it was trained with another chat template ({template}) than this code renders ({actual_template})"
    return ""


@lru_cache(maxsize=8)
def identity(model: bytes) -> tuple[str, str]:
    """Digest of a SentencePiece model and hash of the template that this code renders with it."""
    tokenizer = Tokenizer(model)
    return tokenizer.digest, template_hash(tokenizer)
