"""Pictures of the chat page for the documentation, from a running server.

    athanor serve --feedback /somewhere/else.jsonl &
    python tools/screenshots.py http://127.0.0.1:8080/ [--out docs]

Asks a few questions that the default run teaches and one that it does not, so
give the server a file of feedback of its own. The picture of a comparison needs two
models. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
CODE = "Write a Python function add_13(x) that returns x plus 13."
SUM, WHO, HARD = "Compute 48 + 89 column by column.", "Who are you?", "What is 3 + 4?"
UNKNOWN = "What is the capital of France?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
        )
        take_all(browser, options.url, options.out)
        browser.close()
    return 0


def take_all(browser: Browser, url: str, out: Path) -> None:
    page = visit(browser, url, viewport=DESKTOP)
    for question in ("What does StopIteration mean?", "What does HTTP status 404 mean?", WHO):
        ask(page, question)
        page.keyboard.press("Control+Shift+O")
        page.wait_for_selector(".card")
    take(page, out / "chat-welcome.png")
    ask(page, "hi")
    ask(page, SUM)
    ask(page, CODE)
    take(page, out / "chat-desktop.png")
    page.click("#model-0")
    page.get_by_role("menuitem", name="About").click()
    page.wait_for_selector("dialog.about")
    take(page, out / "chat-about.png")
    page.keyboard.press("Escape")
    ask(page, HARD)
    page.get_by_role("button", name="Bad answer").last.click()
    page.fill(".better textarea", "3 + 4 = 7")
    page.get_by_role("button", name="Keep", exact=True).click()
    page.wait_for_selector(".better", state="detached")
    page.click("#to-corrections")
    page.wait_for_selector(".correction")
    take(page, out / "chat-corrections.png")
    if page.locator("#compare").is_enabled():
        page.keyboard.press("Control+Shift+O")
        page.wait_for_selector(".card")
        page.click("#compare")
        ask(page, CODE)
        take(page, out / "chat-compare.png")
    page = visit(browser, url, viewport=DESKTOP, color_scheme="dark")
    ask(page, CODE)
    page.click("#settings")
    page.wait_for_selector("dialog.drawer")
    take(page, out / "chat-settings-dark.png")
    page.click("#set-chances")
    page.keyboard.press("Escape")
    ask(page, UNKNOWN)
    page.locator(".token").first.focus()
    take(page, out / "chat-probabilities.png")
    page = visit(browser, url, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    ask(page, CODE)
    take(page, out / "chat-phone.png")


def visit(browser: Browser, url: str, **settings: object) -> Page:
    page = browser.new_context(reduced_motion="reduce", **settings).new_page()
    page.goto(url)
    page.wait_for_selector(".card")
    return page


def ask(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")
    page.wait_for_selector("#stop", state="hidden")
    page.wait_for_selector(".answer:not(.live)")


def take(page: Page, path: Path) -> None:
    page.mouse.move(640, 5)
    page.wait_for_selector(".toast", state="detached")
    page.wait_for_timeout(400)  # for the end of a transition; no test depends on it
    page.screenshot(path=path)
    print(f"{path} {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
