"""Any history of contexts: its notes and manifests rebuild the same catalog."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.persistence.catalog.rebuild_plan import StorageContents, rebuild
from coordinator.persistence.catalog.records import CatalogContents, Change
from longleaf.storage.context_note import ContextNote
from longleaf.storage.context_record import ContextRecord
from longleaf.storage.files import ObjectInfo
from longleaf.storage.inventory import NoteListing
from longleaf.storage.segment_record import SegmentRecord
from tests.support.catalog import context, segment
from tests.support.fakes.catalog import changed
from tests.support.stored_contexts import SERVICE, deletion, manifest_name, manifest_of, note_of

NAMES = st.sampled_from("a b c d".split())


@dataclass
class History:
    """A catalog, and all that was ever written to storage of it."""

    contents: CatalogContents = field(default_factory=lambda: CatalogContents(service_id=SERVICE))
    notes: list[ContextNote] = field(default_factory=list)
    segments: list[SegmentRecord] = field(default_factory=list)

    def find(self, name: str) -> ContextRecord | None:
        return next((each for each in self.contents.contexts if each.id == name), None)

    def ingest(self, name: str, count: int) -> None:
        """A new context, or more of one."""
        known, number = self.find(name), self.contents.next_segment
        parent, start = (known.segment, known.num_tokens) if known else (None, 0)
        new = segment(number, count, parent, start)
        self.segments.append(new)
        ends = (*(known.ends if known else ()), start + count)[-4:]
        self._put(context(name, number, start + count, ends=ends), (new,))

    def fork(self, source: str, name: str, part: float) -> None:
        known = self.find(source)
        if known is None or self.find(name) is not None:
            return
        end = max(1, int(part * known.num_tokens))
        path = [each for each in self.contents.path(known) if each.start < end]
        self._put(context(name, path[-1].id, end))

    def delete(self, name: str) -> None:
        if self.find(name) is not None:
            self.notes.append(deletion(name, len(self.notes)))
            self.contents, _ = changed(self.contents, Change(dropped_contexts=(name,)))

    def _put(self, record: ContextRecord, segments: tuple[SegmentRecord, ...] = ()) -> None:
        record = replace(record, last_used=record.updated)
        self.notes.append(note_of(record, len(self.notes)))
        self.contents, _ = changed(self.contents, Change(segments=segments, contexts=(record,)))

    @property
    def stored(self) -> StorageContents:
        manifests = {manifest_name(each): each for each in map(manifest_of, self.segments)}
        pieces = {piece.name: piece.num_bytes for each in manifests.values() for piece in each.pieces}
        objects = {**pieces, **dict.fromkeys(manifests, 9), **{note.place.name: 9 for note in self.notes}}
        return StorageContents(
            notes=NoteListing({(SERVICE, note.place.context): note for note in self.notes}, []),
            manifests=manifests,
            damaged={},
            others=(),
            entries={name: ObjectInfo(name, size, 0.0) for name, size in objects.items()},
        )


INGESTS = st.tuples(st.just("ingest"), NAMES, st.integers(1, 30))
FORKS = st.tuples(st.just("fork"), NAMES, NAMES, st.floats(0, 1))
DELETIONS = st.tuples(st.just("delete"), NAMES)


@given(steps=st.lists(INGESTS | FORKS | DELETIONS, max_size=14))
def test_the_catalog_is_what_it_was(steps: list[tuple[str, ...]]) -> None:
    history = History()
    for verb, *arguments in steps:
        getattr(history, verb)(*arguments)
    made = rebuild(history.stored, SERVICE)
    assert made.skipped == []
    assert made.contents.contexts == history.contents.contexts
    assert made.contents.segments == history.contents.segments
    assert [each.segment for each in made.contents.snapshots] == [each.id for each in history.contents.segments]
    assert made.contents.next_segment == history.contents.next_segment
    assert made.contents.next_outgoing == len(history.notes)


@given(steps=st.lists(INGESTS | FORKS, min_size=1, max_size=10), data=st.data())
def test_what_is_missing_takes_with_it_what_needs_it_and_nothing_else(
    steps: list[tuple[str, ...]], data: st.DataObject
) -> None:
    history = History()
    for verb, *arguments in steps:
        getattr(history, verb)(*arguments)
    numbers = [each.id for each in history.segments]
    lost = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set[int]()
    stored = history.stored
    gone = {piece.name for each in stored.manifests.values() for piece in each.pieces[:1] if _number(each) in lost}
    entries = {name: entry for name, entry in stored.entries.items() if name not in gone}
    made = rebuild(replace(stored, entries=entries), SERVICE)
    retained = history.contents
    whole = {each.id for each in retained.contexts if lost.isdisjoint(part.id for part in retained.path(each))}
    assert {each.id for each in made.contents.contexts} == whole
    assert {each.name for each in made.skipped} == {each.id for each in retained.contexts} - whole
    for each in made.contents.contexts:
        assert made.contents.path(each) == retained.path(each)


def _number(manifest) -> int:
    return int(manifest.segment.rpartition("-")[2])
