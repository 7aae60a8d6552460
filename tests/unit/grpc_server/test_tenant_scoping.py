"""The view of a tenant: its own names, and no figures of other tenants."""

from collections.abc import Iterator

import pytest

from coordinator.auth.caller import CALLER, Caller
from coordinator.grpc_server.tenant_scoping import shown_cluster, shown_event, shown_report
from longleaf.credentials import Role
from longleaf.types import Cluster, Drafting, IngestProgress, ModelInfo, Recovering, Started

RECOVERING = Recovering(lost_tokens=8, recovered_tokens=12, total_tokens=64)


@pytest.fixture(params=["user", "admin"])
def role(request: pytest.FixtureRequest) -> Iterator[Role]:
    token = CALLER.set(Caller(tenant="acme", role=request.param))
    yield request.param
    CALLER.reset(token)


def test_total_recovery_progress_is_only_for_admins(role: Role) -> None:
    shown = RECOVERING if role == "admin" else Recovering(lost_tokens=8, recovered_tokens=0, total_tokens=0)
    assert shown_event(RECOVERING) == shown
    report = IngestProgress(phase="recovering", total=3, recovering=RECOVERING)
    assert shown_report(report) == IngestProgress(phase="recovering", total=3, recovering=shown)


def test_total_draft_acceptance_is_only_for_admins(role: Role) -> None:
    drafting = Drafting(drafted_tokens=9, accepted_tokens=6, tokens_per_step=1.5)
    cluster = Cluster(
        model=ModelInfo(name="m"), workers=(), world_size=1, epoch=1, launcher="local", merge="auto", drafting=drafting
    )
    assert shown_cluster(cluster).drafting == (drafting if role == "admin" else None)


def test_names_are_those_of_the_tenant(role: Role) -> None:
    assert shown_event(Started(1, 0, request_id="acme/one")) == Started(1, 0, request_id="one")
