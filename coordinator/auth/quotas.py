"""Enforces the quotas and rate limits of tenants."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from coordinator.auth.caller import CALLER, OWNER, Caller
from coordinator.auth.leaky_bucket import LeakyBucket
from coordinator.auth.tenant_usage import TenantUsage
from coordinator.engine_messages import Event, Tokens
from coordinator.telemetry.observers import CallRecord, EventSink
from longleaf.errors import ResourceExhausted

RETRY_SECONDS = 2.0
"""Seconds to wait before a retry when a quota frees up as other work of the tenant ends."""


class QuotaEnforcer:
    """Checks the caller's quotas when work begins. `usage` returns the current usage of a tenant; the rate limits, in
    tokens per minute, are counted here, as an Observer of generations. Running work continues when quotas change.
    Tenants without quotas cost nothing."""

    def __init__(
        self,
        usage: Callable[[str], TenantUsage],
        clock: Callable[[], float] = time.monotonic,
        num_uploads: Callable[[str], int] = lambda _: 0,
        storage_bytes: Callable[[str], int] = lambda _: 0,
        num_upload_tokens: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`num_uploads` returns how many ingests and imports of a tenant are open or can be resumed,
        `num_upload_tokens` how many tokens they have, and `storage_bytes` the size of its contexts on storage."""
        self._usage = usage
        self._storage_bytes = storage_bytes
        self._num_upload_tokens = num_upload_tokens
        self._num_uploads = num_uploads
        self._reserved = defaultdict[str, Counter[str]](Counter)
        """Contexts and tokens by tenant that are being created and that `usage` does not include yet."""
        self._input_buckets = defaultdict[str, LeakyBucket](lambda: LeakyBucket(clock))
        self._output_buckets = defaultdict[str, LeakyBucket](lambda: LeakyBucket(clock))

    @property
    def _caller(self) -> Caller:
        return CALLER.get(OWNER)

    def check_generation(self) -> None:
        """Checks whether another generation may begin. Raises ResourceExhausted."""
        caller, quotas = self._caller, self._caller.quotas
        if quotas.generations == 0:
            _refuse(caller, "generations", "the tenant may run no generations")
        if quotas.generations is not None and quotas.waiting is not None:
            usage = self._usage(caller.tenant)
            if usage.running + usage.waiting >= quotas.generations + quotas.waiting:
                limit = f"{quotas.generations} may run and {quotas.waiting} may wait"
                message = f"{usage.running} run and {usage.waiting} wait; at most {limit}"
                _refuse(caller, "waiting" if quotas.waiting else "generations", message, RETRY_SECONDS)
        self._check_rate(caller, "tokens_out_per_minute", self._output_buckets)
        self.check_rate_in()

    @contextmanager
    def begin_generation(self, num_tokens: int) -> Generator[None, None, None]:
        """Wraps the start of a generation with a prompt of `num_tokens`. The body must not await. Tokens are counted
        only if the body succeeds. Raises ResourceExhausted."""
        self.check_generation()
        yield
        self.charge_input(num_tokens)

    def charge_input(self, num_tokens: int) -> None:
        """Counts tokens that running work reads. It is never rejected."""
        caller = self._caller
        self._input_buckets[caller.tenant].add(num_tokens, caller.quotas.tokens_in_per_minute)

    def check_context(self, num_contexts: int, num_tokens: int) -> None:
        """Checks whether `num_contexts` more contexts (may be 0) and `num_tokens` more tokens in contexts fit. Raises
        ResourceExhausted."""
        caller, quotas = self._caller, self._caller.quotas
        if quotas.contexts is None and quotas.tokens is None and quotas.storage_bytes is None:
            return
        usage, reserved = self._usage(caller.tenant), self._reserved[caller.tenant]
        resident = usage.tokens + reserved["tokens"] + self._num_upload_tokens(caller.tenant)
        num_resident = usage.contexts + reserved["contexts"]
        if quotas.contexts is not None and num_contexts and num_resident + num_contexts > quotas.contexts:
            _refuse(caller, "contexts", f"{num_resident:,} exist, and the limit is {quotas.contexts:,}")
        if quotas.tokens is not None and resident + num_tokens > quotas.tokens:
            message = f"its contexts and uploads have {resident:,} tokens; {num_tokens:,} more exceed {quotas.tokens:,}"
            _refuse(caller, "tokens", message)
        if quotas.storage_bytes is not None:
            retained = self._storage_bytes(caller.tenant)
            if retained >= quotas.storage_bytes:
                message = f"its contexts take {retained:,} bytes of storage, and the limit is {quotas.storage_bytes:,}"
                _refuse(caller, "storage_bytes", message)

    @contextmanager
    def reserve_contexts(self, num_contexts: int, num_tokens: int) -> Generator[None, None, None]:
        """Reserves contexts and tokens in contexts while the body creates them. Raises ResourceExhausted."""
        self.check_context(num_contexts, num_tokens)
        tenant, reserved = self._caller.tenant, Counter(contexts=num_contexts, tokens=num_tokens)
        self._reserved[tenant] += reserved
        try:
            yield
        finally:
            self._reserved[tenant] -= reserved

    @contextmanager
    def begin_document(self, num_contexts: int, num_tokens: int) -> Generator[None, None, None]:
        """Wraps the start of a document of `num_tokens` tokens, into a new context, or into an existing one if
        `num_contexts` is 0. Tokens are counted only if the body succeeds. Raises ResourceExhausted."""
        with self.reserve_contexts(num_contexts, num_tokens):
            yield
        self.charge_input(num_tokens)

    def check_upload(self, num_retained: int = 0) -> None:
        """Checks whether another ingest or import may be open. `num_retained` uploads are not counted: those that can
        be resumed but have no stream. Raises ResourceExhausted."""
        caller = self._caller
        if caller.quotas.uploads is None:
            return
        if (num_open := self._num_uploads(caller.tenant) - num_retained) >= caller.quotas.uploads:
            message = f"{num_open} are open or resumable, and the limit is {caller.quotas.uploads}"
            _refuse(caller, "uploads", message, RETRY_SECONDS)

    def check_rate_in(self) -> None:
        """Checks whether more tokens may be read. Raises ResourceExhausted."""
        self._check_rate(self._caller, "tokens_in_per_minute", self._input_buckets)

    def _check_rate(self, caller: Caller, name: str, buckets: defaultdict[str, LeakyBucket]) -> None:
        rate: int | None = getattr(caller.quotas, name)
        if rate is None:
            return
        if rate == 0:
            _refuse(caller, name, "the limit is 0")
        if seconds := buckets[caller.tenant].seconds_until_free(rate):
            _refuse(caller, name, f"the limit of {rate:,} is used up", seconds)

    # --- as an Observer ---

    @contextmanager
    def observe_call(self, record: CallRecord) -> Generator[None, None, None]:
        """Does not count calls."""
        yield

    @contextmanager
    def observe_generation(self, request_id: str, tenant: str) -> Generator[EventSink, None, None]:
        """Counts generated tokens."""
        rate, bucket = self._caller.quotas.tokens_out_per_minute, self._output_buckets[tenant]

        def on_event(event: Event) -> None:
            if isinstance(event, Tokens):
                bucket.add(len(event.tokens), rate)

        yield on_event


def _refuse(caller: Caller, name: str, message: str, retry_seconds: float | None = None) -> NoReturn:
    raise ResourceExhausted(f"quotas/{name}", f"of tenant {caller.tenant}: {message}", retry_seconds)


UNLIMITED = QuotaEnforcer(lambda _: TenantUsage())
"""For callers without quotas."""
