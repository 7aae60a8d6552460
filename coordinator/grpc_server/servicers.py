"""The four services of longleaf.v1: decode the request, call the use case, encode the result. Errors are raised.

The services are registered before the engine exists. Until it does, the ReadinessGate rejects calls.
"""

import base64
import binascii
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from google.protobuf.empty_pb2 import Empty
from grpc.aio import ServicerContext

from coordinator.auth.caller import CALLER, OWNER
from coordinator.change_feed import CoalescingWatch
from coordinator.grpc_server import tenant_scoping
from coordinator.grpc_server.local_peers import is_here
from coordinator.grpc_server.readiness_gate import ReadinessGate
from coordinator.handlers.tokenization import MAX_TOKENS, Tokenization
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf import codec
from longleaf.errors import InvalidArgument, PermissionDenied
from longleaf.types import ArchiveChunk, Cluster, Draining, ImportHeader, IngestHeader, IngestPiece
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import context_pb2 as context_pb
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_service_pb2 as service_pb
from longleaf.v1 import tokenizer_service_pb2 as tokenizer_pb
from longleaf.v1.cluster_service_pb2_grpc import ClusterServiceServicer
from longleaf.v1.context_service_pb2_grpc import ContextServiceServicer
from longleaf.v1.generation_service_pb2_grpc import GenerationServiceServicer
from longleaf.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine

Given = ParamSpec("Given")
Decoded = TypeVar("Decoded")
RpcContext = ServicerContext[Any, Any]
Drain = Callable[[bool], Awaitable[Draining]]
SlotReset = Callable[[], int]
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MANY_ITEMS = 1 << 14
"""Number of token ids or files above which a message is decoded in a thread, so as not to block other calls."""


def caller(call: RpcContext) -> str:
    """The default client of a call: the peer's host."""
    peer = call.peer()
    return peer.rpartition(":")[0] or peer


async def _decoded(
    threads: TokenizerPool,
    num_items: int,
    decode: Callable[Given, Decoded],
    *arguments: Given.args,
    **options: Given.kwargs,
) -> Decoded:
    """Decodes a message with `num_items` token ids or files: in a thread, if there are many."""
    if num_items > MANY_ITEMS:
        return await threads.run(decode, *arguments, **options)
    return decode(*arguments, **options)


def random_seed() -> int:
    """A random seed for a request that has none."""
    return secrets.randbits(64)


class GenerationServicer(GenerationServiceServicer):
    """Streams generations, and cancels held ones."""

    def __init__(self, readiness: ReadinessGate, seed: Callable[[], int] = random_seed) -> None:
        self._readiness = readiness
        self._seed = seed

    async def Generate(
        self, request: service_pb.GenerateRequest, context: RpcContext
    ) -> AsyncGenerator[service_pb.GenerateResponse, None]:
        application = self._readiness.application
        num_ids = len(request.token_ids.ids)
        defaults = application.sampling_defaults
        decoded = await _decoded(application.threads, num_ids, codec.decode_generate, request, self._seed(), defaults)
        decoded = tenant_scoping.scope_request(decoded, caller(context))
        async with aclosing(application.generation.run(decoded, context.time_remaining())) as answer:
            del request, decoded  # they may be large, and the answer may take long
            async for event in answer:
                yield codec.encode_event(tenant_scoping.redact_event(event))

    async def CancelGeneration(self, request: service_pb.CancelGenerationRequest, context: object) -> Empty:
        await self._readiness.application.generation.cancel(
            tenant_scoping.scope_cancelled(codec.decode_cancel(request))
        )
        return Empty()


class ContextServicer(ContextServiceServicer):
    """Creates, reads, updates, forks, deletes, imports and exports contexts."""

    def __init__(self, readiness: ReadinessGate) -> None:
        self._readiness = readiness

    @property
    def _contexts(self) -> "Engine":
        return self._readiness.application.contexts

    async def IngestContext(
        self, request_iterator: AsyncIterable[ingest_pb.IngestContextRequest], context: RpcContext
    ) -> AsyncGenerator[ingest_pb.IngestContextResponse, None]:
        application = self._readiness.application
        pieces = _pieces(request_iterator, application.threads, caller(context))
        async with aclosing(application.ingest.run(pieces, context.time_remaining())) as reports:
            async for report in reports:
                yield codec.encode_ingest_progress(tenant_scoping.redact_report(report))

    async def CancelIngest(self, request: ingest_pb.CancelIngestRequest, context: object) -> Empty:
        name = tenant_scoping.scope_context(codec.context_id(request.name))
        await self._readiness.application.ingest.cancel(name, request.upload_id)
        return Empty()

    async def GetContext(self, request: ingest_pb.GetContextRequest, context: object) -> context_pb.Context:
        view = self._contexts.get_context(tenant_scoping.scope_context(codec.context_id(request.name)))
        return codec.encode_context(tenant_scoping.redact_context(view))

    async def GetContextText(
        self, request: ingest_pb.GetContextTextRequest, context: object
    ) -> ingest_pb.GetContextTextResponse:
        wanted = tenant_scoping.scope_request(codec.decode_get_text(request))
        return codec.encode_context_text(await self._readiness.application.texts.read(wanted))

    async def ListContexts(
        self, request: ingest_pb.ListContextsRequest, context: object
    ) -> ingest_pb.ListContextsResponse:
        if request.page_size < 0:
            raise InvalidArgument("page_size", f"{request.page_size} is negative")
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        after = tenant_scoping.scope(_decode_page_token(request.page_token))
        found = self._contexts.list_contexts(after, size + 1, tenant=tenant_scoping.tenant())
        views = [tenant_scoping.redact_context(view) for view in found]
        return ingest_pb.ListContextsResponse(
            contexts=[codec.encode_context(view) for view in views[:size]],
            next_page_token=_encode_page_token(views[size - 1].id) if len(views) > size else "",
        )

    async def ForkContext(self, request: ingest_pb.ForkContextRequest, context: object) -> context_pb.Context:
        fork = tenant_scoping.scope_request(codec.decode_fork(request))
        view = await self._readiness.application.forks.fork(fork)
        return codec.encode_context(tenant_scoping.redact_context(view))

    async def UpdateContext(self, request: ingest_pb.UpdateContextRequest, context: object) -> context_pb.Context:
        name, settings = codec.decode_update(request)
        view = await self._contexts.update_context(tenant_scoping.scope_context(name), settings)
        return codec.encode_context(tenant_scoping.redact_context(view))

    async def RecomputeContext(self, request: ingest_pb.RecomputeContextRequest, context: object) -> context_pb.Context:
        view = await self._readiness.application.recompute_context(
            tenant_scoping.scope_context(codec.context_id(request.name))
        )
        return codec.encode_context(tenant_scoping.redact_context(view))

    async def RecomputeContexts(
        self, request: ingest_pb.RecomputeContextsRequest, context: object
    ) -> ingest_pb.RecomputeContextsResponse:
        recomputed = await self._readiness.application.recompute_contexts(tenant_scoping.tenant())
        return codec.encode_recompute(tenant_scoping.recompute_for_tenant(recomputed))

    async def DeleteContext(self, request: ingest_pb.DeleteContextRequest, context: object) -> Empty:
        await self._contexts.delete_context(tenant_scoping.scope_context(codec.context_id(request.name)))
        return Empty()

    async def ExportContext(
        self, request: ingest_pb.ExportContextRequest, context: object
    ) -> AsyncGenerator[ingest_pb.ExportContextResponse, None]:
        wanted = tenant_scoping.scope_request(codec.decode_export(request))
        async with aclosing(self._readiness.application.exports.run(wanted)) as archive:
            async for updates in archive:
                yield codec.encode_exported(updates)

    async def ImportContext(
        self, request_iterator: AsyncIterable[ingest_pb.ImportContextRequest], context: object
    ) -> AsyncGenerator[ingest_pb.ImportContextResponse, None]:
        async with aclosing(self._readiness.application.imports.run(_archive(request_iterator))) as reports:
            async for report in reports:
                yield codec.encode_import_progress(tenant_scoping.redact_report(report))


async def _pieces(
    requests: AsyncIterable[ingest_pb.IngestContextRequest], threads: TokenizerPool, client: str
) -> AsyncGenerator[IngestPiece, None]:
    """Decodes the requests of an ingest. `client` is the default client."""
    async for request in requests:
        num_items = len(request.token_ids.ids) + len(request.config.files) + len(request.prefaced_config.config.files)
        piece = await _decoded(threads, num_items, codec.decode_ingest_piece, request)
        if isinstance(piece, IngestHeader):
            piece = tenant_scoping.scope_request(piece, client)
        yield piece
        del request, piece  # they may be large, and the next ones may take long to arrive


async def _archive(
    requests: AsyncIterable[ingest_pb.ImportContextRequest],
) -> AsyncGenerator[ImportHeader | ArchiveChunk, None]:
    """Decodes the requests of an import."""
    async for request in requests:
        piece = codec.decode_import_piece(request)
        yield tenant_scoping.scope_request(piece) if isinstance(piece, ImportHeader) else piece


def _encode_page_token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _decode_page_token(token: str) -> str:
    """Id after which the page begins. Raises InvalidArgument for a token that this service did not issue."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgument("page_token", "is not a next_page_token of this service") from None


class TokenizerServicer(TokenizerServiceServicer):
    """Converts text to ids and back, and counts tokens."""

    def __init__(self, readiness: ReadinessGate) -> None:
        self._readiness = readiness

    @property
    def _tokenization(self) -> Tokenization:
        return self._readiness.application.tokenization

    async def CountTokens(
        self, request: tokenizer_pb.CountTokensRequest, context: object
    ) -> tokenizer_pb.CountTokensResponse:
        return tokenizer_pb.CountTokensResponse(token_count=await self._tokenization.count(request.text))

    async def Tokenize(self, request: tokenizer_pb.TokenizeRequest, context: object) -> tokenizer_pb.TokenizeResponse:
        found = await self._tokenization.tokenize(
            request.text, add_special=request.add_special_tokens, has_spans=request.return_spans
        )
        return codec.encode_tokenized(found)

    async def Detokenize(
        self, request: tokenizer_pb.DetokenizeRequest, context: object
    ) -> tokenizer_pb.DetokenizeResponse:
        message, keep_special = request.token_ids, request.keep_special_tokens
        threads, num_ids = self._readiness.application.threads, len(message.ids)
        token_ids = await _decoded(threads, num_ids, codec.decode_ids, message, MAX_TOKENS)
        text = await self._tokenization.detokenize(token_ids, keep_special=keep_special)
        return tokenizer_pb.DetokenizeResponse(text=text)


class ClusterServicer(ClusterServiceServicer):
    """Describes, verifies and drains the cluster. `drain` starts the shutdown; with `wait`, it returns when all running
    calls have ended, either by themselves or with an error that names the shutdown. `reset_slots` starts ranks in
    abandoned slots, and returns their number."""

    def __init__(self, readiness: ReadinessGate, drain: Drain, reset_slots: SlotReset) -> None:
        self._readiness = readiness
        self._drain = drain
        self._reset_slots = reset_slots

        self._watches: dict[str, CoalescingWatch[cluster_pb.WatchClusterResponse]] = {}
        """Watches by tenant. All admins share the watch with an empty name."""

    async def GetCluster(self, request: cluster_pb.GetClusterRequest, context: object) -> cluster_pb.Cluster:
        return codec.encode_cluster(self._cluster())

    def _cluster(self) -> Cluster:
        """The cluster as the caller may see it."""
        return tenant_scoping.redact_cluster(self._readiness.application.cluster())

    def _watch(self) -> CoalescingWatch[cluster_pb.WatchClusterResponse]:
        viewer = "" if CALLER.get().is_admin else tenant_scoping.tenant()
        if viewer not in self._watches:
            self._watches[viewer] = CoalescingWatch(self._look, self._readiness.application.changes)
        return self._watches[viewer]

    async def WatchCluster(
        self, request: cluster_pb.WatchClusterRequest, context: object
    ) -> AsyncGenerator[cluster_pb.WatchClusterResponse, None]:
        async with aclosing(self._watch().values(codec.decode_watch(request))) as responses:
            async for response in responses:
                yield response

    def _look(self) -> cluster_pb.WatchClusterResponse:
        return cluster_pb.WatchClusterResponse(cluster=codec.encode_cluster(self._cluster()))

    async def VerifyCluster(
        self, request: cluster_pb.VerifyClusterRequest, context: RpcContext
    ) -> cluster_pb.VerifyClusterResponse:
        wanted = tenant_scoping.scope_request(codec.decode_verify(request), caller(context))
        return codec.encode_verification(
            await self._readiness.application.verifications.run(wanted, context.time_remaining())
        )

    async def Drain(self, request: cluster_pb.DrainRequest, context: RpcContext) -> cluster_pb.DrainResponse:
        _check_here(context, "Drain")
        return codec.encode_draining(await self._drain(request.wait))

    async def ResetSlots(
        self, request: cluster_pb.ResetSlotsRequest, context: RpcContext
    ) -> cluster_pb.ResetSlotsResponse:
        _check_here(context, "ResetSlots")
        return cluster_pb.ResetSlotsResponse(slot_count=self._reset_slots())


def _check_here(context: RpcContext, method: str) -> None:
    """Raises PermissionDenied for a call from another machine, if authentication is off."""
    if CALLER.get() is OWNER and not is_here(context.peer()):
        raise PermissionDenied(
            f"{method} is allowed only from the machine or pod of the service; this call comes from {context.peer()}"
        )
