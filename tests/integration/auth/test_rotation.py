"""Certificates change during new connections and running streams."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.grpc_server.certificates import Certificates
from longleaf.client import AsyncClient
from longleaf.pem import parse_pair
from longleaf.reloading_files import LOOK_SECONDS, ReloadingFiles
from longleaf.service_settings import SecurityConfig
from tests.support.authority import Authority, shown_serial
from tests.support.service import FakeEngine, serving

NUM_ROTATIONS = 10
BROKEN = 4
"""The rotation that brings the key of another certificate."""
NUM_CONNECTIONS = 200


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def certificates_of(authority: Authority) -> Certificates:
    cert, key = authority.write("server")
    found = Certificates.of(SecurityConfig(tls_cert=str(cert), tls_key=str(key)))
    assert found is not None
    return found


async def shown(address: str, authority: Authority) -> int:
    """The serial number of the certificate that a new connection gets."""
    trusting = ssl.create_default_context(cafile=str(authority.file))
    trusting.set_alpn_protocols(["h2"])
    return await shown_serial(address, trusting)


def serial(pair: tuple[bytes, bytes]) -> int:
    return x509.load_pem_x509_certificate(pair[0]).serial_number


async def until_shown(address: str, authority: Authority, wanted: int) -> float:
    """Seconds until new connections get that certificate."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while await shown(address, authority) != wanted:
        pass
    return clock() - began


async def connect_over_and_over(address: str, authority: Authority, left: list[int]) -> None:
    """Makes new connections, each with a call, until as many as are left have been made; all must succeed."""
    while left[0] > 0:
        left[0] -= 1
        async with AsyncClient(address, retries=0, **authority.access()) as client:
            await client.list_contexts(timeout=30)


@pytest.mark.extended
async def test_certificates_rotate_under_load(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates, engine = certificates_of(authority), FakeEngine()
    async with (
        serving(engine, tmp_path / "model", certificates=certificates) as (_, address),
        AsyncClient(address, retries=0, **authority.access()) as watcher,
    ):
        stream: AsyncIterator[object] = watcher.watch_cluster(min_interval=0.1)
        await anext(stream)
        left = [NUM_CONNECTIONS]
        connecting = [asyncio.create_task(connect_over_and_over(address, authority, left)) for _ in range(4)]
        with caplog.at_level(logging.WARNING, "coordinator"):
            for rotation in range(NUM_ROTATIONS):
                pair = authority.make()
                if rotation == BROKEN:
                    before = await shown(address, authority)
                    authority.write("server", (pair[0], authority.make()[1]))
                    async with asyncio.timeout(30):
                        while not certificates.num_failed_reloads:
                            assert await shown(address, authority) == before
                    assert await shown(address, authority) == before
                else:
                    authority.write("server", pair)
                    async with asyncio.timeout(30):
                        await until_shown(address, authority, serial(pair))
        await asyncio.gather(*connecting)
        assert left == [0]
        assert [record.getMessage() for record in caplog.records if "tls_key" in record.getMessage()]
        engine.running += 1
        engine.changes.note()
        async with asyncio.timeout(30):
            await anext(stream)


def test_half_written_pair_is_loaded_once_it_is_complete(authority: Authority) -> None:
    now = [0.0]
    cert, key = authority.write("server")
    old = cert.read_bytes()
    files = ReloadingFiles({"tls_cert": str(cert), "tls_key": str(key)}, parse_pair, lambda: now[0])
    pair = authority.make()
    cert.write_bytes(pair[0])
    now[0] += LOOK_SECONDS
    assert (files.value.chain, files.num_failed_reloads) == (old, 1)
    key.write_bytes(pair[1])
    now[0] += LOOK_SECONDS
    assert (files.value.chain, files.num_failed_reloads) == (pair[0], 1)
