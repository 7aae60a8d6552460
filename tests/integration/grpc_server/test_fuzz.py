"""Every field of every request of every RPC, with arbitrary values, over real sockets.

Never INTERNAL, UNKNOWN or UNAVAILABLE; every refusal is typed; and afterwards the service answers a valid request
correctly and holds nothing but its contexts.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.fuzz.messages import bases, edges_of, methods, paths, requests, uploads, with_value
from tests.support.fuzz.target import Call, Target, fuzzed, fuzzed_ranks
from zoo.checkpoints import make_checkpoint

SLOW = [pytest.param(60, id="short"), pytest.param(2000, id="long", marks=pytest.mark.slow)]
RPCS = [pytest.param(method, id=method.name) for method in methods()]
AT_ONCE = 3
"""The number of concurrent calls if a single call takes long; small enough to be admitted."""
TIMEOUTS = st.sampled_from((None, None, None, 0.001, 0.02))


class Fuzzer:
    """A target and its event loop."""

    def __init__(self, runner: asyncio.Runner, target: Target) -> None:
        self._runner = runner
        self._target = target

    def bear(self, *calls: Call) -> None:
        self._runner.run(self._target.bear(*calls))


@contextmanager
def fuzzing(service: AbstractAsyncContextManager[Target]) -> Iterator[Fuzzer]:
    with asyncio.Runner() as runner:
        yield Fuzzer(runner, runner.run(service.__aenter__()))
        runner.run(service.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    with fuzzing(fuzzed(tmp_path_factory.mktemp("fuzzed"))) as made:
        yield made


@pytest.mark.sampled(8)
@pytest.mark.parametrize("method", RPCS)
def test_every_edge_of_every_field(fuzzer: Fuzzer, method: MethodDescriptor) -> None:
    check_edges(fuzzer, method)


def check_edges(fuzzer: Fuzzer, method: MethodDescriptor) -> None:
    made = list(edge_calls(method))
    for start in range(0, len(made), AT_ONCE):
        fuzzer.bear(*made[start : start + AT_ONCE])


def edge_calls(method: MethodDescriptor) -> Iterator[Call]:
    """Valid requests, each with one changed value of one field."""
    right = bases(method.input_type) if method.client_streaming else bases(method.input_type)[:1]
    for number, base in enumerate(right):
        for path in paths(method.input_type):
            for value in edges_of(path[-1]):
                sent = [*right[:number], with_value(base, path, value), *right[number + 1 :]]
                yield Call(method=method, requests=sent)


@st.composite
def calls(draw: st.DrawFn, method: MethodDescriptor) -> Call:
    return Call(
        method=method,
        requests=draw(uploads(method)),
        num_reads=draw(st.sampled_from((None, None, 0, 1, 3))),
        is_torn=draw(st.booleans()) if method.client_streaming else False,
        timeout=draw(TIMEOUTS),
    )


@pytest.mark.extended
@pytest.mark.parametrize("examples", SLOW)
@pytest.mark.parametrize("method", RPCS)
def test_any_call(fuzzer: Fuzzer, method: MethodDescriptor, examples: int) -> None:
    fuzz(fuzzer, calls(method).map(lambda call: (call,)), examples)


@pytest.mark.parametrize("examples", SLOW)
def test_any_calls_at_once(fuzzer: Fuzzer, examples: int) -> None:
    one = st.sampled_from(methods()).flatmap(calls)
    fuzz(fuzzer, st.lists(one, min_size=2, max_size=8), examples)


@st.composite
def broken(draw: st.DrawFn, method: MethodDescriptor) -> Call:
    """A request's bytes with some changed, dropped or added."""
    data = bytearray(draw(requests(method)).SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    first = [] if not method.client_streaming or draw(st.booleans()) else bases(method.input_type)[:1]
    return Call(method=method, requests=[*first, bytes(data)])


@pytest.mark.parametrize("examples", SLOW)
def test_any_bytes(fuzzer: Fuzzer, examples: int) -> None:
    fuzz(fuzzer, st.sampled_from(methods()).flatmap(broken).map(lambda call: (call,)), 3 * examples)


@pytest.mark.slow
def test_any_call_of_real_ranks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "smollm3", seed=3)
    with fuzzing(fuzzed_ranks(folder)) as fuzzer:
        for method in methods():
            check_edges(fuzzer, method)
        fuzz(fuzzer, st.lists(st.sampled_from(methods()).flatmap(calls), min_size=1, max_size=4), 1000)


def fuzz(fuzzer: Fuzzer, drawn: st.SearchStrategy[tuple[Call, ...] | list[Call]], examples: int) -> None:
    """All examples use the same service, so a failure may depend on earlier examples."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples < 1000,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def bears(made: tuple[Call, ...] | list[Call]) -> None:
        fuzzer.bear(*made)

    bears()
