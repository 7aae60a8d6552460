"""The choice between whole and sharded weights by the memory of the nodes of a Ray cluster."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.service import WHOLE_UNKNOWN, Service
from longleaf.config import EngineConfig
from longleaf.service_settings import ServiceConfig
from tests.support.fakes.ranks import FakeFleet
from tests.support.small_weights import write_tensors

SHARDED = "weights: sharded, about 500 B on each of 4 ranks: all 2.0 KiB do not fit into the 1.5 KiB of a rank"


class SizedFleet(FakeFleet):
    """A fleet whose ranks have this memory, in bytes."""

    def __init__(self, size: int | None) -> None:
        super().__init__(0)
        self._size = size

    async def rank_memory(self) -> int | None:
        return self._size


@pytest.mark.parametrize(
    ("size", "weights", "notes"),
    [(1536, "sharded", (SHARDED,)), (8192, "whole", ()), (None, "whole", (WHOLE_UNKNOWN,))],
)
async def test_the_memory_of_the_nodes_determines_the_weights(
    tmp_path: Path, size: int | None, weights: str, notes: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    write_tensors(tmp_path / "model.safetensors", {"a": ("BF16", [1000])})
    engine = EngineConfig(model=str(tmp_path), world_size=4)
    service = Service(ServiceConfig(engine=engine, launcher="ray", ray_address="auto"), SizedFleet(size))
    assert await service._choose_weights(engine) == (
        replace(engine, weights=weights, weights_dtype="dequantized"),
        notes,
    )
