"""Tenants with equal names for their contexts and requests, on one engine that computes: each gets exactly the results
of an exclusive service.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from hypothesis import HealthCheck, Phase, given, settings

from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.credentials import Quotas
from tests.support.apart import SCRIPT, Responses, Step, play
from tests.support.golden.plain import ask_plain, draw_ids
from tests.support.running import running
from tests.support.tenants import ACME, BOLT, Caller, credentials, request_of
from tests.support.threads import ThreadRanks, config_for
from zoo.checkpoints import make_checkpoint

LEAST_GAP = 1e-3
"""Gap between the first and the second logit at every step: other rounding then chooses the same token."""
NUM_NEW = 24
NUM_QUESTION = 21
CONTEXT_LENGTHS = (310, 150)
"""Tokens of the contexts of a tenant."""
NAMES = ("book", "play")
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=2, chat_template=template)


@asynccontextmanager
async def serving(checkpoint: Path, folder: Path, **quotas: Quotas) -> AsyncGenerator[str]:
    """The address of a service of two ranks for the tenants."""
    config = config_for(checkpoint, world_size=2, chunk_size=96, block_size=16, merge="gather")
    engine = Engine(ThreadRanks(config), config, max_positions=8192)
    async with running(engine):
        application = Application(engine, Tokenizer.load(checkpoint, DirectRenderer()), engine.cluster)
        server = GrpcServer(application, config.unread_timeout, authenticator=credentials(folder, **quotas))
        try:
            yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        finally:
            await server.stop(None)
            await application.close()


def clear_prompt(checkpoint: Path, num_tokens: int, seeds: "itertools.count[int]") -> tuple[Ids, Ids]:
    """A prompt of random ids, and the answer of `generate`, nowhere close to a tie."""
    for seed in seeds:
        prompt = draw_ids(num_tokens, seed)
        golden, least_gap = ask_plain(checkpoint, prompt, NUM_NEW)
        if least_gap >= LEAST_GAP:
            return prompt, golden.tokens
    raise AssertionError("seeds have an end")


class Reader:
    """A tenant at work, with a separate connection."""

    def __init__(self, channel: grpc.aio.Channel, tenant: str, goldens: dict[str, tuple[Ids, Ids]]) -> None:
        self._caller = Caller(channel, tenant)
        self._goldens = goldens

    async def ingest(self, name: str) -> None:
        ids = self._goldens[name][0][:-NUM_QUESTION]
        for append, part in ((False, ids[:100]), (True, ids[100:])):
            config = {"name": f"contexts/{name}", "append": append} | ({} if append else {"capacity_token_count": 4096})
            given = ({"config": config}, {"token_ids": {"ids": part}})
            requests = [request_of("IngestContext", **each) for each in given]
            code, _, details = await self._caller.call("IngestContext", requests)
            assert code == StatusCode.OK, details

    async def ask(self, name: str, request_id: str) -> Ids:
        sampling = {"max_token_count": NUM_NEW, "ignore_end_token": True, "temperature": 0.0}
        fields: dict[str, Any] = {"context": f"contexts/{name}", "sampling": sampling, "request_id": request_id}
        fields |= {"token_ids": {"ids": self._goldens[name][0][-NUM_QUESTION:]}, "resume_duration": {"seconds": 60}}
        code, responses, details = await self._caller.call("Generate", [request_of("Generate", **fields)])
        assert code == StatusCode.OK, details
        return tuple(token_id for each in responses for token_id in each.delta.token_ids)

    async def work(self) -> dict[str, Ids]:
        """Ingests and asks about both contexts at once, then resumes the same requests; answers by request."""
        await asyncio.gather(*map(self.ingest, NAMES))
        requests = {f"{name}-{turn}": name for name in NAMES for turn in range(2)}
        answers = await asyncio.gather(*(self.ask(name, request_id) for request_id, name in requests.items()))
        replayed = await asyncio.gather(*(self.ask(name, request_id) for request_id, name in requests.items()))
        assert replayed == answers
        return dict(zip(requests, answers, strict=True))


async def test_each_tenants_tokens_equal_generate_of_its_own_text(checkpoint: Path, tmp_path: Path) -> None:
    seeds = itertools.count(11)
    goldens = {
        tenant: {
            name: clear_prompt(checkpoint, resident + NUM_QUESTION, seeds)
            for name, resident in zip(NAMES, CONTEXT_LENGTHS, strict=True)
        }
        for tenant in (ACME, BOLT)
    }
    quotas = {
        ACME: Quotas(contexts=2, tokens=4000, generations=4, waiting=0),
        BOLT: Quotas(contexts=2, tokens=4000, generations=1, waiting=3),
    }
    async with (
        serving(checkpoint, tmp_path, **quotas) as address,
        grpc.aio.insecure_channel(address) as first,
        grpc.aio.insecure_channel(address) as second,
    ):
        readers = [Reader(first, ACME, goldens[ACME]), Reader(second, BOLT, goldens[BOLT])]
        found = await asyncio.gather(*(reader.work() for reader in readers))
    for tenant, answers in zip((ACME, BOLT), found, strict=True):
        expected = {name: tokens for name, (_, tokens) in goldens[tenant].items()}
        assert answers == {request_id: expected[request_id.partition("-")[0]] for request_id in answers}, tenant


async def heard(checkpoint: Path, folder: Path, scripts: dict[str, Sequence[Step]]) -> dict[str, Responses]:
    """The responses to each tenant while all play their scripts at the same time."""
    async with serving(checkpoint, folder) as address:
        found = await asyncio.gather(*(play(address, tenant, script) for tenant, script in scripts.items()))
    return dict(zip(scripts, found, strict=True))


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(acme=SCRIPT, bolt=SCRIPT)
def test_each_hears_what_it_would_hear_alone(
    checkpoint: Path, tmp_path: Path, acme: list[Step], bolt: list[Step]
) -> None:
    scripts: dict[str, Sequence[Step]] = {ACME: acme, BOLT: bolt}
    together = asyncio.run(heard(checkpoint, tmp_path, scripts))
    for tenant, script in scripts.items():
        assert together[tenant] == asyncio.run(heard(checkpoint, tmp_path, {tenant: script}))[tenant], tenant
