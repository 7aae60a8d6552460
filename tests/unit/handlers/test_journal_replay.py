"""The replay of a journal whose steps produced several tokens."""

from io import BytesIO

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.engine_messages import Admitted, Ended, Prompt, Tokens
from coordinator.handlers.journal_replay import replay_journal
from coordinator.handlers.response_assembler import ResponseAssembler
from coordinator.persistence.journal.entries import JournalEvent, encode_entry, read_entries
from coordinator.text.detokenizer import Alphabet
from longleaf.sampling import Sampling, Token
from longleaf.types import Event, Finished, Generate, Timings
from tests.support.service import BYTES, ids

END = BYTES.token_to_id("<|end|>")
ALPHABET = Alphabet(decode=lambda token_ids: BYTES.decode(list(token_ids)), silent=frozenset({END}))
SAMPLING = Sampling(max_tokens=20, stop=("bc", "dd"), stop_tokens=tuple(ids("!")))
PROMPT = Prompt(context=None, token_ids=(1, 2), sampling=SAMPLING, end_tokens=frozenset({END}), num_samples=2)


def answer() -> ResponseAssembler:
    request = Generate(input="", sampling=SAMPLING, num_samples=2)
    return ResponseAssembler("id", request, ALPHABET, frozenset({END}), lambda: 0.0, exactness_note="")


@st.composite
def scripts(draw: st.DrawFn) -> list[JournalEvent]:
    """The engine's events for two samples: steps of several tokens, up to the end of an answer."""
    output = [list[JournalEvent](), list[JournalEvent]()]
    for sample, mine in enumerate(output):
        index, reason = 0, None
        while reason is None:
            token_ids = draw(st.lists(st.sampled_from([*ids("abcd!"), END]), min_size=1, max_size=8))
            reasons = [PROMPT.end_reason(i, index + n) for n, i in enumerate(token_ids, 1)]
            num_reported = next((n for n, each in enumerate(reasons, 1) if each is not None), len(reasons))
            reason, reported = reasons[num_reported - 1], tuple(map(Token, token_ids[:num_reported]))
            mine.append(Tokens(index, reported, sample, (), num_drafted=7, num_accepted=num_reported - 1))
            index += num_reported
        mine.append(Ended(reason, 5, 3, index, 0.0, 0.0, 0.0, sample))
    order = draw(st.permutations([0] * len(output[0]) + [1] * len(output[1])))
    return [Admitted(5, 3), *(output[sample].pop(0) for sample in order)]


def untimed(event: Event) -> Event:
    return replace(event, timings=Timings()) if isinstance(event, Finished) else event


@given(script=scripts(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_journal_replay_emits_the_same_deltas(script: list[JournalEvent], data: st.DataObject) -> None:
    """Wherever the service died, the rest of the answer is sent as it would have been, with the draft counts of
    both."""
    one = answer()
    expected = [untimed(event) for entry in script for event in one.take(entry)]
    num_retained = data.draw(st.integers(1, len(script)))
    content = b"".join(map(encode_entry, script[:num_retained]))
    retained = [entry for entry, _ in read_entries(BytesIO(content), len(content))]
    again = answer()
    replayed = replay_journal([entry for entry in retained if isinstance(entry, JournalEvent)], PROMPT, again)
    found = [untimed(event) for event in replayed.events]
    for sample, token_ids in replayed.generated.items():
        assert PROMPT.end_reason(token_ids[-1], len(token_ids)) is None if token_ids else True
        entries = [entry for entry in script[:num_retained] if isinstance(entry, Tokens) and entry.sample == sample]
        assert list(token_ids) == [i for entry in entries for i in entry.token_ids]
    found += [untimed(event) for entry in script[num_retained:] for event in again.take(entry)]
    assert again.is_finished
    for sample in range(2):
        mine = [
            [event for event in events if getattr(event, "sample", sample) == sample] for events in (found, expected)
        ]
        assert mine[0] == mine[1]
