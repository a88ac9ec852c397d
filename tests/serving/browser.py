"""A real browser on a real server, for the tests of the chat page."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Error, Page, Playwright, Route, expect

from athanor.base.artifacts import manifest_digest, write_manifest
from athanor.export.huggingface import write_huggingface
from athanor.export.source import load_source
from athanor.tokenizer.tokenizer import Tokenizer
from tests.origins.world import write_data
from tests.serving.live import Live
from tests.serving.parrot import PLAIN, WHO

PATIENCE = 60_000  # milliseconds, for what takes a fraction of a second on a quiet machine
Text = str | re.Pattern[str]
expect.set_options(timeout=PATIENCE)


def launched(playwright: Playwright, name: str) -> Browser:
    """A browser of the system: Chromium, or playwright's own where there is none, or Firefox as it is published."""
    names = ("firefox", "firefox-esr") if name == "firefox" else ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if name == "firefox":
        mouse = {"ui.primaryPointerCapabilities": 6, "ui.allPointerCapabilities": 6}  # without a screen it sees none
        return playwright.firefox.launch(channel="moz-firefox", executable_path=path, firefox_user_prefs=mouse)
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def serve(folder: Path, models: list[Path], *more: str) -> Live:
    return Live(folder, *(f"--model={path}" for path in models), *more)


CARD = """# parrot

| property | value |
| --- | --- |
| parameters | 234,567 |

| category | items | base | sft |
| --- | --- | --- | --- |
| names | 1 | 0 % | 100 % |

| source | tokens | share | wanted share | times read |
| --- | --- | --- | --- | --- |
| books | 20 | 100 % | 100 % | 3.00 |
"""


def write_checkout(root: Path, parts: Path) -> list[Path]:
    """The parrot's export and its base model in a checkout that has its card, its evaluation and its training data."""
    shutil.copytree(parts / "tokenizer", root / "models/tokenizer")
    shutil.copytree(parts / "model", root / "models/base")
    write_data(root, Tokenizer.load(parts / "tokenizer"), ["A heron waits."], [PLAIN, WHO])
    item = {"category": "names", "prompt": [{"role": "user", "content": WHO[0]}], "correct": True, "kind": "exact"}
    (root / "data/eval").mkdir()
    (root / "data/eval/battery.jsonl").write_text(json.dumps(item | {"model": "sft"}), encoding="utf-8")
    write_manifest(root / "data/eval", kind="eval", version=1, counts={})
    made_of = {"base": "models/base", "shards": "data/shards", "sft_data": "data/sft", "eval": "data/eval"}
    lineage = {name: manifest_digest(root / folder) for name, folder in made_of.items()}
    export = root / "models/export"
    write_huggingface(export / "hf", load_source(parts / "model", parts / "tokenizer", "parrot", lineage), "float32")
    (export / "MODEL_CARD.md").write_text(CARD, encoding="utf-8")
    return [export / "hf", root / "models/base"]


# `pwned` is what every attack of parrot.py calls. `lengths` are those of a growing answer, `blobs` the files saved.
SCRIPT = """
window.attacks = [];
window.pwned = (number) => window.attacks.push(number);
document.addEventListener("securitypolicyviolation", (event) =>
  window.attacks.push(event.violatedDirective + event.blockedURI));
window.lengths = [];
window.blobs = [];
const { createObjectURL } = URL;
URL.createObjectURL = (blob) => (window.blobs.push(blob), createObjectURL.call(URL, blob));
new MutationObserver(() => {
  const answer = document.querySelector(".answer.writing .prose");
  if (answer) window.lengths.push(answer.textContent.length);
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def let_driver_evaluate(context: BrowserContext) -> None:
    """Allows `eval` beside what the page's own policy allows: Firefox asks that policy also about playwright's code."""

    def answer(route: Route) -> None:
        try:
            response = route.fetch()
        except Error:  # no server
            route.abort()
            return
        policy = response.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        changed = policy.replace("script-src 'self'", "script-src 'self' 'unsafe-eval'")
        route.fulfill(response=response, headers=response.headers | {"content-security-policy": changed})

    context.route(re.compile(r"/$"), answer)


class Reader:
    """Somebody at the page: what tests do with it, and what must never have happened while they did."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        context.add_init_script(SCRIPT)
        context.set_default_timeout(PATIENCE)
        self.url, self.context, self.page = f"{url}/", context, context.new_page()
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.sent: list[dict] = []  # bodies of requests for answers
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.page.goto(self.url)
        self.page.bring_to_front()  # Firefox gives only one window the focus

    def _console(self, message) -> None:
        # A refused connection is what some tests are about; the browser writes it here as well.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def _request(self, request) -> None:
        self.addresses.append(request.url)
        if request.url.endswith("/answers"):
            self.sent.append(request.post_data_json)

    def until(self, expression: str) -> None:
        """Until it is true. Asked from here: the page's policy lets playwright's own waiting evaluate nothing."""
        deadline = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(20)

    def reload(self) -> Page:
        self.page.reload()
        self.see("#models button")
        return self.page

    def new_chat(self) -> None:
        self.page.goto(f"{self.url}#/")
        self.see(".welcome")

    def see(self, selector: str, text: Text = "", count: int | None = None) -> None:
        """Such elements with this text, or so many, come to be seen."""
        found = self.page.locator(selector, has_text=text)
        expect(found.filter(visible=True)).to_have_count(count) if count is not None else expect(
            found.first
        ).to_be_visible()

    def value(self, selector: str, value: str) -> None:
        expect(self.page.locator(selector)).to_have_value(value)

    def press(self, name: Text, **how: bool) -> None:
        self.page.get_by_role("button", name=name, **how).last.click()

    def choose(self, button: str, item: Text) -> None:
        """An item of the menu that a button opens."""
        self.page.click(button)
        self.page.locator(".menu button", has_text=item).first.click()

    def model(self, name: str, slot: int = 0) -> None:
        self.choose(f"#model-{slot}", re.compile(rf"^{name}\b"))
        self.see(f"#model-{slot}", name)

    def chat_menu(self, title: str, item: str) -> None:
        self.page.locator("#chats li", has_text=title).first.hover()
        self.choose(f"#chats li:has-text('{title}') button", item)

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")
        if wait:
            self.answered()

    def answered(self) -> None:
        """Until nothing is being answered any more."""
        self.until("document.querySelector('#stop').hidden && !document.querySelector('.answer.live')")

    def texts(self, selector: str = ".answer .prose") -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def chat(self) -> dict:
        """The shown chat as the browser keeps it."""
        return self.page.evaluate("import('/page/chats.js').then(({ read }) => read(location.hash.split('/')[2]))")

    def saved(self, item: str, button: str = "#export") -> str:
        """The text of a file that a menu saves."""
        if self.context.browser.browser_type.name == "firefox":  # it tells the driver of no download
            self.choose(button, item)
            self.until("window.blobs.length")
            return self.page.evaluate("window.blobs.pop().text()")
        with self.page.expect_download() as download:
            self.choose(button, item)
        return Path(download.value.path()).read_text(encoding="utf-8")

    def check(self) -> None:
        """Nothing ran that was not ours, nothing broke, and nothing was asked of another host."""
        assert (self.page.evaluate("window.attacks"), self.errors) == ([], [])
        hosts = {urlsplit(url).netloc for url in self.addresses if not url.startswith(("blob:", "data:"))}
        assert hosts == {urlsplit(self.url).netloc}
        assert [page.url for page in self.context.pages] == [self.page.url]
