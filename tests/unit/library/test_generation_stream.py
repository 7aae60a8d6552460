"""One generation from the view of its reader."""

import pytest

from longleaf.client.generation_stream import GenerationStream
from longleaf.errors import LongleafError
from longleaf.types import Started


@pytest.mark.parametrize("position", [0, 3])
def test_service_that_ignores_hidden_ranges_is_an_error(position: int) -> None:
    previous, later = (Started(10, 8, position, "id", is_exact=is_exact) for is_exact in (True, False))
    assert GenerationStream("why?", "book", {"hidden": [(0, 4)]}).take(later)
    assert GenerationStream("why?", "book", {}).take(previous)
    with pytest.raises(LongleafError, match="earlier version"):
        GenerationStream("why?", "book", {"hidden": [(0, 4)]}).take(previous)
