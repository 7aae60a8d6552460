"""A service on ranks that compute, behind a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from openai import AsyncOpenAI

from coordinator.engine.engine import Engine
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from tests.support.gateways import opened
from tests.support.running import running
from tests.support.threads import ThreadRanks, config_for


class GatewayService(NamedTuple):
    """A service with two ranks, and a client of its gateway."""

    address: str
    """That of the gRPC server."""
    client: AsyncOpenAI
    model: str
    """The name of the model."""
    tokenizer: Tokenizer


@asynccontextmanager
async def behind_gateway(checkpoint: Path) -> AsyncIterator[GatewayService]:
    config = config_for(checkpoint, world_size=2, chunk_size=96, block_size=16, merge="gather")
    engine = Engine(ThreadRanks(config), config, max_positions=4096)
    async with running(engine):
        tokenizer = Tokenizer.load(checkpoint, DirectRenderer())
        application = Application(engine, tokenizer, engine.cluster)
        server = GrpcServer(application, config.unread_timeout)
        try:
            address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
            async with (
                opened(address) as url,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                yield GatewayService(address, client, (await client.models.list()).data[0].id, tokenizer)
        finally:
            await server.stop(None)
            await application.close()
