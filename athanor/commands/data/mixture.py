"""The section of the report on the mixture: realised shares and targets, over all and in single token files."""

from __future__ import annotations

from typing import Any

from athanor.artifacts import manifest_digest
from athanor.commands.data import charts
from athanor.commands.data.gather import Facts
from athanor.commands.data.page import Html, join, note, section, table, tag, warning
from athanor.commands.data.read import CLEAN
from athanor.commands.data.show import size
from athanor.data.shards import COOLDOWN, TRAIN

MOST_SHARDS = 50  # shown one by one
Part = tuple[str, Html]


def mixture(facts: Facts) -> Part:
    if facts.shards is None:
        return section(
            "Mixture", warning("There are no token files yet. Run dvc repro shard, then make this page again.")
        )
    parts: list[Any] = []
    if facts.shards["parents"].get("clean") != manifest_digest(facts.corpus.root / CLEAN):
        parts.append(
            warning("data/shards was made of another data/clean than the rest of this page. Run dvc repro shard.")
        )
    for name in (TRAIN, COOLDOWN):
        stream = facts.shards if name == TRAIN else facts.shards.get(COOLDOWN)
        if stream is not None:
            parts += _stream("Main stream" if name == TRAIN else "Cooldown", stream)
    held = [
        (name, f"{row['documents']:,}", f"{row['tokens']:,}", size(row["text_bytes"]))
        for name, row in sorted(facts.shards["val"].items())
    ]
    parts += [
        tag("h3", "Held out"),
        table(("source", "documents", "tokens", "text"), held, (1, 2, 3), "Validation by source"),
    ]
    return section(
        "Mixture", note("Shares are of tokens, drift is in percentage points. The mark on a bar is the target."), *parts
    )


def _stream(title: str, stream: dict[str, Any]) -> list[Html]:
    sources = sorted(stream["sources"].items())
    widest = max([max(row["share"], row["target_share"]) for _, row in sources] + [0.01])
    rows = []
    for name, row in sources:
        label = f"{name}: share {row['share']:.3f}, target {row['target_share']:.3f}"
        bar = tag("div", charts.share_bar(row["share"], row["target_share"], widest, label), style="min-width:7rem")
        drift = 100 * (row["share"] - row["target_share"])
        numbers = (f"{row['share']:.2%}", f"{row['target_share']:.2%}", f"{drift:+.2f}", f"{row['epochs']:.3g}")
        rows.append((name, bar, *numbers, f"{row['tokens']:,}", f"{row['documents']:,}"))
    columns = ("source", "share and target", "share", "target", "drift", "epochs", "tokens", "documents")
    return [
        tag("h3", title),
        table(columns, rows, range(2, 8), f"{title}: realised shares", beside=[1]),
        _drift(title, stream),
    ]


def _drift(title: str, stream: dict[str, Any]) -> Html:
    """The share of each source in each token file, and how far the worst is from the target."""
    names = sorted(stream["per_shard"])
    totals = [sum(column) for column in zip(*(stream["per_shard"][name] for name in names), strict=True)]
    colours = {name: charts.source_colour(number) for number, name in enumerate(names)}
    worst = []
    for name in names:
        target = stream["sources"][name]["target_share"]
        shares = [tokens / total for tokens, total in zip(stream["per_shard"][name], totals, strict=True)]
        worst.append(
            (name, f"{min(shares):.2%}", f"{max(shares):.2%}", f"{100 * max(abs(s - target) for s in shares):.2f}")
        )
    columns = ("source", "least", "most", "worst drift, points")
    parts = [table(columns, worst, (1, 2, 3), f"{title}: shares in single token files ({len(totals)} files)")]
    bars = []
    for number in range(min(len(totals), MOST_SHARDS)):
        row = [(name, stream["per_shard"][name][number], colours[name]) for name in names]
        told = ", ".join(f"{name} {tokens / totals[number]:.1%}" for name, tokens, _ in row)
        bars.append(charts.stacked(row, f"file {number:05d}: {told}", thin=True))
    more = [note(f"The first {MOST_SHARDS} of {len(totals)} files.")] if len(totals) > MOST_SHARDS else []
    legend = charts.legend([(name, colours[name]) for name in names])
    return join([*parts, tag("div", "one bar for each token file, in order", class_="small"), *bars, legend, *more])
