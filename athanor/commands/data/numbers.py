"""Sections of the report that are numbers: what it is made of, funnel, scores, lengths, licences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from athanor.artifacts import manifest_digest
from athanor.commands.data import charts
from athanor.commands.data.gather import LENGTH_BINS, LENGTH_FROM, Facts, Source
from athanor.commands.data.page import Html, badge, join, note, section, table, tag, tiles, warning
from athanor.commands.data.page import name as rule_name
from athanor.commands.data.read import (
    CLASSIFIERS,
    CLEAN,
    DROPPED,
    KEPT,
    RAW,
    SHARDS,
    TOKENIZER,
    built_params,
    clean_params,
)
from athanor.commands.data.show import size
from athanor.corpus.sweep import SCORES
from athanor.pipeline import dvc_lock
from athanor.pipeline.facts import params_digest

SHORT = 12  # digits of a digest
LIMITS = {"quality": "min_quality", "toxicity": "max_toxicity"}
WEAKENED = ("quality", "quality_classifier", "toxicity")  # scores that a classifier has a part in
Part = tuple[str, Html]


def share(part: float, whole: float) -> str:
    return "–" if not whole else f"{part / whole:.2%}" if part / whole < 0.1 else f"{part / whole:.1%}"


# -- what it is made of ------------------------------------------------------------------------------------------------


def head(facts: Facts) -> Html:
    """Totals, and digests that say which data this page is about."""
    sources = facts.sources.values()
    came, stays = (sum(getattr(s, f"documents_{way}") for s in sources) for way in ("in", "out"))
    bytes_in, bytes_out = (sum(getattr(s, f"bytes_{way}") for s in sources) for way in ("in", "out"))
    held_out = sum(row["documents"] for row in facts.corpus.manifest["counts"]["val"].values())
    pairs = [
        ("sources", f"{len(facts.sources)}"),
        ("documents came in", f"{came:,}"),
        ("of text came in", size(bytes_in)),
        ("documents kept", f"{stays:,}"),
        ("of text kept", size(bytes_out)),
        ("of the text kept", share(bytes_out, bytes_in)),
        ("documents held out", f"{held_out:,}"),
    ]
    if facts.shards:
        pairs.append(("tokens in the stream", f"{facts.shards['counts']['tokens']:,}"))
    rows = table(("what", "digest", "DVC"), _digests(facts.corpus.root), caption="Which data this page is about")
    return join([tiles(pairs), tag("details", tag("summary", "Digests"), rows)])


def _digests(root: Path) -> list[tuple[Any, ...]]:
    outs = dvc_lock.outputs(root / dvc_lock.LOCK)
    rows = []
    for path in (RAW, CLASSIFIERS, CLEAN, TOKENIZER, SHARDS):
        if (root / path / "manifest.json").is_file():
            where = tag("code", path.as_posix())
            found = manifest_digest(root / path)[:SHORT]
            rows.append((where, tag("code", found), tag("code", str(outs.get(path.as_posix(), "–"))[:SHORT])))
    for stage, section_name in (("download", "download"), ("clean", "clean"), ("shard", "mixture"), ("shard", "shard")):
        values = built_params(root, stage).get(section_name)
        if values is not None:
            rows.append((f"parameters: {section_name}", tag("code", params_digest(values)[:SHORT]), "–"))
    return rows


# -- funnel ------------------------------------------------------------------------------------------------------------


def funnel(facts: Facts) -> Part:
    names = sorted({rule for source in facts.sources.values() for rule, _, _ in source.drops}, key=_by_count(facts))
    colours = {name: charts.colour(number) for number, name in enumerate(names)}
    parts = []
    for source in facts.sources.values():
        kinds = tag("span", ", ".join(sorted(source.kinds)), class_="small")
        parts += [
            tag("h3", source.name, " ", kinds),
            tag("div", _funnel_table(source), tag("div", _bars(source, colours)), class_="pair"),
        ]
    legend = charts.legend([("kept", "var(--kept)"), *((name, colours[name]) for name in names)])
    words = note(
        "What came in and what each rule took. A document has one reason, the first rule that it failed. "
        "The last bar of each source shows only what was dropped, so that small parts can be seen."
    )
    return section("Funnel", words, legend, *parts)


def _by_count(facts: Facts) -> Any:
    totals: dict[str, int] = {}
    for source in facts.sources.values():
        for rule, documents, _ in source.drops:
            totals[rule] = totals.get(rule, 0) + documents
    return lambda rule: (-totals[rule], rule)


def _bars(source: Source, colours: dict[str, str]) -> Html:
    kept, drops = (
        ("kept", source.documents_out, "var(--kept)"),
        [(rule, n, colours[rule]) for rule, n, _ in source.drops],
    )
    gone = source.documents_in - source.documents_out
    text = ("kept", source.bytes_out, "var(--kept)"), *((rule, n, colours[rule]) for rule, _, n in source.drops)
    bars = [
        tag(
            "div",
            f"documents: {share(source.documents_out, source.documents_in)} of {source.documents_in:,} kept",
            class_="small",
        ),
        charts.stacked(
            [kept, *drops], f"{source.name}: {source.documents_out} of {source.documents_in} documents kept"
        ),
        tag("div", f"text: {share(source.bytes_out, source.bytes_in)} of {size(source.bytes_in)} kept", class_="small"),
        charts.stacked(text, f"{source.name}: {source.bytes_out} of {source.bytes_in} bytes kept"),
    ]
    if gone:
        bars.append(tag("div", f"dropped: {charts.documents(gone)}", class_="small"))
        bars.append(charts.stacked(drops, f"{source.name}: {gone} documents dropped, by rule", thin=True))
    return join(bars)


def _funnel_table(source: Source) -> Html:
    def row(name: Any, documents: Any, count: int) -> tuple[Any, ...]:
        return (
            name,
            documents,
            share(documents, source.documents_in) if documents else "",
            size(count),
            share(count, source.bytes_in),
        )

    rows = [row("came in", source.documents_in, source.bytes_in)]
    rows += [
        row(f"{step}, inside documents", "", -source.inside[step])
        for step in sorted(source.inside)
        if source.inside[step]
    ]
    rows = [r if isinstance(r[1], str) else (r[0], f"{r[1]:,}", *r[2:]) for r in rows]
    rows += [
        (rule_name(rule), f"{n:,}", share(n, source.documents_in), size(b), share(b, source.bytes_in))
        for rule, n, b in source.drops
    ]
    rows.append(
        (
            tag("b", "kept"),
            f"{source.documents_out:,}",
            share(source.documents_out, source.documents_in),
            size(source.bytes_out),
            share(source.bytes_out, source.bytes_in),
        )
    )
    made = table(
        ("step", "documents", "", "text", ""), rows, numbers=range(1, 5), caption=f"{source.name}, step by step"
    )
    if not source.left_out:
        return made
    told = ", ".join(f"{reason} {count:,}" for reason, count in sorted(source.left_out.items()))
    return tag("div", made, note(f"Left out before, at download: {told}."))


# -- scores and lengths ------------------------------------------------------------------------------------------------


def scores(facts: Facts) -> Part:
    params = clean_params(facts.corpus.root)
    weak = [name for name, card in sorted(facts.cards.items()) if "weak" in card["labels"]]
    parts: list[Any] = []
    if weak:
        told = " and ".join(weak)
        parts.append(
            warning(
                badge("WEAK LABELS"),
                f" The classifiers of {told} were trained on labels that were made, not given: "
                "trust the order of scores only as far as the card goes.",
            )
        )
    parts += [_cards(facts), charts.key()]
    for source in facts.sources.values():
        rules = getattr(params.rules, source.kind, None) if params else None
        figures = []
        for score in SCORES:
            limit = getattr(rules, LIMITS.get(score, ""), None)
            line = "" if score not in LIMITS else "no limit" if limit is None else f"limit {limit:g} (dashed)"
            title = score.replace("_", ", ") + (
                " (weak labels)" if score in WEAKENED and score.split("_")[0] in weak else ""
            )
            found = source.scores[score]
            figures.append(
                charts.histogram(title, found[KEPT].tolist(), found[DROPPED].tolist(), ("0", "0.5", "1"), limit, line)
            )
        parts += [tag("h3", source.name), tag("div", *figures, class_="grid")]
    return section("Scores", *parts)


def _cards(facts: Facts) -> Html:
    if not facts.cards:
        return note("There is no classifier card in models/classifiers.")
    columns = []
    for name, card in sorted(facts.cards.items()):
        labels = ", ".join(f"{kind} {origin}" for kind, origin in sorted(card["labels_by_kind"].items()))
        tied = [abs(found["all"]) for found in card["length_correlation"].values() if found.get("all") is not None]
        numbers = (
            card["auroc"]["held_out"],
            min(card["auroc"].get("other_source", {}).values(), default=None),
            card["calibration"]["expected_calibration_error"],
            max(tied, default=None),
        )
        tested = f"{sum(card['examples']['test'].values()):,}"
        columns.append((name, labels, *("–" if value is None else f"{value:.3f}" for value in numbers), tested))
    names = (
        "",
        "labels",
        "AUROC, documents held out",
        "AUROC, worst source not trained on",
        "calibration error",
        "correlation with length, largest",
        "texts tested on",
    )
    head, *rows = zip(names, *columns, strict=True)
    return table(head, rows, range(1, len(head)), "Classifiers in short; all of it: models/classifiers/card.md")


def lengths(facts: Facts) -> Part:
    filled = np.flatnonzero(sum(found for source in facts.sources.values() for found in source.lengths.values()))
    first = int(filled.min(initial=LENGTH_BINS - 8)) // 4 * 4
    last = min(
        LENGTH_BINS, max(first + 8, (int(filled.max(initial=0)) // 4 + 1) * 4)
    )  # ends and middle on whole powers
    ends = [_bytes(LENGTH_FROM + place // 2) for place in (first, (first + last) // 2, last)]
    figures = []
    for source in facts.sources.values():
        kept, dropped = (source.lengths[fate][first:last].tolist() for fate in (KEPT, DROPPED))
        figures.append(charts.histogram(source.name, kept, dropped, ends, note=_mean(source)))
    words = note("Bytes of text in a document, on a logarithmic axis: two bars for each doubling.")
    return section("Lengths", words, charts.key(), tag("div", *figures, class_="grid"))


def _bytes(power: int) -> str:
    for unit, least in (("MiB", 20), ("KiB", 10)):
        if power >= least:
            return f"{2 ** (power - least)} {unit}"
    return f"{2**power} B"


def _mean(source: Source) -> str:
    return f"mean of kept {size(source.bytes_out / source.documents_out)}" if source.documents_out else ""


def licences(facts: Facts) -> Part:
    rows, whole = [], sum(source.bytes_out for source in facts.sources.values())
    totals: dict[str, list[int]] = {}
    for source in facts.sources.values():
        for licence, (documents, count) in sorted(source.licences.items(), key=lambda pair: (-pair[1][1], pair[0])):
            rows.append((licence, source.name, f"{documents:,}", size(count), share(count, whole)))
            found = totals.setdefault(licence, [0, 0])
            found[0], found[1] = found[0] + documents, found[1] + count
    order = sorted(totals.items(), key=lambda pair: (-pair[1][1], pair[0]))
    all_rows = [(licence, f"{documents:,}", size(count), share(count, whole)) for licence, (documents, count) in order]
    parts = [table(("licence", "documents", "text", ""), all_rows, (1, 2, 3), "All sources")]
    if len(facts.sources) > 1:
        parts.append(table(("licence", "source", "documents", "text", ""), rows, (2, 3, 4), "By source"))
    unknown = totals.get("unknown")
    if unknown:
        parts.insert(0, warning(f"{charts.documents(unknown[0])} ({size(unknown[1])}) came without a licence."))
    return section("Licences", note("Of documents that were kept."), *parts)
