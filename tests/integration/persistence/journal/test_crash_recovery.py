"""A process that is killed during answers leaves a journal of everything that it sent."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from longleaf.sampling import Sampling
from longleaf.types import Delta, Event, Resume
from tests.support.dying_service import encoded
from tests.support.successors import asked, num_tokens, serving, tokenizer_of, whole

pytestmark = pytest.mark.timeout(120)

REQUEST = asked(Sampling(max_tokens=2000, num_logprobs=0), num_samples=2)


def events_until_killed(journal: Path, model: Path, count: int) -> list[Event]:
    """The events that a client received from a process that is killed after about this number of deltas."""
    command = [sys.executable, "-m", "tests.support.dying_service", str(journal), str(model), encoded(REQUEST)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(count)]
        child.kill()
        lines += child.stdout.readlines()
    return [msgspec.json.decode(line, type=Delta) for line in lines if line.endswith(b"\n")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 37, 600])
async def test_events_sent_by_a_killed_process_are_replayed(tmp_path: Path, count: int) -> None:
    journal, tokenizer = tmp_path / "journal", tokenizer_of(tmp_path / "model")
    seen = events_until_killed(journal, tmp_path / "model", count)
    assert count <= num_tokens(seen) < 4000
    async with serving(journal, tokenizer) as service:
        seen += await service.read(Resume("one", num_tokens(seen)))
    async with serving(tmp_path / "other", tokenizer) as service:
        wanted = await service.read(REQUEST)
    for sample in range(2):
        assert whole(seen, sample) == whole(wanted, sample)
