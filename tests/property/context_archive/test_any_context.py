"""Any context comes out of a parcel as it went in, however its bytes are cut on their way."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from longleaf.context_archive.reader import IdsSection
from longleaf.context_archive.records import SegmentHead
from tests.support.parcels import packable, unpack

SIZES = st.lists(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=4)


@given(st.data(), SIZES, st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_an_archive_contains_its_whole_context(
    data: st.DataObject, sizes: list[tuple[int, int]], piece_tokens: int, piece_bytes: int, has_windows: bool
) -> None:
    keyed = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    context = packable(sizes, keyed, piece_tokens, piece_bytes, has_windows, seed=data.draw(st.integers(0, 3)))
    archive = context.packed()
    reported = unpack(archive, data.draw(st.lists(st.integers(0, len(archive)), max_size=10)))
    assert reported[0] == context.head
    travelling = [has and used == size for (size, used), has in zip(sizes, keyed, strict=True)]
    heads = [one for one in reported if isinstance(one, SegmentHead)]
    assert [head.keys is not None for head in heads] == travelling
    assert [(head.num_used, head.rope) for head in heads] == [
        (used, segment.rope) for (_, used), segment in zip(sizes, context.path, strict=True)
    ]
    ids = array("I")
    for one in reported:
        if isinstance(one, IdsSection):
            ids += one.token_ids
    expected = array("I")
    for segment, (_, used) in zip(context.path, sizes, strict=True):
        expected += segment.token_ids[:used]
    assert ids == expected
    names = [
        name
        for segment, has_keys in zip(context.path, travelling, strict=True)
        if has_keys
        for name in context.manifests[segment.id].objects
    ]
    assert [one for one in reported if isinstance(one, bytearray)] == [context.objects[name] for name in names]
