"""The service as users meet it: `longleaf serve` in a process of its own, and the other commands against it."""

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
    """Takes services and processes that a test starts; what is left of them ends with the test, however it ends."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a chat template."""
    template = "{{ bos_token }}{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    return make_checkpoint(tmp_path_factory.mktemp("model"), "smollm3", seed=3, chat_template=template)


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """One Ray on two hosts for all tests; who ends a node starts it again."""
    with ray_nodes(4) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def served(checkpoint: Path) -> Iterator[Served]:
    """One service of two ranks for all tests that do not hurt it."""
    os.environ.setdefault("COLUMNS", "100")
    options = ("--model", str(checkpoint), "--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000")
    with Served(*options, "--json", "--model-name", NAME) as service:
        yield service
        assert service.stop() == 0
