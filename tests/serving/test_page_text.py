"""What the chat page makes of text that nobody trusts."""

from __future__ import annotations

from pathlib import Path

import pytest

from athanor.base.strict import read_yaml
from tests.serving.parrot import CODE, MARKDOWN, XSS, asking

pytestmark = pytest.mark.extra
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)

FOUND = """() => {
  const allowed = new Set(
    ("P BR HR H1 H2 H3 H4 H5 H6 STRONG EM DEL CODE PRE BLOCKQUOTE UL OL LI A TABLE THEAD TBODY TR TH TD "
    + "math mrow mi mn mo mtext mspace mfrac msup mpadded mtable mtr mtd").split(" "));
  const odd = [];
  for (const element of document.querySelectorAll(".prose *, .bubble *, #chats .title *, #chats .snippet *")) {
    if (element.closest(".code, .wide > :not(table), .block > :not(*)")) continue;
    if (!allowed.has(element.tagName) && !element.matches(".block, .code, .wide, .formula")) odd.push(element.outerHTML);
    for (const { name, value } of element.attributes) {
      if (name.startsWith("on") || name === "style" || name === "src" || /script:|data:/i.test(value))
        odd.push(element.outerHTML);
    }
  }
  for (const link of document.querySelectorAll(".prose a[href]")) {
    if (!/^(https?|mailto):/.test(link.href) || link.rel !== "noopener noreferrer" || link.target !== "_blank")
      odd.push(link.outerHTML);
  }
  return odd;
}"""


@BOTH
def test_no_attack_runs_whether_streamed_or_from_history_in_any_place(reader):
    page = reader.page
    for payload in XSS:
        reader.new_chat()
        reader.ask(asking(payload))
        assert page.evaluate("window.lengths.length"), "it was streamed"
        assert reader.chat()["messages"][-1]["content"] == payload and page.evaluate(FOUND) == []
        reader.correct(f"{payload} again")
        reader.settings(system=payload)
        page.evaluate(
            "title => import('/page/chats.js').then(({ update }) => update(location.hash.split('/')[2], { title }))",
            payload,
        )
    reader.reload()
    reader.count("#chats .title", len(XSS))
    assert set(XSS) == set(reader.texts("#chats .title"))
    for title in page.locator("#chats a").all():
        title.click()
        reader.see(".answer .prose")
        assert page.evaluate(FOUND) == []
    page.fill("#search", "pwned")
    reader.see("#chats .snippet")
    page.click("#to-corrections")
    reader.see(".correction")
    assert page.evaluate(FOUND) == []


# What is to be seen of a text that is shown at once, and of the same text as it grows by single characters, or in a few
# pieces where it is long.
SHOWN = """async (text) => {
  const { Growing, render } = await import("/page/markdown.js");
  const [once, slowly] = [document.createElement("div"), document.createElement("div")];
  once.append(render(text));
  const growing = new Growing(slowly);
  const step = text.length < 3000 ? 1 : 1500;
  for (let end = step; end < text.length + step; end += step) {
    growing.text = text.slice(0, end);
    growing.draw();
  }
  const all = (element, selector, told) => [...element.querySelectorAll(selector)].map(told);
  return [once, slowly].map((element) => ({
    text: element.textContent.replace(/\\s+/g, " ").trim(),
    code: all(element, ".code code", (one) => one.textContent),
    links: all(element, "a[href]", (one) => one.getAttribute("href")),
    math: all(element, "math", (one) => (one.hasAttribute("display") ? "|" : "") + one.textContent.trim()),
  }));
}"""
MIXED = [MARKDOWN[1], CODE[1], *XSS, "1. one\n2. two\n\n   more", "> quote\n\n[r]\n\n[r]: https://example.org"]


@pytest.fixture
def formulas(reader):
    """A reader whose page has the library for them; it comes with the first formula and not before."""
    assert not reader.page.evaluate("'temml' in window")
    reader.ask(MARKDOWN[0])
    reader.see("math")
    return reader


@BOTH
def test_links_code_and_formulas_are_found_in_a_text_at_once_and_in_one_that_grows(formulas):
    kinds = read_yaml(Path(__file__).with_name("markdown_cases.yaml"))
    kinds["links"].append({"text": "\n\n".join(MIXED), "found": ["https://example.org"]})
    kinds["text"] += [{"text": text, "found": text.strip()} for text in (">>> " * 1000, "- " * 2000 + "x")]
    for kind, cases in kinds.items():
        for case in cases:
            once, grown = formulas.page.evaluate(SHOWN, case["text"])
            assert (once[kind], grown) == (case["found"], once), case


HOSTILE = (
    r"\href{javascript:pwned(1)}{x}",
    r"\url{javascript:pwned(2)}",
    r"\class{menu}{x}",
    r"\style{position:fixed}{x}",
    r"\htmlStyle{position:fixed}{x}",
    r"\includegraphics{https://example.org/x.png}",
    r"\def\a{\a\a}\a",
    r"\newcommand{\a}{x}" + r"\a" * 900,
    r"\begin{matrix}" + "&" * 1000 + r"\\" * 900 + r"\end{matrix}",
    r"\cancelto{x}{" * 40 + "x" + "}" * 40,
    r"\sqrt{" * 400 + "x" + "}" * 400,
    "x" * 5000,
)
TAMED = r"\text{<img src=x onerror=pwned(3)>} \color{red}x \llap{xx} \raisebox{99em}{x} \hspace{-99em} \rule{999em}{1em} \ref{a}"


@BOTH
def test_a_hostile_formula_is_shown_as_its_source_or_loses_what_is_hostile(formulas):
    shown, attributes, narrow = formulas.page.evaluate(
        """async (texts) => {
          const { render } = await import("/page/markdown.js");
          const view = document.getElementById("view");
          view.className = "prose";
          view.replaceChildren(...texts.map((text) => render(`$$${text}$$`)));
          return [[...view.querySelectorAll("p")].map((one) => one.textContent),
            [...view.querySelectorAll("math *")].flatMap((one) => one.getAttributeNames()), view.scrollWidth < 2000];
        }""",
        [*HOSTILE, TAMED],
    )
    assert shown[:-1] == [f"$${text}$$" for text in HOSTILE] and "onerror=pwned(3)" in shown[-1]
    assert set(attributes) <= {"width", "height", "lspace", "scriptlevel", "displaystyle"} and narrow
    assert formulas.page.evaluate(FOUND) == []
