"""Options of connections: the library says nothing about one that it does not know."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc  # pyright: ignore[reportMissingTypeStubs]

from coordinator.grpc_server import server
from longleaf.client import channels


@pytest.mark.parametrize("options", [server.OPTIONS, channels.OPTIONS], ids=["of the service", "of its clients"])
def test_each_is_one_that_the_library_knows(options: tuple[tuple[str, object], ...]) -> None:
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []
