"""The time until new connections get a renewed certificate, while streams continue."""

import asyncio
import random
import ssl
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cryptography import x509

from bench.durable.options import Goal, Row
from bench.production.options import Options, result
from bench.production.services import Running, Secret, production, running
from bench.production.streams import STREAMS, Streams
from longleaf.client import AsyncClient
from tests.support.authority import Authority, shown_serial

WANTED_SECONDS = 2.0
PAUSE_SECONDS = 0.02
"""Between two connections."""
MOST_SECONDS = 30.0


def measure(options: Options) -> Row:
    """Rotations at random moments, independent of the times at which the service checks its files."""
    with TemporaryDirectory(prefix="longleaf-bench-") as folder:
        authority, secret = Authority(Path(folder) / "ca"), Secret(Path(folder) / "tls")
        secret.write(authority.make())
        settings = production(authority, Path(folder), secret)
        with running(settings, options.world_size) as service:
            return asyncio.run(_measure(service, authority, secret, options))


async def _measure(service: Running, authority: Authority, secret: Secret, options: Options) -> Row:
    rng = random.Random(0)
    trusting = ssl.create_default_context(cafile=str(authority.file))
    trusting.set_alpn_protocols(["h2"])
    seconds, connections = list[float](), list[float]()
    async with AsyncClient(service.address, retries=0, **service.settings.access) as client:
        streams = Streams(client, STREAMS)
        async with streams.flowing():
            for _ in range(options.repeats):
                await asyncio.sleep(rng.uniform(0.0, options.seconds))
                pair = authority.make()
                wanted = x509.load_pem_x509_certificate(pair[0]).serial_number
                secret.write(pair)
                seconds.append(await _until_shown(service.address, trusting, wanted, connections))
    figures: dict[str, object] = {
        "streams": STREAMS,
        "shown_s_median": round(median(seconds), 3),
        "shown_s_max": round(max(seconds), 3),
        "connections": len(connections),
        "handshake_ms_median": round(median(connections) * 1e3, 2),
        "streams_broken": streams.errors.total(),
    }
    return result(options, figures, [Goal("shown_s_max", max(seconds), WANTED_SECONDS)])


async def _until_shown(address: str, trusting: ssl.SSLContext, wanted: int, connections: list[float]) -> float:
    """Seconds from now until a new connection gets that certificate; the time of each connection is added to
    `connections`. Raises TimeoutError."""
    began = time.perf_counter()
    async with asyncio.timeout(MOST_SECONDS):
        while True:
            at = time.perf_counter()
            shown = await shown_serial(address, trusting)
            connections.append(time.perf_counter() - at)
            if shown == wanted:
                return time.perf_counter() - began
            await asyncio.sleep(PAUSE_SECONDS)  # another process is watched, and sends no notification
