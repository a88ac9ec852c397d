"""Train the tokenizer on a seeded sample that has the mixture's shares, and check it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from athanor.artifacts import manifest_digest, new_dir
from athanor.corpus.documents import read_documents
from athanor.data.mixture import MixSource, Plan, mix_sources, plan_mixture
from athanor.params.mixture import MixtureParams
from athanor.params.tokenizer import TokenizerParams
from athanor.pipeline.run import Run, stage_main
from athanor.tokenizer import gate
from athanor.tokenizer.train import train, write_tokenizer

CLEAN, OUT = Path("data/clean"), Path("models/tokenizer")


def run(run: Run) -> None:
    params = run.params("tokenizer", TokenizerParams)
    mixture = run.params("mixture", MixtureParams)

    lengths: dict[str, list[int]] = defaultdict(list)
    for document in read_documents(CLEAN / "train.parquet"):
        lengths[document.source].append(len(document.text.encode()))
    sources = mix_sources(mixture.sources, lengths)
    plan = plan_mixture(sources, params.sample_bytes, mixture.seed)
    texts = read_texts(sources, plan)

    run.note(f"training on {plan.total:,} bytes of {len(texts):,} documents")
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
                "share": {s.name: taken / plan.total for s, taken in zip(sources, plan.taken, strict=True)},
            },
            "check": facts,
        }
    )
    run.fact(tokenizer=tokenizer.digest)


def read_texts(sources: list[MixSource], plan: Plan) -> list[str]:
    """The planned documents' texts, in the plan's order; repeats are the same string."""
    wanted = set(zip(plan.sources.tolist(), plan.documents.tolist(), strict=True))
    numbers = {source.name: number for number, source in enumerate(sources)}
    found: dict[tuple[int, int], str] = {}
    seen: dict[str, int] = defaultdict(int)
    for document in read_documents(CLEAN / "train.parquet"):
        key = (numbers.get(document.source, -1), seen[document.source])
        seen[document.source] += 1
        if key in wanted:
            found[key] = document.text
    return [found[key] for key in zip(plan.sources.tolist(), plan.documents.tolist(), strict=True)]


def gate_samples(sources: list[MixSource], plan: Plan, texts: list[str], most_bytes: int) -> dict[str, list[str]]:
    """The first distinct documents of each source in the sample, up to `most_bytes` of each."""
    samples: dict[str, list[str]] = {source.name: [] for source in sources}
    used: dict[str, int] = defaultdict(int)
    seen: set[Any] = set()
    for key, text in zip(zip(plan.sources.tolist(), plan.documents.tolist(), strict=True), texts, strict=True):
        name = sources[key[0]].name
        if key not in seen and used[name] < most_bytes:
            seen.add(key)
            samples[name].append(text)
            used[name] += len(text.encode())
    return samples


if __name__ == "__main__":
    stage_main("train-tokenizer", run)
