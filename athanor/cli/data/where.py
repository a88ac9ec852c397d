"""Where in the token files a document is, and whether the tokenizer learned from it.

The token files name no documents. They are found by their ids: equal ids are
equal text, and most documents are ruled out by their length and source alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from athanor.base.artifacts import manifest_digest, read_manifest
from athanor.base.errors import AthanorError
from athanor.base.strict import build
from athanor.cli.data.read import CLEAN, SHARDS, TEXT_BATCH, TOKENIZER, Corpus, Place, built_params
from athanor.data.mixture import mix_sources, plan_mixture
from athanor.data.mixture_params import MixtureParams
from athanor.data.shards import COOLDOWN, KIND, TRAIN, VERSION
from athanor.text.documents import shard_files
from athanor.tokenizer_training.params import TokenizerParams

SAMPLE_BYTES = 2_000_000_000  # of text: the tokenizer's sample of a larger corpus takes minutes to tell


def in_token_files(root: Path, source: str, split: str, text: str) -> dict[str, Any]:
    """Tokens of a text and its places in the streams, or a note why that cannot be told."""
    if not (root / TOKENIZER / "manifest.json").is_file():
        return {"note": "no tokenizer is here yet: dvc repro train-tokenizer"}
    from athanor.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(root / TOKENIZER)
    ids = np.concatenate([[tokenizer.bos], tokenizer.encode_arrays([text])[0], [tokenizer.eos]])
    known: dict[str, Any] = {"tokens": len(ids), "bytes_per_token": round(len(text.encode()) / max(1, len(ids) - 2), 3)}
    if not (root / SHARDS / "manifest.json").is_file():
        return {**known, "note": "no token files are here yet: dvc repro shard"}
    manifest = read_manifest(root / SHARDS, KIND, VERSION)
    if manifest["tokenizer"] != tokenizer.digest:
        return {**known, "note": "data/shards was made with another tokenizer: dvc repro shard"}
    if manifest["parents"]["clean"] != manifest_digest(root / CLEAN):
        known["note"] = "data/shards was made of another data/clean: dvc repro shard"
    dtype, streams = np.dtype(manifest["dtype"]), {}
    if split == "val":
        streams["val"] = _places(root, SHARDS / "val" / source, ids.astype(dtype), None)
    else:
        for part, facts in ((TRAIN, manifest), (COOLDOWN, manifest.get(COOLDOWN))):
            if facts is not None:
                names = sorted(facts["sources"])
                streams[part] = {"source_epochs": 0.0, "places": []}
                if source in names:
                    found = _places(root, SHARDS / part, ids.astype(dtype), names.index(source))
                    streams[part] = {"source_epochs": facts["sources"][source]["epochs"], "places": found}
    return {**known, "streams": streams}


def _places(root: Path, folder: Path, ids: np.ndarray, source: int | None) -> list[dict[str, Any]]:
    """Every document of a folder's token files that equals `ids`: file, number in it, first token in the stream."""
    found, before, documents = [], 0, 0
    for path in sorted((root / folder).glob("*.bin")):
        starts = np.load(path.with_suffix(".idx.npy")).astype(np.int64)
        fits = np.diff(starts) == len(ids)
        if source is not None:
            fits &= np.load(path.with_suffix(".src.npy")) == source
        tokens = np.memmap(path, dtype=ids.dtype, mode="r") if fits.any() else ids
        for number in np.flatnonzero(fits).tolist():
            if np.array_equal(tokens[starts[number] : starts[number + 1]], ids):
                found.append(
                    {
                        "file": path.relative_to(root).as_posix(),
                        "document": number,
                        "token": int(starts[number]),
                        "stream_document": documents + number,
                        "stream_token": before + int(starts[number]),
                    }
                )
        before, documents = before + int(starts[-1]), documents + len(starts) - 1
    return found


def in_tokenizer_sample(corpus: Corpus, place: Place) -> tuple[int | None, str]:
    """How often a training document is in the sample that the tokenizer was trained on, or None and why not."""
    if place.file.parent.parent != CLEAN / "train":
        return 0, "the tokenizer is trained on training documents"
    if sum(row["bytes"] for row in corpus.manifest["counts"]["train"].values()) > SAMPLE_BYTES:
        return None, f"not looked up in a corpus of more than {SAMPLE_BYTES / 1e9:.0f} GB"
    values = built_params(corpus.root, "train-tokenizer")
    try:
        params = build(TokenizerParams, values["tokenizer"], "tokenizer")
        return _sampled(corpus, place, params, build(MixtureParams, values["mixture"], "mixture")), ""
    except (KeyError, AthanorError) as error:
        return None, f"the tokenizer's sample cannot be told ({error})"


def _sampled(corpus: Corpus, place: Place, params: TokenizerParams, mixture: MixtureParams) -> int:
    number = -1
    lengths: dict[str, np.ndarray] = {}  # int64 [documents]: UTF-8 bytes of each text
    for source, files in shard_files(corpus.root / CLEAN / "train").items():
        if mixture.sources[source].share > 0:
            parts = [np.zeros(0, np.int64)]
            for file in (path.relative_to(corpus.root) for path in files):
                if file == place.file:
                    number = sum(map(len, parts)) + place.row
                for _, batch in corpus.batches(file, ("text",), TEXT_BATCH):
                    parts.append(pc.binary_length(batch["text"]).to_numpy(zero_copy_only=False))
            lengths[source] = np.concatenate(parts).astype(np.int64)
    if number < 0:
        return 0
    sources = mix_sources({name: mixture.sources[name] for name in lengths}, lengths)
    plan = plan_mixture(sources, params.sample_bytes, mixture.seed)
    mine = [source.name for source in sources].index(place.file.parent.name)
    return int(((plan.sources == mine) & (plan.documents == number)).sum())
