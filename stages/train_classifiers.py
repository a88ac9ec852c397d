"""Train the quality and toxicity classifiers that clean scores documents with, and write what is known of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from athanor.base.artifacts import (
    manifest_digest,
    new_dir,
    read_manifest,
    rounded,
    write_json,
    write_manifest,
    write_text,
)
from athanor.base.errors import AthanorError, GateError, InputError
from athanor.base.work import Facts
from athanor.classifiers import card
from athanor.classifiers.labels import make_labeller, toxicity_rows
from athanor.classifiers.params import ClassifiersParams
from athanor.classifiers.sample import TEST, sample
from athanor.classifiers.train import Examples, TooFew, other_source, quality_examples, toxicity_examples, train
from athanor.quality import model
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run
from athanor.text.documents import LABELS, shard_files

RAW, OUT = Path("data/raw"), Path("models/classifiers")


def run(run: Run) -> None:
    params = run.params("classifiers", ClassifiersParams)
    labels = params.quality_labels
    size = sum(count.get("bytes", 0) for count in read_manifest(RAW, "raw", 1)["counts"].values())
    with run.progress(size, "drawing documents", "B") as bar:
        labeller = (labels.source, make_labeller(labels)) if labels else None
        beside = labels is not None and labels.source in shard_files(RAW / LABELS)
        sampled = sample(RAW, params.sample_bytes, params.seed, None if beside else labeller, bar.update)
        if beside:
            given_labels = sample(RAW / LABELS, params.sample_bytes, params.seed, labeller).labelled
            sampled = replace(sampled, labelled=given_labels)
    if labels and not sampled.labelled:
        what = f"no document of source '{labels.source}' has a number '{labels.meta_key}' in its meta"
        fix = "correct classifiers.quality_labels, or set it to null for weak labels"
        raise InputError(what, where=RAW, fix=fix)
    labelled_rows, files = toxicity_rows(params.toxicity_labels, RAW / LABELS, params)

    makers = {
        "quality": (labels, lambda: quality_examples(sampled, params.seed)),
        "toxicity": (params.toxicity_labels, lambda: toxicity_examples(sampled.natural, labelled_rows, params.seed)),
    }
    sets: dict[str, Examples] = {}
    models = {name: model.Linear.certain(name == "quality") for name in makers}
    cards: Facts = {}
    for name, (given, make) in makers.items():
        try:
            if not (given or params.weak_labels):
                raise TooFew("weak labels are not wanted", where="classifiers.weak_labels")
            examples = make()
            models[name] = train(examples, params.inverse_l2)
            sets[name] = examples
        except TooFew as error:
            if given:
                raise
            step_aside(run, models, cards, name, error)
    held_out = [item for item in sampled.natural if item.side == TEST]
    shown = held_out if sets else sampled.natural
    scores = card.natural_scores(model.Scorer(**models, digest=""), shown)
    for name, examples in sets.items():
        cross_source = other_source(examples, params.inverse_l2)
        cards[name] = rounded(card.describe(name, models[name], examples, cross_source, held_out, scores))
        origin = card.origin_words(cards[name]["labels"])
        run.note(f"{name} ({origin} labels): AUROC {cards[name]['auroc']['held_out']:.3f} on held-out documents")
        try:
            card.check(name, cards[name], params.min_auroc, params.max_length_correlation)
        except GateError as error:
            if makers[name][0]:
                raise
            step_aside(
                run, models, cards, name, error
            )  # weak labels teach nothing on some texts, as on a repository of code
            scores = card.natural_scores(model.Scorer(**models, digest=""), shown)
    if sets and len(held_out) < card.MIN_DOCUMENTS:
        run.note(f"{len(held_out)} held-out documents are too few to judge the correlation of scores with length")
    cards = {name: cards[name] for name in makers}

    with new_dir(OUT) as folder:
        model.save(folder, models, {name: {"labels": cards[name]["labels"]} for name in cards})
        write_json(folder / "card.json", cards)
        write_text(folder / "card.md", card.markdown(cards))
        write_manifest(
            folder,
            kind=model.KIND,
            version=model.VERSION,
            counts={name: cards[name]["examples"] for name in cards},
            parents={"raw": manifest_digest(RAW)},
            labels={name: cards[name]["labels"] for name in cards},
            label_files=files,
        )
    # The name says what the figures are worth: quality_weak, toxicity_labelled.
    run.metrics({f"{name}_{facts['labels']}": card.summary(facts) for name, facts in cards.items()})
    for name in cards:
        run.plot(f"train_classifiers_{name}", card.histogram(name, cards[name]["labels"], shown, scores))
    run.attach(OUT / "card.md")


def step_aside(run: Run, models: dict[str, model.Linear], cards: Facts, name: str, error: AthanorError) -> None:
    """A classifier that cannot be learned or trusted drops nothing."""
    models[name] = model.Linear.certain(name == "quality")
    cards[name] = card.stepped_aside(error.what)
    run.note(f"{name}: the classifier steps aside and keeps every document: {error.what}")


if __name__ == "__main__":
    stage_main("train-classifiers", run)
