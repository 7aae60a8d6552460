"""One browser, and one service for all tests without fault injection; each test has an empty document list and its own
window."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import Reader, chromium
from tests.support.gateway_fakes import Behind


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def service(browser: Any) -> Iterator[Behind]:
    """Depends on the browser: without one no service is started."""
    with Behind() as behind:
        yield behind


@pytest.fixture
def behind(service: Behind) -> Behind:
    service.clear()
    return service


@pytest.fixture
def reader(browser: Any, behind: Behind) -> Iterator[Reader]:
    with Reader(browser, behind.url) as reader:
        yield reader
