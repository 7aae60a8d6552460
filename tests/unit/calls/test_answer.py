"""What a client is told of its samples, while their tokens come interleaved."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import events
from coordinator.calls.answer import Answer
from coordinator.text.detokenizer import Alphabet
from longleaf.messages import Delta, Event, Finished, Generate, Recovering, Started, Usage
from longleaf.sampling import Logprobs, Sampling, Token
from tests.support.service import BYTES, ids, tokens

END = BYTES.token_to_id("<|end|>")
ALPHABET = Alphabet(decode=lambda token_ids: BYTES.decode(list(token_ids)), silent=frozenset({END}))


class Ticks:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def answer(num_samples: int = 1, **sampling: object) -> Answer:
    request = Generate(input="", sampling=Sampling(**sampling), num_samples=num_samples)  # type: ignore[arg-type]
    return Answer("id", request, ALPHABET, frozenset({END}), Ticks(), is_exact=True)


def ended(sample: int = 0, reason: events.EndReason = "length") -> events.Ended:
    return events.Ended(reason, 5, 3, 2, 0.5, 1.5, 2.0, sample)


def told(answer: Answer, *said: events.Event) -> list[Event]:
    return [message for event in said for message in answer.take(event)]


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
def test_interleaved_samples_are_told_as_if_each_came_alone(
    texts: list[str], step: int, seed: int, stop: tuple[str, ...]
) -> None:
    """Each has its own text, indices, logprobs and stop strings; ids and logprobs travel with their text."""
    said: list[list[events.Event]] = []
    for sample, text in enumerate(texts):
        token_ids = ids(text)
        said.append([])
        for start in range(0, len(token_ids), step):
            part = token_ids[start : start + step]
            said[-1].append(events.Tokens(start, tuple(Token(i, logprob_of(i)) for i in part), sample))
        said[-1].append(ended(sample))
    alone = []
    for script in said:
        one = answer(len(texts), stop=stop)
        alone.append([m for m in told(one, *script) if not isinstance(m, Finished)])
        assert one.is_finished == (len(texts) == 1)
    rng, together, mixed = random.Random(seed), answer(len(texts), stop=stop), []
    while any(said):
        mixed += together.take(rng.choice([script for script in said if script]).pop(0))
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


def test_a_sample_that_stops_leaves_the_others_and_says_nothing_more() -> None:
    both = answer(2, stop=("END",))
    both.take(events.Admitted(5, 3, 1))
    messages = told(both, events.Tokens(0, tokens(ids("xENDy")), 1), events.Tokens(5, tokens(ids("z")), 1), ended(1))
    assert text_of(messages, 1) == "x"
    finished = messages[-1]
    assert isinstance(finished, Finished)
    assert (finished.sample, finished.reason, finished.matched_stop) == (1, "stop", "END")
    assert finished.usage == Usage(5, 3, 4)
    assert not both.is_finished
    messages = told(both, events.Tokens(0, tokens(ids("END"))))
    assert isinstance(messages[-1], Finished)
    assert both.is_finished


def test_a_recovery_is_told_between_deltas_that_follow_one_another() -> None:
    one, lost = answer(), Recovering(8, 0, 64)
    messages = told(one, events.Tokens(0, tokens(ids("a"))), lost, events.Tokens(1, tokens(ids("b"))), lost, ended())
    assert messages[1] == messages[3] == lost
    assert [(m.index, m.text) for m in messages if isinstance(m, Delta)] == [(0, "a"), (1, "b")]
    assert isinstance(messages[-1], Finished)


def test_times_of_a_stop_string_are_taken_here() -> None:
    one = answer(stop=("b",))  # arrived at 1
    messages = told(one, events.Admitted(5, 3), events.Tokens(0, tokens(ids("a"))), events.Tokens(1, tokens(ids("b"))))
    finished = messages[-1]
    assert isinstance(finished, Finished)
    timings = finished.timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.first_token_seconds) == (1.0, 1.0, 2.0)
    assert timings.decode_seconds == 1.0


@pytest.mark.parametrize("ignore_end_token", [False, True])
def test_stop_tokens_have_no_text_and_come_with_the_last_delta(ignore_end_token: bool) -> None:
    stop_token = ids("!")[0]
    one = answer(stop_tokens=(stop_token,), ignore_end_token=ignore_end_token)
    messages = told(one, events.Tokens(0, tokens((*ids("ab"), stop_token))), ended(reason="stop_token"))
    assert text_of(messages) == "ab"
    assert [i for m in messages if isinstance(m, Delta) for i in m.token_ids] == [*ids("ab"), stop_token]
    assert isinstance(messages[-1], Finished)
    assert messages[-1].reason == "stop_token"


def test_started_names_the_generation() -> None:
    assert told(answer(), events.Admitted(5, 3, 7)) == [Started(5, 3, 7, "id", is_exact=True)]
