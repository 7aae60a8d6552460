"""Every error has a status, and every status is decoded to the error that it was encoded from."""

import grpc
import pytest
from google.rpc import code_pb2

from longleaf import errors
from longleaf.codec.status import DETAILS_KEY, KINDS, decode_error, encode_error, grpc_code
from longleaf.errors import (
    AlreadyExists,
    Cancelled,
    CatalogError,
    CheckpointChanged,
    CollectiveMismatch,
    ContextLost,
    DataLoss,
    DeadlineExceeded,
    ExchangeAborted,
    FailedPrecondition,
    GroupFailed,
    InvalidArgument,
    LongleafError,
    ModelRefused,
    NotFinite,
    NotFound,
    PermissionDenied,
    PieceNotFetched,
    RankLost,
    ResourceExhausted,
    StartError,
    StorageUnavailable,
    TransferCorrupted,
    Unauthenticated,
    Unavailable,
)

EXAMPLES = [
    InvalidArgument("text", "is empty"),
    NotFound("contexts/moby"),
    AlreadyExists("contexts/moby"),
    ResourceExhausted("pool", "is full", 2.5),
    ResourceExhausted("pool", "is too small"),
    DeadlineExceeded("too late"),
    Cancelled("generations/x was cancelled"),
    NotFinite("token 3 of the answer"),
    ContextLost("contexts/moby", "no room is left for it"),
    DataLoss("contexts/moby", "its ids are not those that were kept; ingest it again"),
    CheckpointChanged("contexts/moby", "the weights are others"),
    FailedPrecondition("contexts/moby", "it has changed meanwhile"),
    StorageUnavailable("no space left on device"),
    StorageUnavailable("no space left on device", 2.5),
    CatalogError("a later version wrote it"),
    RankLost(3, "died"),
    GroupFailed("rank 1: raised"),
    PermissionDenied("not from there"),
    Unauthenticated("unknown credential"),
    Unavailable("starting"),
    Unavailable("loading", 2.5),
    ModelRefused("no rope"),
    StartError("no slots"),
]


def raised(error: LongleafError) -> grpc.RpcError:
    """The error that the client library raises."""
    status = encode_error(error)
    trailers = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(grpc_code(status), grpc.aio.Metadata(), trailers, status.message)


@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
def test_error_round_trip(error: LongleafError) -> None:
    read = decode_error(raised(error), "here")
    assert (type(read), str(read), vars(read)) == (type(error), str(error), vars(error))


def test_error_kinds_are_ordered_by_subclass() -> None:
    known = {kind.error for kind in KINDS}
    types = {found for found in vars(errors).values() if isinstance(found, type)}
    assert types - known == {LongleafError, CollectiveMismatch, ExchangeAborted, TransferCorrupted, PieceNotFetched}, (
        "the base class, and errors that only ranks raise"
    )
    assert known == {type(example) for example in EXAMPLES}
    for i, kind in enumerate(KINDS):
        assert not any(issubclass(later.error, kind.error) for later in KINDS[i + 1 :])


def test_other_errors_are_unknown() -> None:
    assert encode_error(CollectiveMismatch("two do other things")).code == code_pb2.UNKNOWN
    read = decode_error(raised(LongleafError("odd")), "here")
    assert (type(read), str(read)) == (LongleafError, "odd")
