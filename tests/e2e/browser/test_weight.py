"""What the page brings over the wire."""

from typing import Any

from bench.door.page import open_page
from tests.support.behind_door import Behind

MOST_BYTES = 60_000


def test_all_of_the_page_is_small_over_the_wire_with_headers(browser: Any, behind: Behind):
    _, sizes = open_page(browser, behind.url)
    assert len(sizes) > 20
    assert sum(sizes) <= MOST_BYTES
