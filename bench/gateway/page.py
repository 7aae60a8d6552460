"""The time until a reader can use the page, and its bytes over the wire, in headless Chromium with an empty cache each
time.
"""

import shutil
from dataclasses import dataclass
from statistics import median
from typing import Any

TIMES = 10
CHROMIUM = "chromium"
# from the first byte of the first answer to the mark that the page sets when its controls are there and listen
INTERACTIVE = """() => performance.getEntriesByName('interactive')[0].startTime
  - performance.getEntriesByType('navigation')[0].responseStart"""


@dataclass(frozen=True)
class PageFigures:
    """Of pages that were opened one after the other, each as if for the first time."""

    interactive_ms: float
    """From the first byte until it takes input: the median."""
    each_ms: tuple[float, ...]
    wire_bytes: int
    """With headers, and as compressed as they came."""
    requests: int
    """Bytes of the page's own files."""
    browser: str


def measure_page(url: str, times: int = TIMES) -> PageFigures:
    """Opens the page at `url` so often. Needs Playwright and a Chromium of the system."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    executable = shutil.which(CHROMIUM)
    if executable is None:
        raise FileNotFoundError(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        open_page(browser, url)  # the first page of a browser includes the start of the browser
        found = [open_page(browser, url) for _ in range(times)]
        version = f"Chromium {browser.version}"
        browser.close()
    each = tuple(round(milliseconds, 1) for milliseconds, _ in found)
    _, sizes = found[-1]
    return PageFigures(round(median(each), 1), each, sum(sizes), len(sizes), version)


def open_page(browser: Any, url: str) -> tuple[float, list[int]]:
    """Milliseconds until it takes input, and the bytes of each of its files."""
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    names: dict[str, str] = {}
    sizes: list[int] = []

    def finished(event: dict[str, Any]) -> None:
        # the API's answers are no part of the page
        if "/v1/" not in names.get(event["requestId"], "/v1/"):
            sizes.append(int(event["encodedDataLength"]))

    session.on("Network.responseReceived", lambda event: names.update({event["requestId"]: event["response"]["url"]}))
    session.on("Network.loadingFinished", finished)
    page.goto(url)
    page.wait_for_function("performance.getEntriesByName('interactive').length > 0")
    milliseconds = page.evaluate(INTERACTIVE)
    context.close()
    return milliseconds, sizes
