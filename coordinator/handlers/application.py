"""The use cases of one service, shared by all protocols."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from coordinator.auth.caller import CALLER, OWNER
from coordinator.auth.quotas import QuotaEnforcer
from coordinator.grammars.compiler import GrammarCompiler
from coordinator.handlers.context_forks import ContextForks
from coordinator.handlers.context_text import ContextTexts
from coordinator.handlers.durable_uploads import DurableUploads
from coordinator.handlers.generation import Generation
from coordinator.handlers.ingest import Ingest
from coordinator.handlers.tokenization import Tokenization
from coordinator.handlers.transfer.exports import Exports
from coordinator.handlers.transfer.imports import ImportSessions
from coordinator.handlers.uploads import Uploads
from coordinator.handlers.verification import VerificationRunner
from coordinator.persistence.journal.journal import Journal
from coordinator.telemetry.observers import NO_OBSERVERS, Observers
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import FailedPrecondition
from longleaf.sampling import GREEDY, SamplingParams
from longleaf.types import Cluster, Context, RecomputeResult

if TYPE_CHECKING:
    from coordinator.engine.context_transfer import ContextTransfer
    from coordinator.engine.engine import Engine


class Application:
    """The use cases of one engine. All protocols share them, so any of them can resume held generations and uploads.

    `cluster` describes the engine and may raise. `journal` persists held generations, and `durable_uploads` documents
    that can be resumed. `transfers` exports and imports contexts; None: no transfers. A tenant may use at most
    `tenant_share` of the capacity for held generations, uploads and imports."""

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        cluster: Callable[[], Cluster],
        journal: Journal | None = None,
        durable_uploads: DurableUploads | None = None,
        transfers: "ContextTransfer | None" = None,
        observers: Observers = NO_OBSERVERS,
        tenant_share: float = 1.0,
        sampling_defaults: SamplingParams = GREEDY,
    ) -> None:
        self.sampling_defaults = sampling_defaults
        """Values for sampling parameters that requests omit."""
        self._uploads = Uploads(durable=durable_uploads, tenant_share=tenant_share)
        self._quotas = quotas = QuotaEnforcer(
            engine.usage,
            num_uploads=self._num_uploads,
            storage_bytes=engine.storage_bytes,
            num_upload_tokens=self._uploads.num_tokens_of,
        )
        observers = Observers((observers, quotas))
        self.threads = TokenizerPool(tenant=lambda: CALLER.get(OWNER).tenant)
        """Threads for all long computations, with fair turns between tenants."""
        self.texts = ContextTexts(engine, tokenizer, self.threads)
        self.grammars = GrammarCompiler(tokenizer.checkpoint.folder)
        """Compiles the constraints of requests."""
        self.generation = Generation(
            engine,
            tokenizer,
            self.threads,
            journal=journal,
            observers=observers,
            quotas=quotas,
            tenant_share=tenant_share,
            text_maps=self.texts.map_of,
            grammars=self.grammars,
        )
        self.ingest = Ingest(engine, tokenizer, self.threads, self._uploads, quotas=quotas)
        self.forks = ContextForks(engine, quotas)
        self._durable_uploads = durable_uploads
        self.contexts = engine
        self._vocabulary_size = tokenizer.vocabulary_size
        self.tokenization = Tokenization(tokenizer, self.threads)
        self.verifications = VerificationRunner(engine, tokenizer, self.threads, cluster)
        self._exports = self._imports = None
        if transfers is not None:
            self._exports = Exports(transfers, self.threads, cluster, tenant_share=tenant_share)
            self._imports = ImportSessions(
                transfers, tokenizer.vocabulary_size, quotas=quotas, tenant_share=tenant_share
            )
        self.cluster = cluster
        self.changes = engine.changes
        """Changes of the result of `cluster`."""

    def _num_uploads(self, tenant: str) -> int:
        """Ingests and imports of a tenant that are open or can be resumed."""
        return self._uploads.num_of(tenant) + (self._imports.num_of(tenant) if self._imports is not None else 0)

    async def recompute_context(self, context_id: str) -> Context:
        """Recomputes a context prefilled by an earlier checkpoint. Raises NotFound, AlreadyExists, CheckpointChanged,
        DataLoss, ResourceExhausted or StorageUnavailable."""
        return await self.contexts.recompute_context(context_id, self._vocabulary_size, self._room)

    async def recompute_contexts(self, tenant: str) -> RecomputeResult:
        """Recomputes all contexts of a tenant that an earlier checkpoint prefilled, if their names are free and the
        quotas allow it."""
        return await self.contexts.recompute_contexts(self._vocabulary_size, tenant, self._room)

    def _room(self, num_tokens: int) -> AbstractContextManager[None]:
        """Reserves space in the caller's quotas; see `Room`."""
        return self._quotas.reserve_contexts(1, num_tokens)

    @property
    def exports(self) -> Exports:
        """Raises FailedPrecondition."""
        if self._exports is None:
            raise _immobile()
        return self._exports

    @property
    def imports(self) -> ImportSessions:
        """Raises FailedPrecondition."""
        if self._imports is None:
            raise _immobile()
        return self._imports

    async def close(self) -> None:
        """Ends the threads, and waits until received data is persisted. Idempotent."""
        if self._imports is not None:
            await self._imports.close()
        await self.threads.close()
        await self.grammars.close()
        if self._durable_uploads is not None:
            await self._durable_uploads.close()


def _immobile() -> FailedPrecondition:
    return FailedPrecondition("contexts", "this service does not support export and import")
