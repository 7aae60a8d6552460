"""Structs that extend ContextMetadata are stored with their own fields first, as the formats on storage have them."""

import msgspec
import pytest

from coordinator.persistence.catalog.records import ContextRecord
from longleaf.context_archive.records import ContextHead
from longleaf.storage.context_metadata import ContextMetadata, metadata_fields
from longleaf.storage.context_note import ContextNote

METADATA = ["num_tokens", "ends", "capacity", "created", "updated", "display_name", "is_pinned", "expires"]


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (ContextMetadata, []),
        (ContextNote, ["service", "context", "number", "is_deleted", "segment"]),
        (ContextHead, ["fingerprint", "model", "context"]),
    ],
)
def test_order_of_stored_fields(kind: type[ContextMetadata], own: list[str]) -> None:
    assert list(kind.__struct_fields__) == [*own, *METADATA]


def test_metadata_of_a_record_is_that_of_its_note() -> None:
    metadata = ContextMetadata(
        num_tokens=8, ends=(4, 8), capacity=9, created=1.5, updated=2.5, display_name="x", is_pinned=True, expires=3.5
    )
    record = ContextRecord(id="moby", segment=3, last_used=4.5, **metadata_fields(metadata))
    note = ContextNote("service", "moby", 1, **metadata_fields(record))
    assert metadata_fields(note) == msgspec.structs.asdict(metadata)
