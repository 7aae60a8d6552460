"""The quota use of a tenant is known without a scan of its contexts."""

import sys
from types import FrameType

from coordinator.auth.tenant_usage import TenantUsage
from tests.support.scheduling import Bench

NAMES = [str(number) for number in range(40)]


def forked(num_contexts: int) -> Bench:
    bench = Bench(check_every=1000)
    bench.ingest("book", 20)
    bench.ingest("acme/other", 7)
    bench.run()
    for number in range(num_contexts - 1):
        bench.scheduler.fork_context("book", NAMES[number], 10, now=0.0)
    return bench


def test_usage_counts_contexts_and_running_ingests() -> None:
    bench = forked(3)
    bench.ingest("new", 30)
    bench.ingest("book", 5, append=True)
    bench.ask(3, max_tokens=5, context="0")
    usage = bench.scheduler.usage("default")
    assert usage == TenantUsage(contexts=4, tokens=20 + 10 + 10 + 30 + 5, waiting=1, uploads=2)
    bench.run()
    assert bench.scheduler.usage("default") == TenantUsage(contexts=4, tokens=75)
    bench.scheduler.delete_context("book")
    assert bench.scheduler.usage("default") == TenantUsage(contexts=3, tokens=50)
    assert bench.scheduler.usage("acme") == TenantUsage(contexts=1, tokens=7)


def test_usage_lookup_does_not_depend_on_the_number_of_contexts() -> None:
    counts = list[int]()
    for num_contexts in (2, len(NAMES)):
        scheduler, calls = forked(num_contexts).scheduler, list[str]()

        def note(frame: FrameType, event: str, _: object, calls: list[str] = calls) -> None:
            calls.append(event)

        sys.setprofile(note)
        try:
            scheduler.usage("default")
        finally:
            sys.setprofile(None)
        counts.append(len(calls))
    assert counts[0] == counts[1]
