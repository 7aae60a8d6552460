"""Transfer size of the page."""

from typing import Any

from bench.gateway.page import open_page
from tests.support.gateway_fakes import Behind

MOST_BYTES = 70_000


def test_page_transfer_size_with_headers_is_small(browser: Any, behind: Behind):
    _, sizes = open_page(browser, behind.url)
    assert len(sizes) > 20
    assert sum(sizes) <= MOST_BYTES
