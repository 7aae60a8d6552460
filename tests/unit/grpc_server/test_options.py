"""gRPC channel options: the library silently ignores unknown ones."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc  # pyright: ignore[reportMissingTypeStubs]

from coordinator.grpc_server import server
from longleaf.client import channels


@pytest.mark.parametrize("options", [server.OPTIONS, channels.OPTIONS], ids=["service", "clients"])
def test_every_option_is_known_to_the_library(options: tuple[tuple[str, object], ...]) -> None:
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []
