"""Attribution of generations that another service resumes."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from coordinator.engine.stream import Stream
from coordinator.engine_messages import DocumentPrompt, Prompt
from coordinator.text.tokenizer import Tokenizer
from longleaf.errors import ResourceExhausted
from longleaf.rank_protocol.step import Decode
from longleaf.sampling import SamplingParams
from longleaf.types import Event, Finished, Provenance
from tests.support.fakes.ranks import FakeRanks
from tests.support.successors import CONFIG, VOCAB, Served, asked, num_tokens, serving

pytestmark = pytest.mark.timeout(60)

SAMPLING = SamplingParams(max_tokens=30)


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_resumed_generation_attributes_its_own_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    """The journal does not record the attention of tokens that were sent before."""
    config = msgspec.structs.replace(CONFIG, block_size=32)
    ranks = [FakeRanks(num_blocks=256, vocab=VOCAB) for _ in range(2)]
    request = msgspec.structs.replace(
        asked(SAMPLING, context="doc"), provenance=Provenance(span_tokens=32, num_spans=2, confirm=True)
    )
    document = DocumentPrompt(context="doc", token_ids=tuple(range(100)))
    seen = list[list[Event]]()
    for one in ranks:
        async with serving(folder, tokenizer, one, config) as service:
            async for _ in service.engine.ingest(document):
                pass
            seen.append(await service.read(request, 8 if not seen else 10**6))
    assert all(len(path.read_bytes()) < 10_000 for path in files(folder))
    [end] = [event for event in seen[1] if isinstance(event, Finished)]
    assert end.attribution is not None
    assert 0 < end.attribution.num_tokens < num_tokens(seen[1]) == SAMPLING.max_tokens
    assert [source.drop is not None for source in end.attribution.sources] == [True, True]
    scored = {
        row.num_scored
        for plan in ranks[1].plans
        if isinstance(plan.work, Decode)
        for row in plan.work.rows
        if row.num_scored
    }
    assert scored == {SAMPLING.max_tokens}


async def test_resumed_generation_uses_the_context_at_the_time_of_its_request(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(CONFIG, block_size=32)
    asks = msgspec.structs.replace(asked(SAMPLING, context="doc"), provenance=Provenance(span_tokens=32, ranking="raw"))
    is_requested, is_free, document = (
        asyncio.Event(),
        asyncio.Event(),
        DocumentPrompt(context="doc", token_ids=tuple(range(100))),
    )
    async with serving(folder, tokenizer, FakeRanks(num_blocks=256, vocab=VOCAB), config) as service:
        await read_in(service, document)
        await service.read(asks, 8)
    async with serving(folder, tokenizer, FakeRanks(num_blocks=256, vocab=VOCAB), config) as service:
        await read_in(service, document)
        submit = service.engine.submit

        def submit_once_free(prompt: Prompt) -> Stream:
            is_requested.set()
            if not is_free.is_set():
                raise ResourceExhausted("queue", "is full", 0.01)
            return submit(prompt)

        monkeypatch.setattr(service.engine, "submit", submit_once_free)
        reading = asyncio.create_task(service.read(asks))
        await is_requested.wait()
        await read_in(service, DocumentPrompt(context="doc", token_ids=tuple(range(40)), append=True))
        is_free.set()
        [end] = [event for event in await reading if isinstance(event, Finished)]
    assert end.attribution is not None
    assert sorted(source.token_end for source in end.attribution.sources) == [32, 64, 96, 100]


async def read_in(service: Served, document: DocumentPrompt) -> None:
    async for _ in service.engine.ingest(document):
        pass
