"""A real browser on a real server, for the tests of the chat page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Playwright, Route, expect

from athanor.base.artifacts import manifest_digest
from athanor.export.huggingface import write_huggingface
from athanor.export.source import load_source
from athanor.tokenizer.tokenizer import Tokenizer
from tests.origins.world import write_data
from tests.serving.judging import write_evaluation
from tests.serving.live import Live
from tests.serving.parrot import PLAIN, WHO

PATIENCE = 60_000  # milliseconds, for what takes a fraction of a second on a quiet machine
Text = str | re.Pattern[str]
expect.set_options(timeout=PATIENCE)


def launched(playwright: Playwright, name: str) -> Browser:
    """A browser of the system: Chromium, or playwright's own where there is none, or Firefox as it is published."""
    if name == "chromium":
        return playwright.chromium.launch(executable_path=shutil.which("chromium"))
    path = shutil.which("firefox") or shutil.which("firefox-esr")
    mouse = {"ui.primaryPointerCapabilities": 6, "ui.allPointerCapabilities": 6}  # without a screen it sees none
    return playwright.firefox.launch(channel="moz-firefox", executable_path=path, firefox_user_prefs=mouse)


def serve(folder: Path, models: list[Path], *more: str) -> Live:
    return Live(folder, *(f"--model={path}" for path in models), *more)


CARD = """# parrot

| property | value |
| --- | --- |
| parameters | 234,567 |

| category | items | base | sft |
| --- | --- | --- | --- |
| identity | 1 | 0 % | 100 % |

| source | tokens | share | wanted share | times read |
| --- | --- | --- | --- | --- |
| books | 20 | 100 % | 100 % | 3.00 |
"""


def write_checkout(root: Path, parts: Path) -> list[Path]:
    """The parrot's export and its base model in a checkout that has its card, its evaluation and its training data."""
    shutil.copytree(parts / "tokenizer", root / "models/tokenizer")
    shutil.copytree(parts / "model", root / "models/base")
    write_data(root, Tokenizer.load(parts / "tokenizer"), ["A heron waits."], [PLAIN, WHO])
    made_of = {"base": "models/base", "shards": "data/shards", "sft_data": "data/sft"}
    lineage = {name: manifest_digest(root / folder) for name, folder in made_of.items()}
    lineage["eval"] = write_evaluation(root)
    export = root / "models/export"
    write_huggingface(export / "hf", load_source(parts / "model", parts / "tokenizer", "parrot", lineage), "float32")
    (export / "MODEL_CARD.md").write_text(CARD, encoding="utf-8")
    return [export / "hf", root / "models/base"]


# `pwned` is what every attack of parrot.py calls. `lengths` are those of a growing answer, `saved()` is the next file.
SCRIPT = """
window.attacks = [];
window.pwned = (number) => window.attacks.push(number);
document.addEventListener("securitypolicyviolation", (event) =>
  window.attacks.push(event.violatedDirective + event.blockedURI));
window.lengths = [];
const { createObjectURL } = URL;
const next = () => new Promise((done) => {
  URL.createObjectURL = (blob) => (done(blob.text()), createObjectURL.call(URL, blob));
});
let file = next();
window.saved = () => file.then((text) => (file = next(), text));
new MutationObserver(() => {
  const answer = document.querySelector(".answer.writing .prose");
  if (answer) window.lengths.push(answer.textContent.length);
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def let_driver_evaluate(context: BrowserContext) -> None:
    """Allow `eval` in addition to what the page's own policy allows: Firefox applies that policy to playwright's code, too."""

    def answer(route: Route) -> None:
        response = route.fetch()
        policy = response.headers["content-security-policy"].replace(
            "script-src 'self'", "script-src 'self' 'unsafe-eval'"
        )
        route.fulfill(response=response, headers=response.headers | {"content-security-policy": policy})

    context.route(re.compile(r"/$"), answer)


class Reader:
    """Somebody at the page: what tests do with it, and what must never have happened while they did."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        context.add_init_script(SCRIPT)
        context.set_default_timeout(PATIENCE)
        self.url, self.context, self.page = f"{url}/", context, context.new_page()
        self.elsewhere = []  # addresses of other hosts
        self.sent = []  # bodies of requests for answers
        self.page.on("request", self._request)
        self.page.goto(self.url)
        self.page.bring_to_front()  # Firefox gives only one window the focus

    def _request(self, request) -> None:
        if not request.url.startswith((self.url, f"blob:{self.url}", "data:")):
            self.elsewhere.append(request.url)
        if request.url.endswith("/answers"):
            self.sent.append(request.post_data_json)

    def __getattr__(self, name: str) -> Any:
        """Do what any page can do."""
        return getattr(self.page, name)

    def reload(self) -> None:
        self.page.reload()
        self.see("#models button")

    def new_chat(self) -> None:
        self.page.goto(f"{self.url}#/")
        self.see(".welcome")

    def see(self, selector: str, *texts: Text) -> None:
        """Such an element, and one with each of these texts, comes to be seen."""
        for text in texts or [""]:
            expect(self.page.locator(selector, has_text=text).filter(visible=True).first).to_be_visible()

    def count(self, selector: str, number: int) -> None:
        """So many of them come to be seen."""
        expect(self.page.locator(selector).filter(visible=True)).to_have_count(number)

    def value(self, selector: str, value: str) -> None:
        expect(self.page.locator(selector)).to_have_value(value)

    def push(self, name: Text) -> None:
        """Click a button."""
        self.page.get_by_role("button", name=name, exact=True).last.click()

    def choose(self, button: str, item: str) -> None:
        """An item of the menu that a button opens."""
        self.click(button)
        self.locator(".menu button", has_text=item).first.click()

    def model(self, name: str, slot: int = 0) -> None:
        self.choose(f"#model-{slot}", name)
        self.see(f"#model-{slot}", name)

    def chat_menu(self, title: str, item: str) -> None:
        self.page.locator("#chats li", has_text=title).first.hover()
        self.choose(f"#chats li:has-text('{title}') button", item)

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.see("#models button")  # before the models are known nothing is asked
        self.fill("#question", text)
        self.press("#question", "Enter")
        if wait:
            self.answered()

    def answered(self) -> None:
        """Until nothing is being answered any more."""
        self.count("#stop, .answer.live", 0)

    def texts(self, selector: str = ".answer .prose") -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def chat(self) -> dict:
        """The shown chat as the browser keeps it."""
        return self.page.evaluate("import('/page/chats.js').then(({ read }) => read(location.hash.split('/')[2]))")

    def saved(self, item: str, button: str = "#export") -> str:
        """The text of a file that a menu saves."""
        self.choose(button, item)
        return self.page.evaluate("saved()")  # Firefox tells the driver of no download

    def check(self) -> None:
        """Nothing ran that was not ours, nothing broke, and nothing was asked of another host."""
        assert [*self.page.evaluate("window.attacks"), *self.elsewhere, *self.page.page_errors(filter="all")] == []
        # A refused connection is what some tests are about; the browser writes it here as well.
        written = [one.text for one in self.page.console_messages(filter="all") if one.type in ("error", "warning")]
        assert [text for text in written if not text.startswith("Failed to load resource")] == []
        assert [page.url for page in self.context.pages] == [self.page.url]
