"""What the chat page makes of text that nobody trusts."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import expect

from tests.serving.browser import Reader
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
        reader.see(".answer .stats").to_contain_text("corrected")
        page.click("#settings")
        page.fill("#system", payload)
        page.keyboard.press("Escape")
        page.evaluate(
            "title => import('/page/chats.js').then(({ update }) => update(location.hash.split('/')[2], { title }))",
            payload,
        )
    reader.reload()
    reader.see("#chats .title").to_have_count(len(XSS))
    assert set(XSS) == set(reader.titles())
    for title in page.locator("#chats a").all():
        title.click()
        reader.see(".answer .prose").not_to_be_empty()
        assert page.evaluate(FOUND) == []
    page.fill("#search", "pwned")
    expect(page.locator("#chats .snippet").first).to_be_visible()
    page.click("#to-corrections")
    reader.see(".correction").not_to_have_count(0)
    assert page.evaluate(FOUND) == []


def test_links_are_kept_only_where_they_lead_to_the_web_or_to_mail(reader):
    texts = [
        "[a](https://example.org/x)",
        "<https://example.org>",
        "[m](mailto:a@example.org)",
        "[r](/api/state)",
        "[d](data:text/html,x)",
        "[v](vbscript:x)",
        "[j](java&#10;script:x)",
        "![i](https://example.org/i.png)",
        "[f](file:///etc/passwd)",
        "[s](//example.org)",
    ]
    links = reader.page.evaluate(
        """async (texts) => {
          const { render } = await import("/page/markdown.js");
          return texts.map((text) => render(text).querySelector("a[href]")?.getAttribute("href") ?? null);
        }""",
        texts,
    )
    assert links == [
        "https://example.org/x",
        "https://example.org",
        "mailto:a@example.org",
        None,
        None,
        None,
        None,
        "https://example.org/i.png",
        None,
        None,
    ]


# One element gets the text at once, the other character by character; `%s` is what is compared of both, as `all`.
SHOWN = """async (text) => {
  const { Growing, render } = await import("/page/markdown.js");
  const [once, slowly] = [document.createElement("div"), document.createElement("div")];
  once.append(render(text));
  const growing = new Growing(slowly);
  for (let end = 1; end <= text.length; end++) {
    growing.text = text.slice(0, end);
    growing.draw();
  }
  return [once, slowly].map((all) => %s);
}"""


def test_text_that_grows_by_single_characters_ends_as_the_whole_text_is_shown(reader):
    whole, grown = reader.page.evaluate(
        SHOWN % 'all.textContent.replace(/\\s+/g, " ").trim()',
        "\n\n".join(
            [MARKDOWN[1], CODE[1], *XSS, "1. one\n2. two\n\n   more", "> quote\n\n[r]\n\n[r]: https://example.org"]
        ),
    )
    assert grown == whole


BARE = "def add_13(x):\n    return x + 13\n\n    # done\n\nclass A:\n    pass"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (BARE, [BARE.split("\n\nclass")[0], "class A:\n    pass"]),
        ("It is\nfor x in y:\n    print(x)", ["It is\nfor x in y:\n    print(x)"]),
        ("8 + 9 = 17\n4 + 8 + 1 = 13\nAnswer: 137", []),
        ("- one\n- two\n    three", []),
        ("A definition: def is a word.\nNothing is indented.", []),
    ],
)
def test_code_without_a_fence_keeps_its_indentation(reader, text, code):
    found = reader.page.evaluate(
        SHOWN % '[...all.querySelectorAll(".code code")].map((one) => one.textContent)',
        text,
    )
    assert found == [code, code]


@pytest.mark.parametrize("text", [">>> " * 1000, "- " * 2000 + "x"], ids=["quotes", "lists"])
def test_what_markdown_cannot_take_is_shown_as_written(reader, text):
    shown = reader.page.evaluate(
        """async (text) => {
          const { Growing, render } = await import("/page/markdown.js");
          const [once, slowly] = [document.createElement("div"), document.createElement("div")];
          once.append(render(text));
          const growing = new Growing(slowly);
          for (const part of ["so", text, text]) {
            growing.text = part;
            growing.draw();
          }
          return [once.textContent, slowly.textContent];
        }""",
        text,
    )
    assert shown == [text, text]


def with_formulas(reader: Reader) -> None:
    """The library is there; it comes with the first formula and not before."""
    assert not reader.page.evaluate("'temml' in window")
    reader.page.evaluate('import("/page/markdown.js").then(({ render }) => void render("$x$"))')
    reader.until("'temml' in window")


# Each with what its formulas say, those of a line of their own after a "|".
FORMULAS = (
    (r"Let $x^2$, \(y_1\) and *so* 2*3 = $a*b$, $c*d$.", ["x2", "y1", "a∗b", "c∗d"]),
    ("Then $$x$$ or\n\\[\n  a\n=\nb\n\\]\nof\n\n> $$\n> y\n> $$\n\n1. one\n   \\[ z \\]", ["|x", "|a=b", "|y", "|z"]),
    ("| a |\n| --- |\n| $\\frac12$ |\n\n# $h$\n\n**$b$**", ["12", "h", "b"]),
    ("$5 and $6, US$20,000 or USD$30,000\n\n$ x $\n\n\\$x$ 3$", []),
    ("`$x$` or $`x`$\n\n```tex\n$$x$$\n```\n\n    $y$\n\n~~~\n\\[x\\]", []),
    ("$$\n  a\n\nb\n$$ and $x\n\n\\[ y", []),
    (r"$\nosuch{x}$ and $\frac{$", []),
)


@BOTH
@pytest.mark.parametrize(("text", "said"), FORMULAS, ids=range(len(FORMULAS)))
def test_formulas_are_shown_as_such_and_neither_prices_nor_code(reader, text, said):
    with_formulas(reader)
    found = reader.page.evaluate(
        SHOWN
        % '[[...all.querySelectorAll("math")].map((one) => (one.hasAttribute("display") ? "|" : "") + one.textContent.trim()),'
        ' all.textContent.replace(/\\s+/g, " ").trim()]',
        text,
    )
    assert found[0][0] == said and found[1] == found[0]


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
def test_a_hostile_formula_is_shown_as_its_source_or_loses_what_is_hostile(reader):
    with_formulas(reader)
    shown = reader.page.evaluate(
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
    assert shown[0][:-1] == [f"$${text}$$" for text in HOSTILE] and "onerror=pwned(3)" in shown[0][-1]
    assert set(shown[1]) <= {"width", "height", "lspace", "scriptlevel", "displaystyle"} and shown[2]
    assert reader.page.evaluate(FOUND) == []
