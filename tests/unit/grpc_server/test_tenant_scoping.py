"""The view of a tenant: its own names, and no figures of other tenants."""

from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.auth.caller import CALLER, Caller
from coordinator.grpc_server.tenant_scoping import (
    redact_cluster,
    redact_event,
    redact_report,
    scope_request,
    unscope_error,
)
from coordinator.telemetry.observers import CURRENT, CallRecord
from longleaf.credentials import Role
from longleaf.errors import (
    CheckpointChanged,
    InvalidArgument,
    LongleafError,
    NotFound,
    RankLost,
    ResourceExhausted,
    StorageUnavailable,
    Unauthenticated,
    Unavailable,
)
from longleaf.sampling import GREEDY
from longleaf.types import (
    Cluster,
    Drafting,
    ExportContext,
    ForkContext,
    Generate,
    GetContextText,
    ImportHeader,
    IngestHeader,
    IngestProgress,
    ModelInfo,
    Recovering,
    Resume,
    Started,
    Verify,
)

RECOVERING = Recovering(lost_tokens=8, recovered_tokens=12, total_tokens=64)


@pytest.fixture(params=["user", "admin"])
def role(request: pytest.FixtureRequest) -> Iterator[Role]:
    token = CALLER.set(Caller(tenant="acme", role=request.param))
    yield request.param
    CALLER.reset(token)


def test_total_recovery_progress_is_only_for_admins(role: Role) -> None:
    shown = RECOVERING if role == "admin" else Recovering(lost_tokens=8, recovered_tokens=0, total_tokens=0)
    assert redact_event(RECOVERING) == shown
    report = IngestProgress(phase="recovering", total=3, recovering=RECOVERING)
    assert redact_report(report) == IngestProgress(phase="recovering", total=3, recovering=shown)


def test_total_draft_acceptance_is_only_for_admins(role: Role) -> None:
    drafting = Drafting(drafted_tokens=9, accepted_tokens=6, tokens_per_step=1.5)
    cluster = Cluster(
        model=ModelInfo(name="m"), workers=(), world_size=1, epoch=1, launcher="local", merge="auto", drafting=drafting
    )
    assert redact_cluster(cluster).drafting == (drafting if role == "admin" else None)


def test_names_are_those_of_the_tenant(role: Role) -> None:
    assert redact_event(Started(1, 0, request_id="acme/one")) == Started(1, 0, request_id="one")


@pytest.mark.parametrize(
    ("request_", "scoped", "context"),
    [
        (
            Generate(input="x", context="a", request_id="r", sampling=GREEDY),
            Generate(input="x", context="acme/a", request_id="acme/r", sampling=GREEDY, tenant="acme", client="peer"),
            "acme/a",
        ),
        (
            Generate(input="x", sampling=GREEDY, client="mine"),
            Generate(input="x", sampling=GREEDY, tenant="acme", client="mine"),
            "",
        ),
        (Resume("r", 7), Resume("acme/r", 7), ""),
        (IngestHeader(context="a"), IngestHeader(context="acme/a", tenant="acme", client="peer"), "acme/a"),
        (ImportHeader(), ImportHeader(tenant="acme"), ""),
        (ImportHeader(context="a"), ImportHeader(context="acme/a", tenant="acme"), "acme/a"),
        (ForkContext("a", "b", 3), ForkContext("acme/a", "acme/b", 3), "acme/b"),
        (ExportContext(context="a"), ExportContext(context="acme/a"), "acme/a"),
        (GetContextText("a", "tokens", 0, 1), GetContextText("acme/a", "tokens", 0, 1), "acme/a"),
        (Verify(text="x"), Verify(text="x", client="peer"), ""),
    ],
)
def test_requests_name_objects_of_their_tenant(request_: Any, scoped: Any, context: str, role: Role) -> None:
    record = CallRecord("/a/Method", "peer", {})
    token = CURRENT.set(record)
    try:
        assert scope_request(request_, "peer") == scoped
    finally:
        CURRENT.reset(token)
    assert record.context == context


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("acme/a", "acme/b"),
        NotFound("contexts/acme/a"),
        ResourceExhausted("acme/a", "is too small", 2.5),
        CheckpointChanged("contexts/acme/a", "acme/b"),
        RankLost(3, "acme/a"),
        StorageUnavailable("acme/a", 1.5),
        Unavailable("acme/a"),
        Unauthenticated("acme/a"),
        LongleafError("acme/a"),
    ],
    ids=repr,
)
def test_errors_have_the_names_of_their_tenant(error: LongleafError) -> None:
    before, message = dict(vars(error)), str(error)
    copy = unscope_error(error, "acme")
    assert (type(copy), str(copy)) == (type(error), message.replace("acme/", ""))
    assert vars(copy) == {
        name: value.replace("acme/", "") if isinstance(value, str) else value for name, value in before.items()
    }
    assert (vars(error), str(error)) == (before, message), "others may hold the error"
