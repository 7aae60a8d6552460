"""Two tenants and an operator, their credentials, and calls as any of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.auth.credentials import Credentials
from longleaf.credentials import CredentialEntry, Quotas, Role, digest_of, line_of
from longleaf.v1 import cluster_service_pb2, context_service_pb2, generation_service_pb2, tokenizer_service_pb2

SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module in (cluster_service_pb2, context_service_pb2, generation_service_pb2, tokenizer_service_pb2)
    for name in module.DESCRIPTOR.services_by_name
]
METHODS: dict[str, MethodDescriptor] = {method.name: method for service in SERVICES for method in service.methods}
ACME, BOLT, OPS = "acme", "bolt", "ops"
ROLES: dict[str, Role] = {ACME: "user", BOLT: "user", OPS: "admin"}


def credential_of(tenant: str) -> str:
    return f"secret-of-{tenant}"


def credentials(folder: Path, **quotas: Quotas) -> Credentials:
    """Those of the three, with quotas by tenant."""
    return Credentials.from_file(str(write_credentials(folder, **quotas)))


def write_credentials(folder: Path, *others: str, **quotas: Quotas) -> Path:
    """The file of these; `others` come in as users."""
    file = folder / "credentials"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(line_of(_entry(each, quotas.get(each, Quotas()))) for each in (*ROLES, *others)))
    return file


def _entry(tenant: str, quotas: Quotas) -> CredentialEntry:
    digests = (digest_of(credential_of(tenant)),)
    return CredentialEntry(tenant=tenant, role=ROLES.get(tenant, "user"), digests=digests, quotas=quotas)


def bearer(tenant: str | None) -> tuple[tuple[str, str], ...]:
    """The headers of a call of the tenant; None: no headers."""
    return () if tenant is None else (("authorization", f"Bearer {credential_of(tenant)}"),)


class Caller:
    """Calls methods by name, as one of the tenants or without credentials."""

    def __init__(self, channel: grpc.aio.Channel, tenant: str | None) -> None:
        self._channel = channel
        self._metadata = bearer(tenant)

    async def call(self, name: str, requests: Sequence[Message]) -> tuple[grpc.StatusCode, list[Any], str]:
        """The code, the responses, and the details of the status. Of an endless stream the first response is enough."""
        method = METHODS[name]
        untyped: Any = self._channel  # many responses or one are the same on the wire
        stub = (untyped.stream_stream if method.client_streaming else untyped.unary_stream)(
            f"/{method.containing_service.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        given = iter(requests) if method.client_streaming else requests[0]
        stream, responses = stub(given, metadata=self._metadata), list[Any]()
        try:
            async for response in stream:
                responses.append(response)
                if name == "WatchCluster":
                    stream.cancel()
                    return grpc.StatusCode.OK, responses, ""
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass
        return await stream.code(), responses, await stream.details()


def request_of(name: str, /, **fields: Any) -> Message:
    return GetMessageClass(METHODS[name].input_type)(**fields)


def texts_in(messages: Iterable[Message]) -> str:
    """All text in the messages."""
    return "\n".join(map(str, messages))
