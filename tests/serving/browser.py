"""A real browser on a real server, for the tests of the chat page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import Browser, BrowserContext, Error, LocatorAssertions, Page, Playwright, Route, expect

PATIENCE = 60_000  # milliseconds, for what takes a fraction of a second on a quiet machine
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
REPOSITORY = Path(__file__).resolve().parents[2]
expect.set_options(timeout=PATIENCE)


def launched(playwright: Playwright, name: str) -> Browser:
    """A browser of the system: Chromium, or playwright's own where there is none, or Firefox as it is published."""
    names = ("firefox", "firefox-esr") if name == "firefox" else ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if name == "firefox":
        mouse = {"ui.primaryPointerCapabilities": 6, "ui.allPointerCapabilities": 6}  # without a screen it sees none
        return playwright.firefox.launch(channel="moz-firefox", executable_path=path, firefox_user_prefs=mouse)
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


class Server:
    """`athanor serve` on these models, in an empty folder and in a process group of its own."""

    def __init__(self, folder: Path, models: list[Path], *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{self.port}/"
        self.folder, self.arguments = folder, [*(f"--model={path}" for path in models), *more]
        self.start()

    def start(self) -> None:
        feedback = self.folder / "feedback.jsonl"
        command = [sys.executable, "-m", "athanor", "serve", f"--port={self.port}", f"--feedback={feedback}"]
        folders = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
        for name in ("ATHANOR_API_KEY", "DVC_ROOT"):
            environment.pop(name, None)
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        deadline = time.monotonic() + PATIENCE / 1000
        while True:
            try:
                urllib.request.urlopen(self.url, timeout=5).close()
                return
            except OSError:
                log_text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
                assert self.process.poll() is None and time.monotonic() < deadline, log_text
                time.sleep(0.05)

    def signal(self, number: int) -> None:
        """To the server and its workers."""
        os.killpg(self.process.pid, number)

    def engine(self) -> psutil.Process:
        """The process that computes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in children if "athanor.llamacpp.child" in one.cmdline())

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


@contextmanager
def running(folder: Path, models: list[Path], *more: str) -> Iterator[Server]:
    server = Server(folder, models, *more)
    try:
        yield server
    finally:
        server.close()


# `pwned` is what every attack of parrot.py calls. The others are what a test wants to see at once, not after a round
# trip: the lengths of a growing answer, and a press on stop with its first text.
SCRIPT = """
window.attacks = [];
window.pwned = (number) => window.attacks.push(number);
document.addEventListener("securitypolicyviolation", (event) =>
  window.attacks.push(event.violatedDirective + event.blockedURI));
window.lengths = [];
window.stopAtOnce = false;
new MutationObserver(() => {
  const answer = document.querySelector(".answer.writing .prose");
  if (!answer) return;
  window.lengths.push(answer.textContent.length);
  if (window.stopAtOnce && answer.textContent) document.getElementById("stop").click();
}).observe(document, { childList: true, subtree: true, characterData: true });
"""


def let_driver_evaluate(context: BrowserContext, url: str) -> None:
    """Allows `eval` beside what the page's own policy allows: Firefox asks that policy also about playwright's code."""

    def answer(route: Route) -> None:
        try:
            response = route.fetch()
        except Error:  # no server
            route.abort()
            return
        headers = dict(response.headers)
        policy = headers["content-security-policy"]
        assert "script-src 'self';" in policy
        headers["content-security-policy"] = policy.replace("script-src 'self'", "script-src 'self' 'unsafe-eval'")
        route.fulfill(response=response, headers=headers)

    context.route(url, answer)


class Reader:
    """Somebody at the page: what tests do with it, and what must never have happened while they did."""

    def __init__(self, context: BrowserContext, url: str, *, wait: bool = True) -> None:
        context.add_init_script(SCRIPT)
        context.set_default_timeout(PATIENCE)
        self.url, self.context, self.page = url, context, context.new_page()
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.sent: list[dict] = []  # bodies of requests for answers
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.open(wait=wait)
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

    def open(self, fragment: str = "", *, wait: bool = True) -> Page:
        self.page.goto(self.url + fragment)
        if not wait:
            return self.page
        self.until("Boolean(document.querySelector('#models button, .welcome'))")
        return self.page

    def reload(self) -> None:
        self.page.reload()
        self.page.wait_for_selector("#models button")

    def new_chat(self) -> None:
        self.page.goto(self.url + "#/")
        self.page.wait_for_selector(".welcome")

    def see(self, selector: str, **which: str) -> LocatorAssertions:
        """What is to be expected of it."""
        return expect(self.page.locator(selector, **which))

    def press(self, name: str | re.Pattern[str], **how: bool) -> None:
        self.page.get_by_role("button", name=name, **how).click()

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.page.fill("#question", text)
        self.page.press("#question", "Enter")
        if wait:
            self.answered()

    def answered(self) -> None:
        """Until nothing is being answered any more."""
        self.until("document.querySelector('#stop').hidden && !document.querySelector('.answer.live')")

    def answers(self) -> list[str]:
        return [text.strip() for text in self.page.locator(".answer .prose").all_inner_texts()]

    def questions(self) -> list[str]:
        return self.page.locator(".message.user .bubble").all_inner_texts()

    def stats(self) -> str:
        return self.page.locator(".answer .stats").last.inner_text()

    def chat(self) -> dict:
        """The shown chat as the browser keeps it."""
        return self.page.evaluate("import('/page/chats.js').then(({ read }) => read(location.hash.split('/')[2]))")

    def titles(self) -> list[str]:
        return self.page.locator("#chats .title").all_inner_texts()

    def check(self) -> None:
        """Nothing ran that was not ours, nothing broke, and nothing was asked of another host."""
        attacks = self.page.evaluate("window.attacks")
        assert (attacks, self.dialogs, self.errors) == ([], [], [])
        hosts = {urlsplit(url).netloc for url in self.addresses if not url.startswith(("blob:", "data:"))}
        assert hosts == {urlsplit(self.url).netloc}
        assert [page.url for page in self.context.pages] == [self.page.url]


def choose_model(reader: Reader, name: str, slot: int = 0) -> None:
    reader.page.click(f"#model-{slot}")
    reader.page.locator(".menu .label", has_text=re.compile(rf"^{name}\b")).last.click()
    reader.see(f"#model-{slot}").to_contain_text(name)


def menu(reader: Reader, title: str, item: str) -> None:
    row = reader.page.locator("#chats li", has_text=title).first
    row.hover()
    row.get_by_role("button").click()
    reader.page.get_by_role("menuitem", name=item).click()
