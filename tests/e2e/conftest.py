"""The service as a user runs it: `longleaf serve` in a separate process, and the other commands as its clients."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.command_line import NAME, Served
from tests.support.network.ray_nodes import RayNodes, ray_nodes
from zoo.checkpoints import make_checkpoint


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Collects processes that a test starts; remaining ones are ended after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a chat template."""
    template = "{{ bos_token }}{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    return make_checkpoint(tmp_path_factory.mktemp("model"), "smollm3", seed=3, chat_template=template)


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """One Ray cluster on two hosts for all tests; a test that ends a node restarts it."""
    with ray_nodes(4) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def served(checkpoint: Path) -> Iterator[Served]:
    """One service of two ranks for all tests without fault injection."""
    os.environ.setdefault("COLUMNS", "100")
    options = ("--model", str(checkpoint), "--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000")
    with Served(*options, "--json", "--model-name", NAME) as service:
        yield service
        assert service.stop() == 0
