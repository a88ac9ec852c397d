"""Looks of the chat page, its use by hand and by keyboard, and its rendering of text that nobody trusts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import expect

from athanor.base.strict import read_yaml
from tests.serving.parrot import CODE, LONG, MARKDOWN, XSS, asking

pytestmark = pytest.mark.extra
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)

# The texts that are seen and contrast too little with their background. Colours come as rgb(), maybe with alpha.
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
    assert reader.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128") == (
        scheme == "dark"
    )
    reader.ask(CODE[0])
    reader.push("Bad answer")
    reader.model("broken")
    reader.ask("x")
    for opener, opened in (
        ("#question", ".problem"),
        ("#model-0", ".menu"),
        ("#settings", "dialog"),
        ("#files", ".menu"),
        ("#to-corrections", ".corrections"),
    ):
        reader.click(opener)
        reader.see(opened)
        assert reader.evaluate(CONTRAST) == []
        reader.keyboard.press("Escape")
    reader.click("#theme", click_count=2)
    reader.page.reload()
    reader.see("#theme[aria-label='Colours: dark']")


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
  return [...small, ...wide.map((element) => element.tagName + element.scrollWidth)];
}"""


@BOTH
def test_a_phone_shows_everything_without_sideways_scrolling_and_with_targets_for_thumbs(open_reader, server):
    reader = open_reader(
        server, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    for question in ("x" * 300 + " and\n" + "wide " * 60, MARKDOWN[0], CODE[0]):
        reader.ask(question)
    reader.push("Where is this from?")
    reader.see(".origins", "tokens stand in the training data")
    expect(reader.locator("#composer")).to_be_in_viewport(ratio=1)
    assert reader.evaluate(WIDE) == []
    reader.click("#compare")
    reader.ask(MARKDOWN[0])
    reader.count(".pair .which", 2)
    for opener, opened in (("#settings", "dialog"), ("#model-0", ".menu"), ("#open-sidebar", "#close-sidebar:focus")):
        reader.click(opener)
        reader.see(opened)
        assert reader.evaluate(WIDE) == []
        reader.keyboard.press("Escape")
    reader.count("#sidebar", 0)
    reader.click("#open-sidebar")
    reader.click("#to-corrections")
    reader.see(".corrections")
    assert reader.evaluate(WIDE) == []


@BOTH
def test_everything_can_be_done_from_the_keyboard(reader):
    keyboard = reader.keyboard
    reader.see("#question:focus")
    for event in ("isComposing: true", "keyCode: 229"):  # Enter that ends a word of an input method
        reader.evaluate(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
            f"{{ key: 'Enter', bubbles: true, cancelable: true, {event} }}))"
        )
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    keyboard.press("Enter")
    reader.answered()
    assert reader.texts(".bubble") == ["first line\nsecond line"]
    said = reader.chat()["messages"][-1]["content"]
    assert reader.texts("#live") == [" ".join(said.split())]  # as a screen reader says it
    for keys, seen in (
        ("ArrowUp", "textarea.edit:focus"),
        ("Escape", "#question"),
        ("ControlOrMeta+k", "#search:focus"),
        ("Escape", "#question:focus"),
        ("ControlOrMeta+Shift+O", ".welcome"),
        ("ControlOrMeta+Shift+S", "dialog.drawer"),
        ("Escape", "#settings:focus"),
        ("?", "dialog.keys"),
        ("Escape", "#settings:focus"),
    ):
        keyboard.press(keys)
        reader.see(seen)
    reader.count("textarea.edit, dialog", 0)
    reader.focus("#model-0")
    for key in ("Enter", "ArrowDown", "Enter"):
        keyboard.press(key)
    reader.see("#model-0:focus", "polly")


# The name of the control that has the focus, if the focus is seen.
NAMED = """() => {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  const edge = getComputedStyle(document.querySelector("#sidebar")).borderRightColor;
  const seen = style.outlineStyle !== "none" || getComputedStyle(element.closest("form") ?? element).borderColor !== edge;
  const name = element.getAttribute("aria-label") || element.labels?.[0]?.textContent || element.textContent.trim();
  return element !== document.body && seen && name;
}"""


def test_each_control_has_a_name_and_a_visible_focus(reader):
    reader.ask(CODE[0])
    reader.focus(".skip")
    controls = reader.locator("a:visible, button:visible:enabled, textarea:visible").count()
    for _ in range(controls - 3):
        reader.keyboard.press("Tab")
        assert reader.evaluate(NAMED), reader.evaluate("document.activeElement.outerHTML")


def test_a_reader_who_scrolls_up_is_left_there_and_can_jump_to_the_latest(open_reader, server):
    reader = open_reader(server, viewport={"width": 700, "height": 320})
    reader.ask(LONG[0])
    reader.ask(MARKDOWN[0])
    end = reader.locator(".stats").last
    expect(end).to_be_in_viewport()
    reader.locator(".bubble").first.scroll_into_view_if_needed()
    expect(end).not_to_be_in_viewport()
    reader.click("#latest")
    expect(end).to_be_in_viewport()
    reader.count("#latest", 0)


# -- text that nobody trusts ------------------------------------------------------------

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
    for payload in XSS:
        reader.new_chat()
        reader.ask(asking(payload))
        assert reader.evaluate("window.lengths.length"), "it was streamed"
        assert reader.chat()["messages"][-1]["content"] == payload and reader.evaluate(FOUND) == []
        reader.push("Bad answer")
        reader.fill(".better textarea", f"{payload} again")
        reader.push("Keep")
        reader.see(".answer .stats", "corrected")
        reader.evaluate(
            "title => import('/page/chats.js').then(({ update }) => update(location.hash.split('/')[2], { title }))",
            payload,
        )
    reader.reload()
    reader.count("#chats .title", len(XSS))
    assert set(XSS) == set(reader.texts("#chats .title"))
    for title in reader.locator("#chats a").all():
        title.click()
        reader.see(".answer .prose")
        assert reader.evaluate(FOUND) == []
    reader.fill("#search", "pwned")
    reader.see("#chats .snippet")
    reader.click("#to-corrections")
    reader.see(".correction")
    assert reader.evaluate(FOUND) == []


# The parts of a text that is shown at once, and of the same text as it grows by single characters, or in a few pieces
# if it is long.
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
  const all = (element, selector, part) => [...element.querySelectorAll(selector)].map(part);
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
    assert not reader.evaluate("'temml' in window")
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
            once, grown = formulas.evaluate(SHOWN, case["text"])
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
    shown, attributes, narrow = formulas.evaluate(
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
    assert formulas.evaluate(FOUND) == []
