"""What every exporter starts from: weights, shape, vocabulary and template, checked against each other; and the lineage.

The lineage is what a model was made from, as hashes that go into its files and can be compared again. No commit: equal
inputs make equal files, and a commit can only be made after them. The hashes that DVC writes into dvc.lock are there
instead, and Git finds the commits with them: `git log --all -S<MD5> -- dvc.lock`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from athanor.base.artifacts import MANIFEST, manifest_digest, sha256_file
from athanor.base.errors import GateError, InputError
from athanor.export.vocabulary import CONTROL, Vocabulary
from athanor.model.config import ModelConfig
from athanor.model.transformer import Transformer
from athanor.model.weights import load_model, model_tensors
from athanor.tokenizer.chat import CHAT_TEMPLATE_JINJA, check_made_with, template_hash
from athanor.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """A model ready to be written in other formats.

    name: general name of the model; lineage: digests of the artifacts and metrics it was made from, by name;
    lock: the hashes that dvc.lock has for them, by path (see lineage.py).
    """

    name: str
    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: str
    template_hash: str
    lineage: Mapping[str, str]
    lock: Mapping[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """`qwen3` is exactly Llama plus a norm per query and key head; nothing else is mapped."""
        return "qwen3" if self.config.qk_norm else "llama"

    @property
    def controls(self) -> dict[str, int]:
        """Ids of the tokens that text can never produce, by role."""
        names = ("pad", "bos", "eos", "system", "user", "assistant", "stop")
        return {name: int(getattr(self.tokenizer, name)) for name in names}


def load_source(
    model_dir: str | Path,
    tokenizer_dir: str | Path,
    name: str,
    lineage: Mapping[str, str],
    lock: Mapping[str, str] | None = None,
) -> Source:
    """Read a model and its tokenizer; InputError or GateError if they do not belong together."""
    model, facts = load_model(model_dir)
    tokenizer = Tokenizer.load(tokenizer_dir)
    check_made_with(facts, tokenizer, where=str(model_dir), fix="dvc repro sft")
    vocabulary = Vocabulary.load(Path(tokenizer_dir) / "tokenizer.model")
    return make_source(name, model, tokenizer, vocabulary, lineage, lock)


def make_source(
    name: str,
    model: Transformer,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    lineage: Mapping[str, str],
    lock: Mapping[str, str] | None = None,
) -> Source:
    config = model.config
    # Extra rows would take probability in every runtime: nothing masks them.
    if not len(vocabulary) == tokenizer.vocab_size == config.vocab_size:
        raise GateError(
            "vocabulary size",
            f"{config.vocab_size} embedding rows for {len(vocabulary)} tokens",
            fix="train the model with vocab_size equal to the tokenizer's",
        )
    if not config.qk_norm and config.dim % config.heads:
        raise GateError(
            "exportable shape",
            f"transformers' Llama needs dim {config.dim} to be a multiple of heads {config.heads}",
            fix="choose another head count, or qk_norm: true",
        )
    source = Source(
        name=name,
        config=config,
        weights=dict(sorted(model_tensors(model).items())),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        template=CHAT_TEMPLATE_JINJA,
        template_hash=template_hash(tokenizer),
        lineage=dict(sorted(lineage.items())),
        lock=dict(sorted((lock or {}).items())),
    )
    for role, number in source.controls.items():
        if vocabulary.pieces[number].type != CONTROL:
            raise GateError("control ids", f"{role} is '{vocabulary.pieces[number].text}', not a control piece")
    for tensor_name, tensor in source.weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise GateError("finite weights", f"{tensor_name} holds NaN or infinity", fix="dvc repro sft")
    return source


MODEL, TOKENIZER, STAGE = Path("models/sft"), Path("models/tokenizer"), "export"
MANIFESTS = {
    "raw": Path("data/raw"),
    "instruct": Path("data/instruct"),
    "clean": Path("data/clean"),
    "tokenizer": TOKENIZER,
    "shards": Path("data/shards"),
    "sft_data": Path("data/sft"),
    "base": Path("models/base"),
    "sft": MODEL,
    "eval": Path("data/eval"),
}
METRICS = ("train_tokenizer", "pretrain", "sft", "eval")
# Inputs that dvc.yaml names as whole folders, because the stage reads all of them; of the others it names the manifest.
FOLDER_INPUTS = ("tokenizer", "sft", "eval")
_METRIC = "metrics."


def path_of(name: str) -> Path:
    """The file whose SHA-256 is the lineage entry `name`."""
    if name.startswith(_METRIC):
        return Path("metrics") / f"{name.removeprefix(_METRIC)}.json"
    if name not in MANIFESTS:
        raise InputError(f"'{name}' is no artifact of this pipeline", where="lineage", fix="use the code that wrote it")
    return MANIFESTS[name] / MANIFEST


def manifests() -> dict[str, str]:
    """SHA-256 of the manifest of every artifact behind the model."""
    return {name: manifest_digest(folder) for name, folder in MANIFESTS.items()}


def metrics() -> dict[str, str]:
    """SHA-256 of every metrics file behind the model card, by its name in the lineage."""
    return {f"{_METRIC}{name}": sha256_file(path_of(f"{_METRIC}{name}")) for name in METRICS}


def lock_hashes() -> dict[str, str]:
    """The same inputs with the hashes that dvc.lock has for them."""
    paths = [folder if name in FOLDER_INPUTS else folder / MANIFEST for name, folder in MANIFESTS.items()]
    paths += [path_of(f"{_METRIC}{name}") for name in METRICS]
    return {path.as_posix(): dvc_hash(path) for path in paths}


def dvc_hash(path: str | Path) -> str:
    """MD5 of a file as DVC computes it, or of a folder's listing."""
    path = Path(path)
    if not path.is_dir():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    rows = [{"md5": dvc_hash(path / name), "relpath": name} for name in files]
    return hashlib.md5(json.dumps(rows, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"
