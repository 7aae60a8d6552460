"""Encrypted connections: rejected clients, the identity of accepted ones, and open ports."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from grpc_health.v1 import health_pb2, health_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]

from coordinator.auth.credentials import Credentials
from coordinator.grpc_server.certificates import Certificates
from coordinator.grpc_server.server import LIVENESS, MAX_METADATA_BYTES, GrpcServer
from longleaf.client import AsyncClient, Retry
from longleaf.client.channels import MAX_CREDENTIAL, Access
from longleaf.credentials import CredentialEntry, line_of
from longleaf.errors import InvalidArgument, StartError, Unauthenticated, Unavailable
from longleaf.service_settings import SecurityConfig
from longleaf.v1 import cluster_service_pb2, cluster_service_pb2_grpc
from tests.support.authority import Authority, Key
from tests.support.service import FakeEngine, ids, serving
from tests.support.tenants import ACME, credential_of, credentials

PLAIN = Access(tls_ca="", tls_cert="", tls_key="", credential="")
ROBOT = "spiffe://cluster/robot"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def certificates_of(authority: Authority, client_ca: Path | None = None) -> Certificates:
    cert, key = authority.write("server")
    found = Certificates.of(
        SecurityConfig(
            tls_cert=str(cert), tls_key=str(key), tls_client_ca=None if client_ca is None else str(client_ca)
        )
    )
    assert found is not None
    return found


def _none_is_right(retry: Retry) -> None:
    raise AssertionError(retry)


@asynccontextmanager
async def encrypted(authority: Authority, folder: Path, **options: Any) -> AsyncIterator[tuple[GrpcServer, str]]:
    engine = FakeEngine()
    engine.contexts["acme/book"] = list(ids("acme's"))
    engine.contexts["robot/book"] = list(ids("of the robot"))
    engine.contexts["book"] = list(ids("anybody's"))
    options = {"certificates": certificates_of(authority)} | options
    async with serving(engine, folder / "model", **options) as (server, address):
        yield server, address


async def num_tokens(address: str, access: Access, retries: int = 0) -> int:
    async with AsyncClient(address, retries=retries, on_retry=_none_is_right, **access) as client:
        return (await client.get_context("book", timeout=10)).tokens


async def test_client_that_trusts_the_authority_connects(authority: Authority, tmp_path: Path) -> None:
    async with encrypted(authority, tmp_path) as (_, address):
        assert await num_tokens(address, authority.access()) == len("anybody's")


KEYS: dict[str, Callable[[], Key]] = {
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_connections_work_with_each_kind_of_key(authority: Authority, tmp_path: Path, kind: str) -> None:
    cert, key = authority.write("server", authority.make(key=KEYS[kind]()))
    given = Certificates.of(SecurityConfig(tls_cert=str(cert), tls_key=str(key)))
    async with encrypted(authority, tmp_path, certificates=given) as (_, address):
        assert await num_tokens(address, authority.access()) == len("anybody's")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_plaintext_clients_and_clients_with_other_authorities_get_a_definite_error(
    authority: Authority, tmp_path: Path, host: str
) -> None:
    other = Authority(tmp_path / "other")
    async with encrypted(authority, tmp_path) as (_, address):
        address = f"{host}:{address.rpartition(':')[2]}"
        for access, reported in (
            (PLAIN, "tls_ca: .* requires TLS: give"),
            (other.access(), "tls_ca: .* has a certificate that is not signed by"),
        ):
            for _ in range(3):
                with pytest.raises(InvalidArgument, match=reported):
                    await num_tokens(address, access, retries=3)
        assert await num_tokens(address, authority.access()) == len("anybody's")


async def test_tls_client_of_a_plaintext_service_gets_an_error(authority: Authority, tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path / "model") as (_, address):
        address = f"localhost:{address.rpartition(':')[2]}"
        with pytest.raises(InvalidArgument, match="tls_ca: .* serves plain connections"):
            await num_tokens(address, authority.access(), retries=3)


async def test_certificate_for_another_name_is_reported(authority: Authority, tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path / "model", host="127.0.0.2", certificates=certificates_of(authority)) as (
        _,
        address,
    ):
        with pytest.raises(InvalidArgument, match="tls_ca: .* has a certificate for another name"):
            await num_tokens(address, authority.access(), retries=3)


async def test_credential_is_sent_over_an_encrypted_connection(authority: Authority, tmp_path: Path) -> None:
    async with encrypted(authority, tmp_path, authenticator=credentials(tmp_path / "access")) as (_, address):
        assert await num_tokens(address, authority.access(credential=credential_of(ACME))) == len("acme's")
        access = authority.access(credential="another")
        with pytest.raises(Unauthenticated, match="unknown credential"):
            await num_tokens(address, access)
        with pytest.raises(Unauthenticated, match="this service requires a credential"):
            await num_tokens(address, authority.access())


async def test_clients_without_a_required_certificate_are_rejected(authority: Authority, tmp_path: Path) -> None:
    given = certificates_of(authority, authority.file)
    intruder = Authority(tmp_path / "other").access("robot", ROBOT)
    intruder["tls_ca"] = authority.file
    async with encrypted(authority, tmp_path, certificates=given) as (_, address):
        for access in (authority.access(), intruder):
            with pytest.raises(Unavailable, match="may require a client certificate.*--tls-cert") as caught:
                await num_tokens(address, access)
            assert "--tls-ca" not in str(caught.value)
        with pytest.raises(InvalidArgument, match="tls_ca: .* requires TLS"):
            await num_tokens(address, PLAIN)
        assert await num_tokens(address, authority.access("anyone")) == len("anybody's")


async def test_client_certificate_identifies_the_caller(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(line_of(CredentialEntry(tenant="robot", role="user", names=(f"uri:{ROBOT}",))))
    given = certificates_of(authority, authority.file)
    options = {"certificates": given, "authenticator": Credentials.of(str(file))}
    async with encrypted(authority, tmp_path, **options) as (_, address):
        assert await num_tokens(address, authority.access("robot", ROBOT)) == len("of the robot")
        with pytest.raises(Unauthenticated):
            await num_tokens(address, authority.access("other", f"{ROBOT}/2"))


NAMES: dict[str, tuple[x509.GeneralName, bool]] = {
    "a name of DNS": (x509.DNSName("ops.internal"), True),
    "a URI": (x509.UniformResourceIdentifier("ops:internal"), True),
    "an address of e-mail as a name": (x509.RFC822Name("ops.internal"), False),
    "an address of e-mail as a URI": (x509.RFC822Name("ops@corp.example"), False),
    "an address as a name": (x509.IPAddress(ip_address("10.9.8.7")), False),
    "a name of DNS as a URI": (x509.DNSName("spiffe://x/ops"), False),
    "a URI as a name of DNS": (x509.UniformResourceIdentifier("ops.internal"), False),
    "another name": (x509.RegisteredID(x509.ObjectIdentifier("1.2.3.4")), False),
}


@pytest.mark.parametrize("kind", NAMES)
async def test_certificate_names_are_matched_by_their_type(authority: Authority, tmp_path: Path, kind: str) -> None:
    name, is_known = NAMES[kind]
    named = "dns:ops.internal dns:ops@corp.example dns:10.9.8.7 dns:1.2.3.4 uri:ops:internal"
    named += " uri:ops@corp.example uri:10.9.8.7 uri:spiffe://x/ops"
    (tmp_path / "credentials").write_text(f"robot user {named}")
    given = certificates_of(authority, authority.file)
    access = authority.access()
    access["tls_cert"], access["tls_key"] = authority.write("own", authority.make(others=[name]))
    options = {"certificates": given, "authenticator": Credentials.of(str(tmp_path / "credentials"))}
    async with encrypted(authority, tmp_path, **options) as (_, address):
        if is_known:
            assert await num_tokens(address, access) == len("of the robot")
        else:
            with pytest.raises(Unauthenticated):
                await num_tokens(address, access)


async def test_only_health_is_plaintext_on_the_health_port(authority: Authority, tmp_path: Path) -> None:
    async with encrypted(authority, tmp_path) as (server, _):
        port = await server.start_health("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", LIVENESS):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetCluster(cluster_service_pb2.GetClusterRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_taken_health_port_is_reported(authority: Authority, tmp_path: Path) -> None:
    async with encrypted(authority, tmp_path) as (server, address):
        with pytest.raises(StartError, match=f"cannot listen on {address}"):
            await server.start_health("127.0.0.1", int(address.rpartition(":")[2]))


async def test_oversized_headers_are_refused_and_other_calls_served(authority: Authority, tmp_path: Path) -> None:
    async with encrypted(authority, tmp_path) as (_, address):
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub = cluster_service_pb2_grpc.ClusterServiceStub(channel)
            for size in (MAX_METADATA_BYTES, 1 << 20):
                request = cluster_service_pb2.GetClusterRequest()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetCluster(request, metadata=(("x-large", "a" * size),), timeout=10)
                assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert await num_tokens(address, authority.access()) == len("anybody's")


async def test_connections_without_a_handshake_delay_no_client(authority: Authority, tmp_path: Path) -> None:
    async with encrypted(authority, tmp_path) as (_, address):
        host, _, port = address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        for _, writer in silent[::2]:
            writer.write(b"\x16\x03\x01\xff\xff nothing that TLS would say")
        assert await num_tokens(address, authority.access()) == len("anybody's")
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    ("field", "access", "message"),
    [
        ("tls_cert", {"tls_cert": "a.pem"}, "requires tls_key"),
        ("tls_key", {"tls_key": "a.key"}, "requires tls_cert"),
        ("tls_cert", {"tls_cert": "a.pem", "tls_key": "a.key"}, "requires tls_ca"),
        ("tls_ca", {"tls_ca": "nowhere.pem"}, "No such file"),
        ("credential", {"credential": "two words"}, "without spaces"),
        ("credential", {"credential": "line\n"}, "printable"),
        ("credential", {"credential": "ü"}, "ASCII"),
        ("credential", {"credential": "a" * (MAX_CREDENTIAL + 1)}, "4,096"),
    ],
)
async def test_unusable_tls_option_is_reported_immediately(field: str, access: Access, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        AsyncClient("127.0.0.1:1", **(PLAIN | access))
    assert caught.value.field == field
    assert (access.get("credential") or "-") not in str(caught.value)


@pytest.mark.parametrize("server", ["example.org", "10.0.0.1:50051", "dns:///localhost:1", "[2001:db8::1]:1"])
async def test_credential_is_never_sent_in_plaintext(server: str) -> None:
    with pytest.raises(InvalidArgument, match="in plain text"):
        AsyncClient(server, **(PLAIN | Access(credential="secret")))


async def test_unset_options_come_from_the_environment(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLEAF_TLS_CA", str(authority.file))
    async with encrypted(authority, tmp_path) as (_, address):
        assert await num_tokens(address, Access()) == len("anybody's")
        with pytest.raises(InvalidArgument, match="requires TLS"):
            await num_tokens(address, PLAIN)
    monkeypatch.setenv("LONGLEAF_CREDENTIAL", "unknown secret")
    with pytest.raises(InvalidArgument, match="credential"):
        AsyncClient("127.0.0.1:1")
