"""For any truncation of or damage to a journal, the entries read are a prefix of the entries written."""

from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.engine_messages import Admitted, Ended, Tokens
from coordinator.persistence.journal.entries import Entry, GenerationEntry, JournalEvent, encode_entry, read_entries
from coordinator.persistence.journal.journal import Journal
from longleaf.sampling import Logprobs, Sampling, Token, TokenLogprob
from longleaf.types import Generate

LOGPROBS = st.builds(
    Logprobs,
    st.floats(-50, 0),
    st.lists(st.builds(TokenLogprob, st.integers(0, 2**31), st.floats(-50, 0)), max_size=3).map(tuple),
)
TOKENS = st.lists(st.builds(Token, st.integers(0, 2**31), st.none() | LOGPROBS), min_size=1, max_size=5).map(tuple)
COUNTS = st.integers(0, 2**40)
EVENTS = st.one_of(
    st.builds(Admitted, COUNTS, COUNTS, st.integers(0, 9), st.booleans()),
    st.builds(Tokens, COUNTS, TOKENS, st.integers(0, 7), num_drafted=COUNTS, num_accepted=COUNTS),
    st.builds(Ended, st.sampled_from(["length", "end_token", "stop_token"]), *[COUNTS] * 3, *[st.floats(0, 9)] * 3),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    stop_tokens=st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-9, 9), max_size=2),
    num_logprobs=st.none() | st.integers(0, 20),
)
GENERATIONS = st.builds(
    GenerationEntry,
    request_id=st.text("abc.-_", min_size=1, max_size=9),
    request=st.builds(
        Generate,
        input=st.just(""),
        context=st.none() | st.just("doc"),
        sampling=SAMPLINGS,
        num_samples=st.integers(1, 4),
        max_draft_tokens=st.none() | st.integers(0, 31),
        resume_seconds=st.floats(0, 99),
        priority=st.integers(-3, 3),
        client=st.text(max_size=5),
    ),
    question=st.binary(min_size=32, max_size=32),
    prompt=st.lists(st.binary(min_size=4, max_size=4), max_size=9).map(b"".join),
    deadline=st.none() | st.floats(0, 1e10),
)


def read(content: bytes) -> list[Entry]:
    return [entry for entry, _ in read_entries(BytesIO(content), len(content))]


@given(entries=st.lists(EVENTS | GENERATIONS, max_size=6), data=st.data())
def test_any_beginning_reads_as_the_entries_that_are_whole(entries: list[Entry], data: st.DataObject) -> None:
    parts = [encode_entry(entry) for entry in entries]
    content = b"".join(parts)
    assert read(content) == entries
    size = data.draw(st.integers(0, len(content)))
    num_whole = sum(len(b"".join(parts[: n + 1])) <= size for n in range(len(parts)))
    assert read(content[:size]) == entries[:num_whole]


@given(entries=st.lists(EVENTS, min_size=1, max_size=4), data=st.data(), mask=st.integers(1, 255))
def test_one_byte_that_changes_ends_the_reading_before_its_entry(
    entries: list[Entry], data: st.DataObject, mask: int
) -> None:
    parts = [encode_entry(entry) for entry in entries]
    content = bytearray(b"".join(parts))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= mask
    num_before = sum(len(b"".join(parts[: n + 1])) <= place for n in range(len(parts)))
    assert read(bytes(content)) == entries[:num_before]


@given(
    generation=GENERATIONS,
    events=st.lists(EVENTS, max_size=5),
    more=st.lists(EVENTS, min_size=1, max_size=3),
    torn=st.binary(max_size=20),
    cut=st.floats(0, 1),
)
@settings(max_examples=60)
def test_what_goes_on_after_a_torn_entry_is_read_with_what_was_before(
    generation: GenerationEntry, events: list[JournalEvent], more: list[JournalEvent], torn: bytes, cut: float
) -> None:
    last = encode_entry(Tokens(7, (Token(7),)))
    with TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(folder)
        with journal.begin(generation) as record:
            for event in events:
                record.append(event)
        [path] = folder.iterdir()
        with path.open("ab") as file:
            file.write(last[: int(cut * (len(last) - 1))] or torn)
        [retained] = Journal(folder).load()
        assert retained.events[: len(events)] == events
        assert len(retained.events) == len(events)
        with journal.reopen(generation.request_id) as record:
            for event in more:
                record.append(event)
        [retained] = Journal(folder).load()
        assert retained.events == [*events, *more]
        assert msgspec.structs.replace(retained.entry, checkpoint="") == generation
