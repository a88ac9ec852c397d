"""Bars and histograms as HTML and SVG without text inside, so that words stay legible at any width."""

from __future__ import annotations

from collections.abc import Sequence

from athanor.commands.data.page import Html, join, tag
from athanor.commands.data.show import plural

COLOURS = 7  # c0 to c6 in the style; c7 is for all the rest


def stacked(parts: Sequence[tuple[str, float, str]], label: str, thin: bool = False) -> Html:
    """A bar of parts (name, amount, CSS colour); shares of their sum."""
    total = sum(amount for _, amount, _ in parts) or 1.0
    pieces = [
        tag("i", style=f"width:{100 * amount / total:.3f}%;background:{colour}", title=f"{name}: {amount / total:.2%}")
        for name, amount, colour in parts
        if amount > 0
    ]
    return tag("div", *pieces, class_="bar thin" if thin else "bar", role="img", aria_label=label)


def legend(parts: Sequence[tuple[str, str]]) -> Html:
    """Text and colour of each part."""
    items = [tag("li", tag("i", style=f"background:{colour}"), text) for text, colour in parts]
    return tag("ul", *items, class_="legend")


def colour(number: int) -> str:
    return f"var(--c{min(number, COLOURS)})"


def source_colour(number: int) -> str:
    """Of a source, where nothing is kept or dropped."""
    return "var(--kept)" if number == 0 else colour(number)


def share_bar(share: float, target: float | None, widest: float, label: str) -> Html:
    """A share as a bar, with a mark where its target is; `widest` fills the width."""
    mark = [] if target is None else [tag("b", style=f"left:{100 * target / widest:.3f}%")]
    inner = tag("i", class_="kept", style=f"width:{100 * share / widest:.3f}%")
    return tag("div", tag("div", inner, class_="bar thin"), *mark, class_="target", role="img", aria_label=label)


def histogram(
    title: str,
    kept: Sequence[int],
    dropped: Sequence[int],
    ends: Sequence[str],
    limit: float | None = None,
    note: str = "",
) -> Html:
    """Kept above the line and dropped below, each to its own scale, because few are dropped where the rules fit.

    `ends` are labels below the axis, evenly spread; `limit` a place from 0 to 1 to mark.
    """
    count, half = len(kept), 50.0
    shapes = []
    for values, name, sign in ((kept, "kept", -1), (dropped, "dropped", 1)):
        most = max(values, default=0) or 1
        for place, value in enumerate(values):
            if value:
                height = max(1.0, (half - 4) * value / most)
                top = half - height if sign < 0 else half
                told = f'<rect class="{name}" x="{place + 0.06:.2f}" y="{top:.2f}" width="0.88" height="{height:.2f}"/>'
                shapes.append(Html(told))
    shapes.append(Html(f'<line class="axis" x1="0" x2="{count}" y1="50" y2="50" vector-effect="non-scaling-stroke"/>'))
    if limit is not None:
        at = f"{limit * count:.3f}"
        line = f'<line class="limit" x1="{at}" x2="{at}" y1="0" y2="100" vector-effect="non-scaling-stroke"/>'
        shapes.append(Html(line))
    words = [_told(values, name) for values, name in ((kept, "kept"), (dropped, "dropped"))]
    svg = tag(
        "svg",
        tag("title", f"{title}: {'; '.join(words)}"),
        *shapes,
        viewBox=f"0 0 {count} 100",
        preserveAspectRatio="none",
        role="img",
    )
    axis = tag("div", *(tag("span", end) for end in ends), class_="ends")
    lines = [tag("p", line) for line in (*words, *([note] if note else []))]
    return tag("figure", tag("figcaption", title), svg, axis, *lines)


def _told(values: Sequence[int], name: str) -> str:
    total = sum(values)
    return f"{name} {total:,}" + (f", {max(values):,} in the tallest bar" if total else "")


def key() -> Html:
    """What the colours of histograms mean."""
    return legend([("kept, upwards", "var(--kept)"), ("dropped, downwards", "var(--dropped)")])


def diff(lines: Sequence[str]) -> Html:
    """Lines of `show.differences`, coloured; the marks say it, too."""
    kinds = {"-": "del", "+": "ins"}
    return tag("pre", join((tag("span", line, class_=kinds.get(line[:1])) for line in lines), "\n"))


def documents(count: int) -> str:
    return plural(count, "document")
