"""What an exported model was made from, as hashes that go into its files and can be compared again.

No commit: equal inputs make equal files, and a commit can only be made after
them. The hashes that DVC writes into dvc.lock are there instead, and Git finds
the commits with them: `git log --all -S<MD5> -- dvc.lock`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from athanor.artifacts import MANIFEST, manifest_digest, sha256_file
from athanor.errors import InputError

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
# As dvc.yaml names them: whole folders where the stage reads all, else their manifest.
WHOLE = ("tokenizer", "sft", "eval")
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


def locked() -> dict[str, str]:
    """The same inputs with the hashes that dvc.lock has for them."""
    paths = [folder if name in WHOLE else folder / MANIFEST for name, folder in MANIFESTS.items()]
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
