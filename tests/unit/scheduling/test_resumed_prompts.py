"""Prompts whose answers were partly reported before: only the rest is generated, and only the rest counts."""

import pytest

from coordinator.engine_messages import Admitted, Ended, Prompt, SchedulingClaim, Tokens
from longleaf.errors import DeadlineExceeded
from longleaf.sampling import Sampling
from tests.support.scheduling import Bench

pytestmark = pytest.mark.timeout(60)


def continued_prompt(
    count: int, reported: dict[int, int], num_samples: int, max_tokens: int = 20, **claims: float
) -> Prompt:
    """A prompt whose samples have already reported this many tokens."""
    answer = Bench.alone(count, max_tokens)
    return Prompt(
        context=None,
        token_ids=tuple(range(count)),
        sampling=Sampling(max_tokens=max_tokens),
        num_samples=num_samples,
        claim=SchedulingClaim(**claims),  # type: ignore[arg-type]
        generated={sample: answer[:size] for sample, size in reported.items()},
    )


def test_each_sample_continues_at_its_own_token() -> None:
    bench, reported = Bench(), {0: 0, 2: 13, 3: 19}
    bench.scheduler.admit(0, continued_prompt(30, reported, 4))
    assert bench.scheduler.num_waiting == 1
    bench.run()
    events, answer = bench.seen[0], Bench.alone(30, 20)
    for sample in range(4):
        tokens = [event for event in events if isinstance(event, Tokens) and event.sample == sample]
        first = reported.get(sample, 20)
        assert [event.index for event in tokens] == list(range(first, 20))
        assert [token_id for event in tokens for token_id in event.token_ids] == answer[first:]
    ends = {event.sample: event for event in events if isinstance(event, Ended)}
    assert ends.keys() == reported.keys()
    assert {(end.prompt_tokens, end.cached_tokens, end.completion_tokens) for end in ends.values()} == {(30, 0, 20)}
    assert bench.scheduler.num_running == bench.scheduler.num_waiting == 0


def test_previous_tokens_count_neither_as_prompt_nor_as_cached() -> None:
    bench = Bench()
    for number in range(2):  # the second request finds the cached prefix of the first
        bench.scheduler.admit(number, continued_prompt(30, {0: 15}, 1))
        bench.run()
        assert [event for event in bench.seen[number] if isinstance(event, Admitted)] == [Admitted(30, 0)]


def test_deadline_covers_only_the_remaining_tokens() -> None:
    bench = Bench()
    bench.seconds_per_token = 0.01
    bench.ask(3, max_tokens=10)
    bench.run()
    bench.scheduler.admit(1, continued_prompt(3, {0: 98, 1: 99}, 2, max_tokens=100, deadline=0.5), 0.0)
    with pytest.raises(DeadlineExceeded):
        bench.scheduler.admit(3, continued_prompt(3, {0: 10, 1: 99}, 2, max_tokens=100, deadline=0.5), 0.0)
