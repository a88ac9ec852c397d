"""What the chat page makes of text that nobody trusts."""

from __future__ import annotations

import pytest

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
        reader.press("Bad answer")
        page.fill(".better textarea", f"{payload} again")
        reader.press("Keep", exact=True)
        reader.see(".answer .stats", "corrected")
        page.click("#settings")
        page.fill("#system", payload)
        page.keyboard.press("Escape")
        page.evaluate(
            "title => import('/page/chats.js').then(({ update }) => update(location.hash.split('/')[2], { title }))",
            payload,
        )
    reader.reload()
    reader.see("#chats .title", count=len(XSS))
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
BARE = "def add_13(x):\n    return x + 13\n\n    # done\n\nclass A:\n    pass"
MIXED = [MARKDOWN[1], CODE[1], *XSS, "1. one\n2. two\n\n   more", "> quote\n\n[r]\n\n[r]: https://example.org"]
LINKS = """[a](https://example.org/x) <https://example.org> [m](mailto:a@example.org) [r](/api/state) [d](data:text/html,x)
[v](vbscript:x) [j](java&#10;script:x) ![i](https://example.org/i.png) [f](file:///etc/passwd) [s](//example.org)"""
KEPT = ["https://example.org/x", "https://example.org", "mailto:a@example.org", "https://example.org/i.png"]
QUOTES, LISTS = ">>> " * 1000, "- " * 2000 + "x"

TEXTS = (
    # links lead to the web or to mail
    ("links", LINKS, KEPT),
    ("links", "\n\n".join(MIXED), ["https://example.org"]),
    # code without a fence keeps its indentation
    ("code", BARE, [BARE.split("\n\nclass")[0], "class A:\n    pass"]),
    ("code", "It is\nfor x in y:\n    print(x)", ["It is\nfor x in y:\n    print(x)"]),
    ("code", "8 + 9 = 17\n4 + 8 + 1 = 13\nAnswer: 137", []),
    ("code", "- one\n- two\n    three", []),
    ("code", "A definition: def is a word.\nNothing is indented.", []),
    # what Markdown cannot take is as it was written
    ("text", QUOTES, QUOTES.strip()),
    ("text", LISTS, LISTS),
    ("text", "call __init__ or iterator.__next__()", "call __init__ or iterator.__next__()"),
    # formulas, those on a line of their own after a "|", and neither prices nor code
    ("math", r"Let $x^2$, \(y_1\) and *so* 2*3 = $a*b$, $c*d$.", ["x2", "y1", "a∗b", "c∗d"]),
    (
        "math",
        "Then $$x$$ or\n\\[\n  a\n=\nb\n\\]\nof\n\n> $$\n> y\n> $$\n\n1. one\n   \\[ z \\]",
        ["|x", "|a=b", "|y", "|z"],
    ),
    ("math", "| a |\n| --- |\n| $\\frac12$ |\n\n# $h$\n\n**$b$**", ["12", "h", "b"]),
    ("math", "$5 and $6, US$20,000 or USD$30,000\n\n$ x $\n\n\\$x$ 3$", []),
    ("math", "`$x$` or $`x`$\n\n```tex\n$$x$$\n```\n\n    $y$\n\n~~~\n\\[x\\]", []),
    ("math", "$$\n  a\n\nb\n$$ and $x\n\n\\[ y", []),
    ("math", r"$\nosuch{x}$ and $\frac{$", []),
)


@pytest.fixture
def formulas(reader):
    """A reader whose page has the library for them; it comes with the first formula and not before."""
    assert not reader.page.evaluate("'temml' in window")
    reader.page.evaluate('import("/page/markdown.js").then(({ render }) => void render("$x$"))')
    reader.until("'temml' in window")
    return reader


@BOTH
def test_links_code_and_formulas_are_found_in_a_text_at_once_and_in_one_that_grows(formulas):
    for part, text, expected in TEXTS:
        once, grown = formulas.page.evaluate(SHOWN, text)
        assert (once[part], grown) == (expected, once), text


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
