"""Pieces of a self-contained HTML page: everything that is not `Html` is escaped on its way in."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from athanor.commands.data.show import slug, visible
from athanor.commands.data.style import STYLE


class Html(str):
    """Markup. Plain strings are text and are escaped wherever they meet markup."""


def esc(value: Any) -> Html:
    return value if isinstance(value, Html) else Html(html.escape(visible(str(value)), quote=True))


def join(parts: Iterable[Any], between: str = "") -> Html:
    return Html(between.join(esc(part) for part in parts))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` is class, other underscores in names are hyphens, None leaves an attribute out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{esc(value)}"' for key, value in attributes.items() if value is not None
    )
    return Html(f"<{name}{told}>{join(children)}</{name}>")


def table(
    head: Sequence[Any],
    rows: Iterable[Sequence[Any]],
    numbers: Iterable[int] = (),
    caption: str = "",
    beside: Iterable[int] = (),
) -> Html:
    """A table in a box of its own, which scrolls where the page is too narrow.

    `numbers` are columns to align right, `beside` columns that say nothing new and are left out on narrow screens.
    """
    kinds = dict.fromkeys(numbers, "n") | dict.fromkeys(beside, "beside")

    def cells(name: str, row: Sequence[Any], **more: str) -> Html:
        return join(tag(name, cell, class_=kinds.get(number), **more) for number, cell in enumerate(row))

    body = join(tag("tr", cells("td", row)) for row in rows)
    inner = join([tag("caption", caption) if caption else "", tag("thead", tag("tr", cells("th", head, scope="col")))])
    box = tag("table", inner, tag("tbody", body))
    return tag("div", box, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def section(title: str, *body: Any) -> tuple[str, Html]:
    """(title, element): a part of the page, with an anchor made of its title."""
    return title, tag("section", tag("h2", title), *body, id=slug(title))


def note(*text: Any) -> Html:
    return tag("p", *text, class_="note")


def warning(*text: Any) -> Html:
    return tag("p", *text, class_="warn")


def name(text: str) -> Html:
    """A name_of_several_words, which may be broken after each."""
    return tag("code", join(text.split("_"), Html("_<wbr>")))


def badge(text: str) -> Html:
    return tag("span", text, class_="badge")


def tiles(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Numbers large, with what they are below."""
    return tag("dl", join(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="tiles")


def page(title: str, head: Html, sections: Sequence[tuple[str, Html]]) -> str:
    """The whole page."""
    links = join(tag("li", tag("a", name, href=f"#{slug(name)}")) for name, _ in sections)
    contents = tag("nav", tag("ol", links), aria_label="Contents")
    body = join([tag("header", tag("h1", title), head, contents), tag("main", join(each for _, each in sections))])
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    meta += '<meta name="color-scheme" content="light dark">'
    policy = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is loaded, and nothing in a document may run
    meta += f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    style = tag("style", Html(STYLE))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{meta}{tag("title", title)}{style}</head><body>{body}</body></html>\n'
    )
