"""The responses for a request's samples whose tokens are interleaved."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import engine_messages
from coordinator.handlers.response_assembler import ResponseAssembler
from coordinator.text.detokenizer import Alphabet
from longleaf.sampling import Logprobs, Sampling, Token
from longleaf.types import Delta, Event, Finished, Generate, Recovering, Started, Usage
from tests.support.service import BYTES, ids, tokens

END = BYTES.token_to_id("<|end|>")
ALPHABET = Alphabet(decode=lambda token_ids: BYTES.decode(list(token_ids)), silent=frozenset({END}))


class TickingClock:
    """A clock that advances by one second at each read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def answer(num_samples: int = 1, **sampling: object) -> ResponseAssembler:
    request = Generate(input="", sampling=Sampling(**sampling), num_samples=num_samples)  # type: ignore[arg-type]
    return ResponseAssembler("id", request, ALPHABET, frozenset({END}), TickingClock(), exactness_note="")


def ended(sample: int = 0, reason: engine_messages.EndReason = "length") -> engine_messages.Ended:
    return engine_messages.Ended(reason, 5, 3, 2, 0.5, 1.5, 2.0, sample)


def assemble(answer: ResponseAssembler, *events: engine_messages.Event) -> list[Event]:
    return [message for event in events for message in answer.take(event)]


def text_of(messages: list[Event], sample: int = 0) -> str:
    return "".join(m.text for m in messages if isinstance(m, Delta) and m.sample == sample)


def logprob_of(token_id: int) -> Logprobs:
    return Logprobs(-float(token_id), ())


@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=4),
    step=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    stop=st.sampled_from([(), ("a",), ("é!", "b")]),
)
@settings(max_examples=150, deadline=None)
def test_interleaved_samples_are_assembled_independently(
    texts: list[str], step: int, seed: int, stop: tuple[str, ...]
) -> None:
    """Each has its own text, indices, logprobs and stop strings; ids and logprobs travel with their text."""
    output: list[list[engine_messages.Event]] = []
    for sample, text in enumerate(texts):
        token_ids = ids(text)
        output.append([])
        for start in range(0, len(token_ids), step):
            part = token_ids[start : start + step]
            output[-1].append(engine_messages.Tokens(start, tuple(Token(i, logprob_of(i)) for i in part), sample))
        output[-1].append(ended(sample))
    alone = []
    for script in output:
        one = answer(len(texts), stop=stop)
        alone.append([m for m in assemble(one, *script) if not isinstance(m, Finished)])
        assert one.is_finished == (len(texts) == 1)
    rng, together, mixed = random.Random(seed), answer(len(texts), stop=stop), []
    while any(output):
        mixed += together.take(rng.choice([script for script in output if script]).pop(0))
    assert together.is_finished
    for sample, text in enumerate(texts):
        mine = [m for m in mixed if isinstance(m, Delta | Finished) and m.sample == sample]
        assert mine[:-1] == alone[sample]
        assert isinstance(mine[-1], Finished)
        cuts = [text.find(s) for s in stop if s in text]
        assert text_of(mine, sample) == text[: min(cuts)] if cuts else text_of(mine, sample) == text
        assert (mine[-1].reason == "stop") == bool(cuts)
        index = 0
        for delta in mine[:-1]:
            assert isinstance(delta, Delta)
            assert delta.index == index
            assert delta.logprobs == tuple(map(logprob_of, delta.token_ids))
            index += len(delta.token_ids)


@st.composite
def cut(draw: st.DrawFn, max_tokens: int = 24) -> tuple[list[int], list[int]]:
    """Ids of "ab", "cd" and, at random places, an end token, and the indices where steps begin."""
    token_ids = draw(st.lists(st.sampled_from([*ids("abcd!"), END]), min_size=1, max_size=max_tokens))
    return token_ids, sorted(draw(st.sets(st.integers(1, max_tokens), max_size=8)) | {0})


def steps(token_ids: list[int], starts: list[int], reason: engine_messages.EndReason) -> list[engine_messages.Event]:
    """The engine's events for an answer whose steps begin at these indices. Each step had three drafts more than it
    accepted."""
    output: list[engine_messages.Event] = []
    for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        if part := token_ids[start:end]:
            reported = tuple(Token(i, logprob_of(i)) for i in part)
            output.append(engine_messages.Tokens(start, reported, 0, (), len(part) + 2, len(part) - 1))
    return [*output, engine_messages.Ended(reason, 5, 3, len(token_ids), 0.5, 1.5, 2.0)]


def joined(messages: list[Event]) -> tuple[str, list[int], list[Logprobs], object]:
    """Text, ids, logprobs and end of an answer; times and drafts are omitted because they depend on the steps."""
    deltas, end = [m for m in messages if isinstance(m, Delta)], messages[-1]
    assert isinstance(end, Finished)
    assert [delta.index for delta in deltas] == [sum(len(d.token_ids) for d in deltas[:n]) for n in range(len(deltas))]
    ends = (end.reason, end.matched_stop, end.usage.completion_tokens)
    token_ids = [i for delta in deltas for i in delta.token_ids]
    return text_of(messages), token_ids, [p for delta in deltas for p in delta.logprobs], ends


@given(
    events=cut(),
    stop=st.sampled_from([(), ("bc",), ("cd", "a!"), ("dab",)]),
    stop_tokens=st.sampled_from([(), tuple(ids("!"))]),
    ignore_end_token=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_answer_ends_as_with_one_token_per_step(
    events: tuple[list[int], list[int]], stop: tuple[str, ...], stop_tokens: tuple[int, ...], ignore_end_token: bool
) -> None:
    """Tokens that the engine generated after the end are neither returned nor counted as accepted."""
    token_ids, starts = events
    ends = {*stop_tokens, *([] if ignore_end_token else [END])}
    num_answered = next((n for n, i in enumerate(token_ids, 1) if i in ends), len(token_ids))
    reason: engine_messages.EndReason = "length"
    if token_ids[num_answered - 1] in ends:
        reason = "end_token" if token_ids[num_answered - 1] == END else "stop_token"
    sampling = {"stop": stop, "stop_tokens": stop_tokens, "ignore_end_token": ignore_end_token}
    singly = steps(token_ids[:num_answered], list(range(num_answered)), reason)
    expected = joined(assemble(answer(**sampling), *singly))
    whole = steps(token_ids[:num_answered], [start for start in starts if start < num_answered], reason)
    assert joined(found := assemble(answer(**sampling), *whole)) == expected
    behind = [*steps(token_ids, starts, reason)[: len(whole) - 1], whole[-1]]
    assert joined(assemble(answer(**sampling), *behind)) == expected
    assert isinstance(finished := found[-1], Finished)
    assert finished.usage.accepted_tokens <= min(finished.usage.drafted_tokens, finished.usage.completion_tokens)


def test_drafts_are_summed_per_sample() -> None:
    two = answer(2)
    two.take(engine_messages.Admitted(5, 3))
    output = [
        engine_messages.Tokens(0, tokens(ids("abc")), 0, (), 7, 2),
        engine_messages.Tokens(0, tokens(ids("d")), 1, (), 3, 0),
    ]
    output.append(engine_messages.Tokens(3, tokens(ids("ef")), 0, (), 4, 1))
    two.take(engine_messages.Admitted(5, 3))  # it was preempted, and continues
    first, second = [m for m in assemble(two, *output, ended(0), ended(1)) if isinstance(m, Finished)]
    assert (first.usage, second.usage) == (Usage(5, 3, 2, 11, 3), Usage(5, 3, 2, 3, 0))


@pytest.mark.parametrize(("stop", "num_reported", "num_accepted"), [("a", 1, 1), ("b", 2, 2), ("d", 4, 3)])
def test_accepted_drafts_after_a_stop_string_do_not_count(stop: str, num_reported: int, num_accepted: int) -> None:
    """A step gives four tokens, of which the first three were drafted."""
    step = engine_messages.Tokens(0, tokens(ids("abcd")), 0, (), 7, 3)
    *_, delta, end = assemble(answer(stop=(stop,)), engine_messages.Admitted(5, 3), step)
    assert isinstance(delta, Delta) and delta.token_ids == tuple(ids("abcd")[:num_reported])
    assert isinstance(end, Finished) and end.usage == Usage(5, 3, num_reported, 7, num_accepted)


@pytest.mark.parametrize(
    ("stop", "num_accepted"), [("a", 0), ("b", 1), ("d", 3), ("e", 3), ("f", 4), ("g", 4), ("i", 6), ("none", 6)]
)
def test_joined_steps_before_a_stop_string_count(stop: str, num_accepted: int) -> None:
    """Steps of one, four, two and two tokens, read together after the last one, which ends with a draft."""
    joined_steps = engine_messages.Tokens(0, tokens(ids("abcdefghi")), 0, (), 21, 6, (1, 5, 7))
    *_, end = assemble(answer(stop=(stop,)), engine_messages.Admitted(5, 3), joined_steps, ended(0))
    assert isinstance(end, Finished) and end.usage.accepted_tokens == num_accepted


def test_stopped_sample_emits_nothing_more_and_others_continue() -> None:
    both = answer(2, stop=("END",))
    both.take(engine_messages.Admitted(5, 3, 1))
    messages = assemble(
        both,
        engine_messages.Tokens(0, tokens(ids("xENDy")), 1),
        engine_messages.Tokens(5, tokens(ids("z")), 1),
        ended(1),
    )
    assert text_of(messages, 1) == "x"
    finished = messages[-1]
    assert isinstance(finished, Finished)
    assert (finished.sample, finished.reason, finished.matched_stop) == (1, "stop", "END")
    assert finished.usage == Usage(5, 3, 4)
    assert not both.is_finished
    messages = assemble(both, engine_messages.Tokens(0, tokens(ids("END"))))
    assert isinstance(messages[-1], Finished)
    assert both.is_finished


def test_recovery_is_reported_between_contiguous_deltas() -> None:
    one, lost = answer(), Recovering(8, 0, 64)
    messages = assemble(
        one,
        engine_messages.Tokens(0, tokens(ids("a"))),
        lost,
        engine_messages.Tokens(1, tokens(ids("b"))),
        lost,
        ended(),
    )
    assert messages[1] == messages[3] == lost
    assert [(m.index, m.text) for m in messages if isinstance(m, Delta)] == [(0, "a"), (1, "b")]
    assert isinstance(messages[-1], Finished)


def test_times_of_a_stop_string_are_measured_by_the_assembler() -> None:
    one = answer(stop=("b",))  # arrived at 1
    messages = assemble(
        one,
        engine_messages.Admitted(5, 3),
        engine_messages.Tokens(0, tokens(ids("a"))),
        engine_messages.Tokens(1, tokens(ids("b"))),
    )
    finished = messages[-1]
    assert isinstance(finished, Finished)
    timings = finished.timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.first_token_seconds) == (1.0, 1.0, 2.0)
    assert timings.decode_seconds == 1.0


@pytest.mark.parametrize("ignore_end_token", [False, True])
def test_stop_tokens_have_no_text_and_are_in_the_last_delta(ignore_end_token: bool) -> None:
    stop_token = ids("!")[0]
    one = answer(stop_tokens=(stop_token,), ignore_end_token=ignore_end_token)
    messages = assemble(one, engine_messages.Tokens(0, tokens((*ids("ab"), stop_token))), ended(reason="stop_token"))
    assert text_of(messages) == "ab"
    assert [i for m in messages if isinstance(m, Delta) for i in m.token_ids] == [*ids("ab"), stop_token]
    assert isinstance(messages[-1], Finished)
    assert messages[-1].reason == "stop_token"


def test_started_names_the_generation() -> None:
    assert assemble(answer(), engine_messages.Admitted(5, 3, 7)) == [Started(5, 3, 7, "id", is_exact=True)]
