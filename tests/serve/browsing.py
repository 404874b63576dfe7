"""A headless Chromium, and a visit to the page in it, for tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip
needed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update",
         "--disable-sync"]  # fmt: skip
PATIENCE_MS = 60_000
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 900}


class Visit:
    """A page, and what it must not do: complain, or ask another host."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**{"viewport": DESKTOP, **context})
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._asked)
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        # The browser's own line for an answer of 4xx; what the page makes of it is tested.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.wrong.append(message.text)

    def _asked(self, request: Any) -> None:
        self.asked.append(request.url)
        if not request.url.startswith(self.url):
            self.wrong.append(f"asked for {request.url}")

    def state(self, text: str) -> None:
        sync_api.expect(self.page.locator("#state")).to_have_text(text, timeout=PATIENCE_MS)

    def wait(self, condition: str) -> None:
        """Until it is true. (`wait_for_function` needs eval, which the page's policy forbids.)"""
        for _ in range(PATIENCE_MS // 50):
            if self.page.evaluate(f"!!({condition})"):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}; {self.wrong}")

    def too_wide_px(self) -> int:
        found: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return found

    def close(self) -> None:
        self.context.close()
        assert not self.wrong, self.wrong


@contextmanager
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
