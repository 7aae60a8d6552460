"""Maps the names that tenants use to ids in the service: every request is translated on arrival, and every name in a
response before it is sent."""

import re
from inspect import signature
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from coordinator.auth.caller import CALLER
from coordinator.telemetry.observers import CURRENT
from longleaf.errors import CheckpointChanged, DataLoss, LongleafError, StorageUnavailable
from longleaf.tenants import name_of, scoped, tenant_of, unscoped
from longleaf.types import (
    Cluster,
    Context,
    Event,
    ImportProgress,
    IngestProgress,
    RecomputeResult,
    Recovering,
    SkippedContext,
    Started,
)

NAMES = frozenset({"context", "source", "request_id"})
"""Fields of requests that hold a name of the tenant."""
OF_TENANTS = ("contexts/", "upload ", "generations/", "an upload")
"""Prefixes of the names of damaged objects that a tenant knows."""
_PATH = re.compile(r"(?<![\w/.])(?:\w+:/)?/[^\s,;:]*[^\s,;:/]")
Request = TypeVar("Request", bound=Struct)
Reporting = TypeVar("Reporting", IngestProgress, ImportProgress)


def tenant() -> str:
    """The tenant of the current call."""
    return CALLER.get().tenant


def scope(name: str) -> str:
    """The id of the object that the caller names `name`."""
    return scoped(tenant(), name)


def scope_context(name: str) -> str:
    """The id of the caller's context; records it as the context of the call."""
    context = scope(name)
    _note_context(context)
    return context


def scope_cancelled(name: str) -> str:
    """The id of the generation that the caller cancels; records it in the call."""
    request_id = scope(name)
    if (call := CURRENT.get()) is not None:
        call.request_id = request_id
    return request_id


def _note_context(context: str) -> None:
    """Records the context of the call for observers."""
    if (call := CURRENT.get()) is not None:
        call.context = context


def scope_request(request: Request, client: str = "") -> Request:
    """The request with ids of the caller's tenant, and with `client` if it names no client. Records its context as the
    context of the call."""
    changes: dict[str, str] = {}
    for name in request.__struct_fields__:
        given = getattr(request, name)
        if name in NAMES and given:
            changes[name] = scope(given)
        elif name == "client" and not given:
            changes[name] = client
        elif name == "tenant":
            changes[name] = tenant()
    if "context" in changes:
        _note_context(changes["context"])
    return replace(request, **changes)


def redact_context(context: Context) -> Context:
    """The context as its tenant sees it. Only admins see its distribution over ranks, which depends on other
    tenants."""
    shares = context.shares if CALLER.get().is_admin else ()
    return replace(context, id=name_of(context.id), shares=shares)


def redact_report(report: Reporting) -> Reporting:
    if isinstance(report, IngestProgress) and report.recovering is not None:
        report = replace(report, recovering=_redact_recovering(report.recovering))
    if report.context is None:
        return report
    _note_context(report.context.id)  # an imported context may take its name from the archive
    return replace(report, context=redact_context(report.context))


def redact_event(event: Event) -> Event:
    match event:
        case Started(request_id=request_id):
            return replace(event, request_id=name_of(request_id))
        case Recovering():
            return _redact_recovering(event)
        case _:
            return event


def _redact_recovering(recovering: Recovering) -> Recovering:
    """Admins also see the progress of the whole recovery; other callers see only the tokens that they still wait
    for."""
    return recovering if CALLER.get().is_admin else replace(recovering, recovered_tokens=0, total_tokens=0)


def redact_error(error: LongleafError) -> LongleafError:
    """Returns the error unchanged for an admin. For other callers, removes files and addresses of storage, which are in
    the log."""
    caller = CALLER.get(None)
    if caller is not None and caller.is_admin:
        return error
    match error:
        case StorageUnavailable():
            message = "the service cannot access its storage now; see its log"
            return StorageUnavailable(message, error.retry_seconds)
        case DataLoss() if error.name.startswith(OF_TENANTS):
            return DataLoss(error.name, _without_folders(error.reason))
        case DataLoss():
            return DataLoss("stored data", "see the log of the service")
        case CheckpointChanged():
            return CheckpointChanged(error.name, _without_folders(error.changes))
        case _:
            return error


def unscope_error(error: LongleafError, tenant: str) -> LongleafError:
    """The error with the names that `tenant` uses."""
    given = (getattr(error, name, str(error)) for name in signature(type(error)).parameters)
    return type(error)(*(unscoped(each, tenant) if isinstance(each, str) else each for each in given))


def _without_folders(text: str) -> str:
    return _PATH.sub(lambda path: path[0].rpartition("/")[2], text)


def recompute_for_tenant(recomputed: RecomputeResult) -> RecomputeResult:
    is_admin = CALLER.get().is_admin
    reasons = [each.reason if is_admin else _without_folders(each.reason) for each in recomputed.skipped]
    pairs = zip(recomputed.skipped, reasons, strict=True)
    skipped = tuple(SkippedContext(name_of(each.name), unscoped(reason, tenant())) for each, reason in pairs)
    return replace(recomputed, contexts=tuple(map(redact_context, recomputed.contexts)), skipped=skipped)


def redact_cluster(cluster: Cluster) -> Cluster:
    """Returns everything, with full ids, for an admin. For other callers: the model and the ranks, without the load of
    other tenants and the addresses of machines and storage."""
    if CALLER.get().is_admin:
        return cluster
    recovery = cluster.recovery
    if recovery is not None:
        dropped = tuple(name_of(each) for each in recovery.dropped_contexts if tenant_of(each) == tenant())
        recovery = replace(recovery, dropped_contexts=dropped, lost_tokens=0, recovered_tokens=0)
    return replace(
        cluster,
        workers=tuple(replace(worker, pid=0, address="", tokens=0, kv_bytes=0) for worker in cluster.workers),
        recovery=recovery,
        waiting=0,
        running=0,
        window_tokens=0,
        states=0,
        storage=None if cluster.storage is None else replace(cluster.storage, url="", error=""),
        drafting=None,
    )
