"""Train the tokenizer on a seeded sample that has the mixture's shares, and check it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from athanor.base.artifacts import manifest_digest, new_dir
from athanor.base.errors import InputError
from athanor.base.files import joined
from athanor.base.host import free_memory_bytes
from athanor.data.mixture import MixSource, Plan, check_sources, mix_sources, plan_mixture
from athanor.data.mixture_params import MixtureParams
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.documents import read_documents, shard_files
from athanor.tokenizer_training import gate
from athanor.tokenizer_training.params import TokenizerParams
from athanor.tokenizer_training.train import check_memory, train, write_tokenizer

CLEAN, OUT = Path("data/clean"), Path("models/tokenizer")


def run(run: Run) -> None:
    params = run.params("tokenizer", TokenizerParams)
    mixture = run.params("mixture", MixtureParams)

    files = shard_files(CLEAN / "train")
    if not files:
        raise InputError("no documents", where=CLEAN / "train", fix="dvc repro clean")
    check_sources(mixture.sources, files)
    shards: dict[str, list[tuple[Path, int]]] = defaultdict(list)

    def lengths(name: str) -> Iterator[np.ndarray]:
        for path in files[name]:
            of_shard = text_lengths(path)
            shards[name].append((path, len(of_shard)))
            yield of_shard

    used = [name for name in files if mixture.sources[name].share > 0]
    sources = mix_sources(mixture.sources, {name: joined(lengths(name), np.int64) for name in used})
    plan = plan_mixture(sources, params.sample_bytes, mixture.seed)
    needed = check_memory(min(plan.total, params.sample_bytes), free_memory_bytes())  # a document more, at most
    run.note(f"training on {plan.total:,} bytes takes about {needed / 1e9:,.1f} GB of memory")
    texts = read_texts(sources, plan, shards)

    model = train(texts, params)
    with new_dir(OUT) as folder:
        tokenizer = write_tokenizer(folder, model, {"clean": manifest_digest(CLEAN)})
        facts = gate.check(tokenizer, gate_samples(sources, plan, texts, params.check_bytes), mixture.seed)
    run.metrics(
        {
            "vocab_size": tokenizer.vocab_size,
            "sample": {
                "bytes": plan.total,
                "documents": len(texts),
                "share": {
                    s.name: sampled_bytes / plan.total for s, sampled_bytes in zip(sources, plan.taken, strict=True)
                },
            },
            "check": facts,
        }
    )
    run.fact(tokenizer=tokenizer.digest)


def text_lengths(path: Path) -> np.ndarray:
    """int64 [documents]: bytes of each text of one shard."""
    return np.array([len(document.text.encode()) for document in read_documents(path)], dtype=np.int64)


def read_texts(sources: list[MixSource], plan: Plan, shards: Mapping[str, Sequence[tuple[Path, int]]]) -> list[str]:
    """The planned documents' texts, in the plan's order; repeats are the same string.

    `shards` are the files of each source in order, with the documents in each; those without a planned one stay shut.
    """
    texts: dict[tuple[int, int], str] = {}
    for number, source in enumerate(sources):
        needed = np.unique(plan.documents[plan.sources == number])
        first = 0
        for path, documents in shards[source.name]:
            in_shard = needed[(needed >= first) & (needed < first + documents)]
            if len(in_shard):
                chosen = set((in_shard - first).tolist())
                for index, document in enumerate(read_documents(path)):
                    if index in chosen:
                        texts[number, first + index] = document.text
            first += documents
    return [texts[key] for key in zip(plan.sources.tolist(), plan.documents.tolist(), strict=True)]


def gate_samples(sources: list[MixSource], plan: Plan, texts: list[str], max_bytes: int) -> dict[str, list[str]]:
    """The first distinct documents of each source in the sample, up to `max_bytes` of each."""
    samples: dict[str, list[str]] = {source.name: [] for source in sources}
    used: dict[str, int] = defaultdict(int)
    used_keys: set[Any] = set()
    for key, text in zip(zip(plan.sources.tolist(), plan.documents.tolist(), strict=True), texts, strict=True):
        name = sources[key[0]].name
        if key not in used_keys and used[name] < max_bytes:
            used_keys.add(key)
            samples[name].append(text)
            used[name] += len(text.encode())
    return samples


if __name__ == "__main__":
    stage_main("train-tokenizer", run)
