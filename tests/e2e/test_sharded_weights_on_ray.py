"""Sharded weights on an existing Ray cluster: answers equal `generate`, and continue after a loss."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from longleaf.client import Client
from longleaf.shares import NUM_PARTS
from longleaf.types import Delta, Recovering
from tests.support.command_line import Served
from tests.support.golden.plain import ask_plain, draw_ids

pytestmark = [pytest.mark.ray, pytest.mark.extended, pytest.mark.timeout(400)]
WORLD_SIZE = 2
NEW = 60
DOCUMENT = draw_ids(600, 1)
CONTEXT = "book"
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def example(checkpoint: Path) -> tuple[Ids, Ids]:
    """A question to the document, and the answer of `generate`, whose tokens all win by a clear margin."""
    for seed in range(2, 22):
        question = draw_ids(12, seed)
        golden, gap = ask_plain(checkpoint, DOCUMENT + question, NEW)
        if gap > 1e-3:
            return question, golden.tokens
    raise AssertionError("every answer comes close to a tie")


def serve(started: ExitStack, checkpoint: Path, *options: str) -> Served:
    """A service on the cluster of this test session."""
    import ray

    own = ("--model", str(checkpoint), "--world-size", str(WORLD_SIZE), "--kv-bytes", "8000000")
    address = ray.get_runtime_context().gcs_address
    return started.enter_context(Served(*own, "--ray-address", address, *options))


def test_an_answer_continues_when_the_replacement_has_loaded_its_share(
    checkpoint: Path, started: ExitStack, ray_cluster: int, example: tuple[Ids, Ids]
):
    question, expected = example
    service = serve(started, checkpoint, "--weights", "sharded")
    tokens, missing = list[int](), list[float]()
    with Client(service.address, retries=0) as client:
        lost = client.cluster().workers[1].pid
        client.ingest(CONTEXT, DOCUMENT)
        for event in client.generate(question, context=CONTEXT, max_tokens=NEW, ignore_end_token=True):
            if isinstance(event, Recovering):
                missing.append(event.missing_weights)
            if isinstance(event, Delta):
                if not tokens:
                    os.kill(lost, signal.SIGKILL)
                assert event.index == len(tokens)
                tokens += event.token_ids
        assert tuple(tokens) == expected
        assert max(missing) == pytest.approx(1 / WORLD_SIZE)
        found = client.cluster()
        assert [worker.weight_parts for worker in found.workers] == [NUM_PARTS // WORLD_SIZE] * WORLD_SIZE
        assert [loss.slot for loss in found.losses] == ["replaced"]
        assert lost not in [worker.pid for worker in found.workers]
        again = client.generate(question, context=CONTEXT, max_tokens=NEW, ignore_end_token=True)
        assert tuple(token for event in again if isinstance(event, Delta) for token in event.token_ids) == expected
    assert service.stop() == 0
