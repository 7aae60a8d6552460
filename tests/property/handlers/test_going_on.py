"""A generation resumes in another service, for any point at which the first one died: no token twice, none lost, none
changed.
"""

import asyncio
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.tokenizer import Tokenizer
from longleaf.sampling import Sampling
from longleaf.types import Event, Generate, Resume
from tests.support.successors import asked, num_tokens, serving, tokenizer_of, whole

pytestmark = pytest.mark.timeout(300)

SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(1, 40),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    stop=st.lists(st.text("abcdefghijklmnop%&/()=?", min_size=1, max_size=2), max_size=6).map(tuple),
    stop_tokens=st.lists(st.integers(0, 127), max_size=2).map(tuple),
    num_logprobs=st.none() | st.just(0),
)


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return tokenizer_of(Path(folder))


def file_in(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


async def undisturbed(request: Generate, folder: Path, naps: list[int]) -> list[tuple[Event, int]]:
    """The events of a client that is late by `naps` turns of the loop, each with the size of the journal then."""
    found: list[tuple[Event, int]] = []
    async with serving(folder, tokenizer()) as service:
        async for event in service.generation.run(request):
            found.append((event, file_in(folder).stat().st_size))
            for _ in range(naps[len(found) % len(naps)]):
                await asyncio.sleep(0)
    return found


async def resume_from(folder: Path, copy: Path, num_bytes: int, found: list[tuple[Event, int]]) -> list[Event]:
    """All events of a client that had read everything up to `num_bytes` of the journal, and then reconnects."""
    shutil.copytree(folder, copy)
    with file_in(copy).open("r+b") as file:
        file.truncate(num_bytes)
    seen = [event for event, size in found if size <= num_bytes]
    async with serving(copy, tokenizer()) as service:
        return seen + await service.read(Resume("one", num_tokens(seen)))


@given(
    sampling=SAMPLINGS,
    num_samples=st.integers(1, 3),
    deaths=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    naps=st.lists(st.integers(0, 12), min_size=1, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_a_generation_goes_on_wherever_its_service_died(
    sampling: Sampling, num_samples: int, deaths: list[float], naps: list[int]
) -> None:
    async def scenario(folder: Path) -> None:
        found = await undisturbed(asked(sampling, num_samples), folder / "journal", naps)
        events, (first, last) = [event for event, _ in found], (found[0][1], found[-1][1])
        for number, death in enumerate(deaths):
            size = first + round(death * (last - first))
            again = await resume_from(folder / "journal", folder / str(number), size, found)
            for sample in range(num_samples):
                assert whole(again, sample) == whole(events, sample)

    with TemporaryDirectory() as name:
        asyncio.run(scenario(Path(name)))


@given(sampling=SAMPLINGS, num_samples=st.integers(1, 2), cuts=st.lists(st.integers(1, 9), max_size=4))
@settings(max_examples=25, deadline=None)
def test_services_may_die_again_and_again(sampling: Sampling, num_samples: int, cuts: list[int]) -> None:
    """Each after its client has read so many events."""

    async def scenario(folder: Path) -> None:
        request, seen = asked(sampling, num_samples), list[Event]()
        for count in [*cuts, 10**6]:
            async with serving(folder / "journal", tokenizer()) as service:
                first = request if not seen else Resume("one", num_tokens(seen))
                seen += await service.read(first, count)
        async with serving(folder / "other", tokenizer()) as service:
            events = await service.read(request)
        for sample in range(num_samples):
            assert whole(seen, sample) == whole(events, sample)

    with TemporaryDirectory() as name:
        asyncio.run(scenario(Path(name)))
