"""A browser at the gateway's web page. It records all faults: console messages, errors, violations of the content
security policy, and requests that leave the origin."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.tools import lacks, tool

PATIENCE_MS = 120_000
# Chromium logs this for each response with an error status, even if the page handles it
OF_A_STATUS = r"Failed to load resource: the server responded with a status of {}"
GONE = r"Failed to load resource: net::ERR_|WebSocket|net::ERR_"
VIOLATIONS = (
    "addEventListener('securitypolicyviolation',"
    " (event) => console.error(`violates ${event.violatedDirective}: ${event.blockedURI}`))"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless one, the system's; tests without it are skipped."""
    executable = tool("chromium")
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ImportError:
        lacks("playwright is not installed: make test-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


class Reader:
    """A separate browser window without shared state; to be entered. `page` is Playwright's."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        options = {"viewport": {"width": 1280, "height": 800}, "ignore_https_errors": True, **options}
        self._context = browser.new_context(**options)
        self._context.add_init_script(VIOLATIONS)
        self.url = url
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._request)

    def __enter__(self) -> Self:
        self.page.goto(self.url)
        self.page.get_by_text("connected", exact=True).or_(self.page.get_by_role("dialog")).first.wait_for()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.close()

    def _request(self, request: Any) -> None:
        self.requests.append(request)
        if urlsplit(request.url)[:2] != urlsplit(self.url)[:2] and not request.url.startswith("data:"):
            self.complaints.append(f"request to {request.url}")

    def audit(self, *expected: str) -> None:
        """Checks that no fault was recorded, except those that these patterns match."""
        assert [each for each in self.complaints if not any(re.search(pattern, each) for pattern in expected)] == []

    def slow_uploads(self, bytes_per_second: int | None) -> None:
        """As over a thin line; None lifts it."""
        session = self._context.new_cdp_session(self.page)
        limits = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": bytes_per_second or -1}
        session.send("Network.emulateNetworkConditions", {"offline": False, **limits})

    def choose(self, *files: tuple[str, str]) -> None:
        """Takes files of these names and texts, as the button's dialog of the system would."""
        chosen = [{"name": name, "mimeType": "text/plain", "buffer": text.encode()} for name, text in files]
        self.page.locator("input[type=file]").first.set_input_files(chosen)
        self.page.get_by_role("dialog").wait_for()

    def add(self, *files: tuple[str, str]) -> None:
        """And has them go under the names that the page proposes."""
        self.choose(*files)
        self.page.get_by_role("button", name="Upload").click()

    def ask(self, question: str) -> str:
        """The whole answer."""
        before = self.page.locator(".foot").count()
        self.page.locator("#question").fill(question)
        self.page.keyboard.press("Enter")
        self.page.locator(".foot").nth(before).wait_for()
        return self.page.locator(".answer").last.inner_text().strip()

    def fits(self) -> bool:
        """Whether nothing makes the page wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def allow(self, *permissions: str) -> None:
        self._context.grant_permissions(list(permissions))

    @contextmanager
    def delayed(self, pattern: str) -> Iterator[None]:
        """Requests to these addresses wait meanwhile."""
        waiting: list[Any] = []
        self.page.route(pattern, lambda route: waiting.append(route))  # Playwright modifies its argument
        yield
        self.page.unroute(pattern)
        for route in waiting:
            route.continue_()
