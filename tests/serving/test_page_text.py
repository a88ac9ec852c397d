"""What the chat page makes of text that nobody trusts, and how it looks and is used by hand and by keyboard."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import expect

from tests.serving.browser import PHONE, Reader, choose_model
from tests.serving.parrot import CODE, LONG, MARKDOWN, XSS, asking

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


# Of every text that is seen: its contrast with what lies behind it. Colours come as rgb(), maybe with alpha.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = rgba(getComputedStyle(element).backgroundColor);
      if (colour[3] > 250) return colour;
    }
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest(":disabled, .unseen, .skip")) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const [a, b] = [rgba(getComputedStyle(element).color), behind(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.outerHTML.slice(0, 90)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_colour_schemes(open_reader, server, scheme):
    reader = open_reader(server, color_scheme=scheme, reduced_motion="reduce")
    page = reader.page
    assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128") == (scheme == "dark")
    reader.ask(CODE[0])
    reader.press("Bad answer")
    reader.see(".better textarea").to_be_focused()
    for opened in ("#model-0", "#settings", "#files"):
        page.click(opened)
        assert page.evaluate(CONTRAST) == []
        page.keyboard.press("Escape")
    choose_model(reader, "broken")
    reader.ask("x")
    reader.see(".problem").to_be_visible()
    assert page.evaluate(CONTRAST) == []
    page.click("#to-corrections")
    reader.see(".corrections").to_be_visible()
    assert page.evaluate(CONTRAST) == []
    for _ in range(2):
        page.click("#theme")
    reader.see("#theme").to_have_attribute("aria-label", "Colours: dark")
    reader.reload()
    reader.see("#theme").to_have_attribute("aria-label", "Colours: dark")


WIDE = """() => {
  const small = [];
  for (const element of document.querySelectorAll("button, a, input:not([type=range]), textarea")) {
    const box = element.getBoundingClientRect();
    if (!box.width || element.closest(".prose, .skip, .correction, .brand a")) continue;
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.matches(".skip, .brand a, .arrows .icon, #question")) continue;
    if (box.height < 43.5 || box.width < 43.5)
      small.push(`${box.width}x${box.height} ${element.outerHTML.slice(0, 80)}`);
  }
  const wide = [document.documentElement, document.getElementById("scroll")]
    .filter((element) => element.scrollWidth > element.clientWidth);
  return [small, wide.map((element) => element.tagName + element.scrollWidth)];
}"""


@BOTH
def test_a_phone_shows_everything_without_sideways_scrolling_and_with_targets_for_thumbs(open_reader, server):
    reader = open_reader(server, viewport=PHONE, has_touch=True, is_mobile=True, reduced_motion="reduce")
    page = reader.page
    tap = page.tap if page.context.browser.browser_type.name == "chromium" else page.click  # no fingers in Firefox
    reader.ask("x" * 300 + " and\n" + "wide " * 60)
    for question in (MARKDOWN[0], CODE[0]):
        reader.ask(question)
        assert page.evaluate(WIDE) == [[], []]
    box = page.locator("#composer").bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"]
    tap("#open-sidebar")
    reader.see("#close-sidebar").to_be_focused()
    assert page.evaluate(WIDE) == [[], []]
    page.keyboard.press("Escape")
    reader.see("#sidebar").to_be_hidden()
    tap("#compare")
    reader.ask(MARKDOWN[0])
    assert page.locator(".pair .which:visible").all_inner_texts() == ["1 of 2", "2 of 2"]
    for opener in ("#settings", "#model-0"):
        tap(opener)
        assert page.evaluate(WIDE) == [[], []]
        page.keyboard.press("Escape")
    tap("#open-sidebar")
    tap("#to-corrections")
    reader.see(".corrections").to_be_visible()
    assert page.evaluate(WIDE) == [[], []]


@BOTH
def test_everything_can_be_done_from_the_keyboard(reader):
    page, keyboard = reader.page, reader.page.keyboard
    reader.see("#question").to_be_focused()
    for event in ("isComposing: true", "keyCode: 229"):  # Enter that ends a word of an input method
        page.evaluate(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
            f"{{ key: 'Enter', bubbles: true, cancelable: true, {event} }}))"
        )
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    keyboard.press("Enter")
    reader.answered()
    assert reader.questions() == ["first line\nsecond line"]
    expect(page.locator("#live")).to_have_text(reader.answers()[0])  # as a screen reader says it
    keyboard.press("ArrowUp")
    reader.see("textarea.edit").to_be_focused()
    keyboard.press("Escape")
    reader.see("textarea.edit").to_have_count(0)
    keyboard.press("Control+k")
    reader.see("#search").to_be_focused()
    keyboard.press("Escape")
    keyboard.press("Control+Shift+O")
    reader.see("#question").to_be_focused()
    page.evaluate("document.activeElement.blur()")
    keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.focus("#model-0")
    keyboard.press("Enter")
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    reader.see("#model-0").to_contain_text("polly")
    reader.see("#model-0").to_be_focused()


def test_each_control_has_a_name_and_a_visible_focus(reader):
    page = reader.page
    reader.ask(CODE[0])
    page.focus(".skip")
    seen = []
    while len(seen) < 60:
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
              const edge = getComputedStyle(document.querySelector("#sidebar")).borderRightColor;
              const f = getComputedStyle(e.closest("form") ?? e);
              return [e === document.body ? "" : e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent.trim(),
                s.outlineStyle !== "none" || f.borderColor !== edge]; }"""
        )
        if not name:
            break
        assert outlined, name
        seen.append(name)
    assert page.locator("a:visible, button:visible:enabled, textarea:visible").count() <= len(seen) + 3


def test_a_reader_who_scrolls_up_is_left_there_and_can_jump_to_the_latest(open_reader, server):
    reader = open_reader(server, viewport={"width": 700, "height": 320})
    page = reader.page
    at_end = """(({ scrollTop, scrollHeight, clientHeight }) => scrollHeight - scrollTop - clientHeight < 60)
      (document.getElementById("scroll"))"""
    reader.ask(LONG[0])
    reader.ask(MARKDOWN[0])
    assert page.evaluate(at_end)
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    reader.see("#latest").to_be_visible()
    page.click("#latest")
    reader.until(at_end)
    reader.see("#latest").to_be_hidden()
