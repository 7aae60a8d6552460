"""Conversion of scheduling options: priority and client name."""

from longleaf.codec.names import check_range, check_utf8
from longleaf.errors import InvalidArgument
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_service_pb2 as service_pb

MAX_PRIORITY = 100
MAX_CLIENT_BYTES = 256

Claiming = service_pb.GenerateRequest | ingest_pb.IngestConfig


def encode_claim(priority: int, client: str, message: Claiming) -> None:
    """Fills the fields of `message`. Raises InvalidArgument when a value does not fit its field."""
    message.priority = check_range("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    message.client_id = check_utf8(client, "client_id")


def decode_claim(message: Claiming, parent: str = "") -> tuple[int, str]:
    """Priority and client. Raises InvalidArgument naming the field; `parent`, if any, ends in a dot."""
    if len(message.client_id.encode()) > MAX_CLIENT_BYTES:
        raise InvalidArgument(f"{parent}client_id", f"must have at most {MAX_CLIENT_BYTES} bytes")
    return check_range(f"{parent}priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY), message.client_id
