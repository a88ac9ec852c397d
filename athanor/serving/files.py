"""What the files of a model say without loading it: why it cannot be served, "" if nothing is known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from athanor.base.artifacts import MANIFEST, read_json
from athanor.base.errors import InputError
from athanor.export.gguf_reader import read_header
from athanor.serving.experiments import HF_DIR
from athanor.tokenizer.chat import template_hash
from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

FACTS_FILE, CONFIG, WEIGHTS, INDEX = "athanor.json", "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_BYTES = 64 << 20  # of a file that is read whole while looking; the largest, a tokenizer, has some megabytes
SHRINK = "athanor slots lists checkpoints, athanor shrink ID FOLDER makes a directory to serve of one"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def bounded(path: Path) -> Path:
    """The path; InputError for a file that is too large to be what its name says."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"it has more than {MAX_BYTES >> 20} MiB", where=str(path), fix="export or fetch it again")
    return path


def own_problem(files: Mapping[str, Path], facts_file: str = FACTS_FILE, stage: str = "export") -> str:
    for name in (facts_file, CONFIG, MODEL_FILE, WEIGHTS):
        if name not in files or not files[name].is_file():
            return f"{name} is missing. Fix: make it again: dvc repro {stage}"
    facts = read_json(bounded(files[facts_file]))
    facts = facts.get("facts", facts)  # of a stage's own weights they stand beside the shape
    return _mismatch_problem(facts.get("tokenizer_digest"), facts.get("template_hash"), files[MODEL_FILE])


def gguf_problem(path: Path) -> str:
    """Why a GGUF file cannot be served, as far as its header shows; InputError if it has none."""
    if path.suffix != ".gguf":
        return f"{path.name} is no .gguf file. Fix: name a directory or a .gguf file"
    header = read_header(path)
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
    actual_digest, actual_template = identity(bounded(path).read_bytes())
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


def foreign_problem(files: Mapping[str, Path]) -> str:
    if MANIFEST in files and "tokenizer_config.json" not in files:
        return f"weights of a stage are no export. Fix: {SHRINK}"
    if CONFIG not in files:
        gguf_names = sorted(name for name in files if name.endswith(".gguf"))
        fix = f"name a file: {gguf_names[0]}" if gguf_names else "name a directory with config.json and *.safetensors"
        return f"no Hugging Face model: {CONFIG} is missing. Fix: {fix}"
    if WEIGHTS in files or INDEX in files:
        return ""
    pickled = sorted(name for name in files if name.endswith(PICKLED))
    if pickled:
        return (
            f"{pickled[0]} is a pickle, which can run any code when it is read. "
            "Fix: take the safetensors files of the model, or save it again with save_pretrained"
        )
    return f"no weights: {WEIGHTS} is missing"
