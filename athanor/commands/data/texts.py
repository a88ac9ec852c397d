"""Sections of the report that show documents: duplicates, personal data, evaluation items, language, examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from athanor.commands.data import charts, show
from athanor.commands.data.gather import Facts
from athanor.commands.data.page import Html, join, note, section, table, tag
from athanor.commands.data.page import name as rule_name
from athanor.commands.data.read import DROPPED, Entry, clean_params
from athanor.corpus import rules
from athanor.corpus.pii import CATEGORIES

CHARS = 500  # of a document
LANGUAGE = (rules.NOT_ENGLISH, "few_stop_words", "not_ascii")
Part = tuple[str, Html]


def excerpt(entry: Entry, chars: int = CHARS) -> Html:
    """A document in short: what is known of it, and the beginning of its text."""
    meta = ", ".join(f"{name} {value}" for name, value in sorted(entry.meta.items()))
    values = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in entry.scores.items())
    told = [
        tag("code", entry.id[:12]),
        f" {entry.source}, {entry.kind}, {entry.license}, {entry.split}, {show.size(entry.bytes)}",
    ]
    told += [f" · {meta}"] if meta else []
    told += [f" · {values}"] if values else []
    text, cut = show.cut(entry.text, chars)
    more = [tag("p", f"… {cut}")] if cut else []
    return tag("article", tag("p", *told), tag("pre", text), *more)


def duplicates(facts: Facts) -> Part:
    if not facts.cluster_sizes:
        return section("Duplicates", note("No duplicate was dropped."))
    gone = sum((size - 1) * count for size, count in facts.cluster_sizes.items())
    words = note(
        f"{charts.documents(gone)} repeated another one, in {sum(facts.cluster_sizes.values()):,} clusters. "
        "All of a cluster: athanor data peek --cluster ID."
    )
    rows = [
        (f"{size:,}", f"{count:,}", f"{(size - 1) * count:,}") for size, count in sorted(facts.cluster_sizes.items())
    ]
    sizes = table(("documents in it", "clusters", "documents dropped"), rows[:20], (0, 1, 2), "Clusters by size")
    more = [note(f"… and {len(rows) - 20} larger sizes.")] if len(rows) > 20 else []
    checked = facts.metrics.get("duplicates")
    if checked:
        more.append(
            note(
                f"Looked for afterwards, exhaustively: {checked['found']} of {checked['checked']} have a copy left."
            )
        )
    parts = [tag("h3", "The largest")]
    for size, first, others in facts.clusters:
        parts.append(_cluster(size, first, others))
    return section("Duplicates", words, sizes, *more, *parts)


def _cluster(size: int, first: Entry | None, others: Sequence[Entry]) -> Html:
    head = f"{size:,} documents, one stayed" if first is not None and first.fate != DROPPED else f"{size:,} documents"
    parts: list[Any] = (
        [tag("h4", "stayed" if first.fate != DROPPED else f"dropped, too, by {first.rule}"), excerpt(first)]
        if first
        else []
    )
    for entry in others:
        parts.append(tag("h4", f"dropped by {entry.rule}"))
        lines = show.differences(first.text, entry.text, 14) if first else []
        told = (
            [note("What differs, - in the other and + here:"), charts.diff(lines)]
            if lines
            else [note("The same text.")]
        )
        parts += [excerpt(entry, 160), *told]
    name = first or others[0]
    return tag("details", tag("summary", f"{head} · {name.id[:12]} · {name.source}"), *parts)


def personal(facts: Facts) -> Part:
    """What was redacted, by source and type."""
    found = facts.metrics.get("redactions", {})
    rows = []
    for source in facts.sources:
        row = found.get(source, {})
        rows.append((source, *(f"{row.get(name, 0):,}" for name in CATEGORIES), f"{sum(row.values()):,}"))
    words = note("Replaced by placeholders, in all documents that came in. Numbers are of places, not documents.")
    return section(
        "Personal data",
        words,
        table(("source", *CATEGORIES, "all"), rows, range(1, 7), "Redactions by source and type"),
    )


def contamination(facts: Facts) -> Part:
    touched, told = facts.corpus.manifest.get("contaminated_items", {}), facts.metrics.get("contaminated", {})
    summary = note(
        f"{charts.documents(told.get('documents', sum(touched.values())))} dropped for holding one of "
        f"{len(touched):,} evaluation items."
    )
    parts = [summary] if touched else [note("No document held an evaluation item.")]
    by_category = told.get("by_category", {})
    if by_category and not any(by_category.values()):
        parts.append(note(f"Looked for were the items of: {', '.join(sorted(by_category))}."))
    elif by_category:
        rows = [
            (name, f"{count:,}") for name, count in sorted(by_category.items(), key=lambda pair: (-pair[1], pair[0]))
        ]
        parts.append(table(("category", "documents dropped"), rows, (1,), "By category of the evaluation"))
    if touched:
        rows = []
        for item, count in sorted(touched.items(), key=lambda pair: (-pair[1], pair[0]))[:50]:
            category, prompt = facts.items.get(item, ("–", ""))
            text, more = show.cut(prompt, 200)
            rows.append((tag("code", item), category, f"{count:,}", text + (" …" if more else "")))
        parts.append(
            table(("item", "category", "documents", "question"), rows, (2,), "The items, most documents first")
        )
    return section("Evaluation items", *parts)


def languages(facts: Facts) -> Part:
    params = clean_params(facts.corpus.root)
    rows = []
    for source in facts.sources.values():
        drops = {rule: documents for rule, documents, _ in source.drops}
        kind = getattr(params.rules, source.kind, None) if params else None
        asked = "not known" if kind is None else "English only" if kind.english_only else "any language"
        rows.append((source.name, source.kind, asked, *(f"{drops.get(rule, 0):,}" for rule in LANGUAGE)))
    columns = ("source", "kind", "asked for", *(rule_name(rule) for rule in LANGUAGE))
    words = note(
        "No language is told for single documents. What is known is what was asked for, and what the rules about "
        "language dropped."
    )
    return section("Languages", words, table(columns, rows, (3, 4, 5), "Documents dropped by rules about language"))


def examples(facts: Facts) -> Part:
    parts: list[Any] = []
    for number, source in enumerate(facts.sources):
        inner: list[Any] = []
        order = ["", *(rule for rule, _, _ in facts.sources[source].drops)]  # kept ones, then what took most
        keys = [(source, rule) for rule in order if (source, rule) in facts.examples]
        for key in keys:
            entries = facts.examples[key]
            inner.append(
                tag("h4", rule_name(key[1]) if key[1] else "kept", f", {charts.documents(len(entries))} at random")
            )
            inner += [_example(facts, entry) for entry in entries]
        told = {"open": "open"} if number == 0 else {}
        parts.append(tag("details", tag("summary", source), *inner, **told))
    words = note(
        "Drawn at random, the same ones each time. Others: athanor data peek. All about one: athanor data trace ID."
    )
    return section("Examples", words, *parts)


def _example(facts: Facts, entry: Entry) -> Html:
    reason = [] if entry.rule is None or entry.twin else [tag("p", f"measured: {entry.detail}", class_="small")]
    twin = facts.twins.get(entry.twin or "")
    if entry.twin and twin is not None:
        lines = show.differences(twin.text, entry.text, 12)
        reason = [
            tag(
                "p",
                "repeats ",
                tag("code", twin.id[:12]),
                f" ({twin.fate}, {twin.source}, {twin.split})",
                class_="small",
            )
        ]
        reason += [charts.diff(lines)] if lines else []
    return join([excerpt(entry), *reason])
