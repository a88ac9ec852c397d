"""How the chat page looks, and how it is used by hand and by keyboard."""

from __future__ import annotations

import pytest

from tests.serving.parrot import CODE, LONG, MARKDOWN

pytestmark = pytest.mark.extra
BOTH = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)

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
    reader.model("broken")
    reader.ask("x")
    for opener, opened in (
        ("#question", ".problem"),
        ("#model-0", ".menu"),
        ("#settings", "dialog"),
        ("#files", ".menu"),
        ("#to-corrections", ".corrections"),
    ):
        page.click(opener)
        reader.see(opened)
        assert page.evaluate(CONTRAST) == []
        page.keyboard.press("Escape")
    page.click("#theme", click_count=2)
    page.reload()
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
  return [small, wide.map((element) => element.tagName + element.scrollWidth)];
}"""


@BOTH
def test_a_phone_shows_everything_without_sideways_scrolling_and_with_targets_for_thumbs(open_reader, server):
    reader = open_reader(
        server, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, reduced_motion="reduce"
    )
    page = reader.page
    for question in ("x" * 300 + " and\n" + "wide " * 60, MARKDOWN[0], CODE[0]):
        reader.ask(question)
    reader.press("Where is this from?")
    reader.see(".origins", "tokens stand in the training data")
    box = page.locator("#composer").bounding_box()
    assert page.evaluate(WIDE) == [[], []] and box["y"] + box["height"] <= 844
    page.click("#compare")
    reader.ask(MARKDOWN[0])
    reader.count(".pair .which", 2)
    for opener, opened in (("#settings", "dialog"), ("#model-0", ".menu"), ("#open-sidebar", "#close-sidebar:focus")):
        page.click(opener)
        reader.see(opened)
        assert page.evaluate(WIDE) == [[], []]
        page.keyboard.press("Escape")
    reader.count("#sidebar", 0)
    page.click("#open-sidebar")
    page.click("#to-corrections")
    reader.see(".corrections")
    assert page.evaluate(WIDE) == [[], []]


@BOTH
def test_everything_can_be_done_from_the_keyboard(reader):
    page, keyboard = reader.page, reader.page.keyboard
    reader.see("#question:focus")
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
    assert reader.texts(".bubble") == ["first line\nsecond line"]
    assert reader.texts("#live") == [reader.chat()["messages"][-1]["content"]]  # as a screen reader says it
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
    page.focus("#model-0")
    for key in ("Enter", "ArrowDown", "Enter"):
        keyboard.press(key)
    reader.see("#model-0:focus", "polly")


# Of each control in the order of Tab: its name where its focus is seen.
NAMED = """() => {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  const edge = getComputedStyle(document.querySelector("#sidebar")).borderRightColor;
  const seen = style.outlineStyle !== "none" || getComputedStyle(element.closest("form") ?? element).borderColor !== edge;
  const name = element.getAttribute("aria-label") || element.labels?.[0]?.textContent || element.textContent.trim();
  return element !== document.body && seen && name;
}"""


def test_each_control_has_a_name_and_a_visible_focus(reader):
    page = reader.page
    reader.ask(CODE[0])
    page.focus(".skip")
    controls = page.locator("a:visible, button:visible:enabled, textarea:visible").count()
    for _ in range(controls - 3):
        page.keyboard.press("Tab")
        assert page.evaluate(NAMED), page.evaluate("document.activeElement.outerHTML")


def test_a_reader_who_scrolls_up_is_left_there_and_can_jump_to_the_latest(open_reader, server):
    reader = open_reader(server, viewport={"width": 700, "height": 320})
    end = "(({ scrollTop, scrollHeight, clientHeight }) => scrollHeight - scrollTop - clientHeight)(document.querySelector('#scroll'))"
    reader.ask(LONG[0])
    reader.ask(MARKDOWN[0])
    assert reader.page.evaluate(end) < 60
    reader.page.evaluate("document.querySelector('#scroll').scrollTop = 0")
    reader.page.click("#latest")
    reader.count("#latest", 0)
    assert reader.page.evaluate(end) < 60
