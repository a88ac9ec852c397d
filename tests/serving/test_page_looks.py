"""How the chat page looks, and how it is used by hand and by keyboard."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
from playwright.sync_api import expect

from tests.serving.browser import PHONE, choose_model
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
    page.reload()
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
    expect(page.locator("#live")).to_have_text(reader.chat()["messages"][-1]["content"])  # as a screen reader says it
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
