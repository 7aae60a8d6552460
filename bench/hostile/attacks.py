"""Attacks of hostile clients on a service. Every attack is bounded in number and time."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.duration_pb2 import Duration

from bench.durable.catalog import new_contexts
from bench.hostile import payloads
from coordinator.persistence.catalog.catalog import Catalog
from coordinator.persistence.catalog.data_folder import DataFolder
from longleaf.codec.status import DETAILS_KEY
from longleaf.credentials import Quotas
from longleaf.v1 import cluster_service_pb2, context_service_pb2, generation_pb2

MIB = 1 << 20
MOST_SECONDS = 60.0
"""An attack that takes longer is broken off."""
OPEN = "open until the attack ended"
BROKEN_OFF = "ended while it was sent to"
BARE = " without details"
CONTEXT = payloads.CONTEXT
NUM_FORKS, NUM_COUNTED = 5000, 3000
NUM_STALE, STALE_TOKENS = 40, 500_000
"""Contexts of an earlier checkpoint, and tokens of each: together 80 MB."""
TOKEN_ID = payloads.TOKEN[0]
SMALL_POOL = 512 * MIB
"""Holds 131,072 tokens of the embedded model, of which the honest stream and the long answer take 110,000."""
LONG_ANSWER, LATE_DOCUMENT = 60_000, 30_000

CREDENTIALS = {"honest": "secret-of-honest", CONTEXT: "secret-of-hostile"}
"""By tenant, where a service knows two."""
BEARER = (("authorization", f"Bearer {CREDENTIALS[CONTEXT]}"),)

GENERATE, DETOKENIZE = "GenerationService/Generate", "TokenizerService/Detokenize"
INGEST, FORK, GET, LIST, UPDATE = (
    f"ContextService/{name}Context{end}"
    for name, end in (("Ingest", ""), ("Fork", ""), ("Get", ""), ("List", "s"), ("Update", ""))
)
WATCH, IMPORT, REREAD = "ClusterService/WatchCluster", "ContextService/ImportContext", "ContextService/RereadContexts"
STREAMING = (GENERATE, WATCH)
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0))
UNREAD_OPTIONS = (*OPTIONS, ("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0))
"""The service may send next to nothing that has not been asked for."""


Run = Callable[["Attacker"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an attack."""

    statuses: dict[str, int]
    """The number of calls by final status."""
    cpu_seconds: float
    """CPU seconds of the attacker process."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of the service under attack."""

    address: str
    """HOST:PORT."""
    http: str
    """URL of its gateway; empty where there is none."""


class Attacker:
    """Makes calls of raw bytes, and counts how they end."""

    def __init__(self, channel: grpc.aio.Channel, http: str, seconds: float) -> None:
        self._channel = channel
        self.http = http
        """URL of the gateway."""
        self.seconds = seconds
        """Duration of an attack that has no natural end."""
        self.statuses: Counter[str] = Counter()

    def call(self, method: str, request: bytes) -> Any:
        """A call with one request; both ends are bytes."""
        kind = self._channel.unary_stream if method in STREAMING else self._channel.unary_unary
        return kind(f"/longleaf.v1.{method}")(request, metadata=BEARER)

    def upload(self, method: str = INGEST) -> Any:
        return self._channel.stream_stream(f"/longleaf.v1.{method}")(metadata=BEARER)

    async def ask(self, method: str, request: bytes) -> bytes | None:
        """Makes a call and reads all of it. Its last response; None for an error, which is counted."""
        return await self.read(self.call(method, request))

    async def read(self, call: Any) -> bytes | None:
        """The last response. A call that is still open when this is cancelled is counted as such."""
        last = None
        try:
            if isinstance(call, grpc.aio.UnaryUnaryCall):
                last = await call
            else:
                async for response in call:
                    last = response
            self.statuses["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.statuses[status_of(error.code(), error.trailing_metadata())] += 1
            return None
        except asyncio.CancelledError:
            if not _is_cancelled():
                self.statuses[BROKEN_OFF] += 1
                return None
            self._leave(call)
            raise
        return last

    async def hold(self, call: Any) -> None:
        """Reads nothing; counts how the call ends, as `read` does."""
        try:
            code, trailing = await call.code(), await call.trailing_metadata()
            self.statuses[status_of(code, trailing)] += 1
        except asyncio.CancelledError:
            self._leave(call)
            raise

    def _leave(self, call: Any) -> None:
        self.statuses[OPEN] += 1
        call.cancel()

    async def during(self, works: Iterable[Awaitable[object]]) -> None:
        """Runs all works concurrently for the duration of an attack."""
        await self.stop_after(self.seconds, works)

    async def stop_after(self, seconds: float, works: Iterable[Awaitable[object]]) -> None:
        """Runs all works concurrently for `seconds`, then cancels them."""
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.sleep(seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def status_of(code: grpc.StatusCode, trailing: Any) -> str:
    """The name of the status code, marked if the details or the retry delay of a refusal are missing."""
    details = dict(trailing or ()).get(DETAILS_KEY, b"")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and details and b"RetryInfo" not in details:
        return f"{code.name} for good"
    return code.name if details or code is grpc.StatusCode.OK else code.name + BARE


def _is_cancelled() -> bool:
    """Whether this task is: the library raises the same for a call that ended while it was being sent to."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def send(call: Any, *requests: bytes) -> None:
    """Sends until the service stops reading; the status of the call shows how it ended."""
    try:
        for request in requests:
            await call.write(request)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    except asyncio.CancelledError:
        if _is_cancelled():
            raise


async def repeat(attacker: Attacker, method: str, make: Callable[[int], bytes], num_bytes: int, count: int) -> None:
    """So many large requests, one after another. When one took too long no other follows."""
    request, deadline = make(num_bytes), time.monotonic() + MOST_SECONDS / 2
    for _ in range(count):
        await attacker.ask(method, request)
        if time.monotonic() > deadline:
            return


def huge(method: str, make: Callable[[int], bytes], num_bytes: int = payloads.LARGEST, count: int = 3) -> Run:
    """So many requests, by default each far larger than a service takes."""
    return partial(repeat, method=method, make=make, num_bytes=num_bytes, count=count)


async def abandon_texts(attacker: Attacker, num_bytes: int, count: int) -> None:
    """Long texts whose askers leave at once."""
    request = payloads.generate_text(num_bytes)
    await attacker.during(attacker.ask(GENERATE, request) for _ in range(count))


async def send_ids_at_once(attacker: Attacker) -> None:
    """Documents that come in a few large pieces, all at the same time."""
    piece = payloads.ingest_ids(payloads.PIECE)
    await attacker.during(upload(attacker, f"{CONTEXT}-{number}", piece, piece) for number in range(100))


async def leave_unread(attacker: Attacker) -> None:
    """As many streams as may run and wait, none of which is read, until the buffers of the last ones are full."""
    request = _generation(5000)
    calls = [attacker.call(GENERATE, request) for _ in range(320)]
    await attacker.stop_after(5 * attacker.seconds, map(attacker.hold, calls))


async def fill_the_pool(attacker: Attacker) -> None:
    """A document that must wait until a long answer has ended, and small requests that may begin before it."""
    answer = asyncio.create_task(attacker.ask(GENERATE, _generation(LONG_ANSWER)))
    await asyncio.sleep(0.3)
    late = upload(attacker, f"{CONTEXT}-late", payloads.ingest_ids(LATE_DOCUMENT))
    small = (_again_and_again(attacker, _generation(4)) for _ in range(4))
    await attacker.during([answer, late, *small])


async def _again_and_again(attacker: Attacker, request: bytes) -> None:
    while True:
        await attacker.ask(GENERATE, request)
        await asyncio.sleep(0.05)


def _generation(num_tokens: int) -> bytes:
    return payloads.generate(sampling=generation_pb2.SamplingParams(max_token_count=num_tokens, ignore_end_token=True))


async def upload(attacker: Attacker, name: str, *pieces: bytes) -> bytes | None:
    """Ingests a document; its last response."""
    call = attacker.upload()
    await send(call, payloads.ingest_config(name), *pieces)
    with suppress(asyncio.InvalidStateError):  # it has ended already
        await call.done_writing()
    return await attacker.read(call)


async def stall_uploads(attacker: Attacker) -> None:
    """Documents of which a part comes, and then nothing."""
    piece = payloads.ingest_ids(450_000)

    async def stall(number: int) -> None:
        call = attacker.upload()
        await send(call, payloads.ingest_config(f"{CONTEXT}-{number}"), piece)
        await attacker.read(call)

    await attacker.during(stall(number) for number in range(400))


async def list_forks(attacker: Attacker) -> None:
    """Thousands of contexts, made by the first attack, and pages of them one after another."""
    await _make_forks(attacker, NUM_FORKS)
    await attacker.during(_pages(attacker) for _ in range(4))


async def ask_beside_forks(attacker: Attacker) -> None:
    """Generations of a tenant with quotas, and with thousands of contexts, made by the first attack."""
    await _make_forks(attacker, NUM_COUNTED)
    await attacker.during(_again_and_again(attacker, _generation(4)) for _ in range(8))


async def _make_forks(attacker: Attacker, count: int) -> None:
    """Nothing to do if they are there."""
    name = _fork(count - 1)
    if await attacker.ask(GET, context_service_pb2.GetContextRequest(name=name).SerializeToString()) is None:
        await upload(attacker, CONTEXT, payloads.ingest_ids(200))
        for start in range(0, count, 50):
            await asyncio.gather(*(_make_fork(attacker, number) for number in range(start, start + 50)))


def _fork(number: int) -> str:
    return f"contexts/{CONTEXT}-{number}"


async def _make_fork(attacker: Attacker, number: int) -> None:
    message = context_service_pb2.ForkContextRequest(name=f"contexts/{CONTEXT}", new_name=_fork(number))
    await attacker.ask(FORK, message.SerializeToString())


async def _pages(attacker: Attacker) -> None:
    token = ""
    while True:
        request = context_service_pb2.ListContextsRequest(page_token=token)
        page = await attacker.ask(LIST, request.SerializeToString())
        token = context_service_pb2.ListContextsResponse.FromString(page or b"").next_page_token
        await asyncio.sleep(0 if page else 0.05)


async def watch(attacker: Attacker) -> None:
    """Many who want to hear of every change."""
    message = cluster_service_pb2.WatchClusterRequest(min_interval_duration=Duration(nanos=10_000_000))
    request = message.SerializeToString()
    await attacker.during(attacker.ask(WATCH, request) for _ in range(100))


async def set_everything(attacker: Attacker) -> None:
    """Generations with as many stop strings, biases and stop tokens as they may have."""
    options = generation_pb2.SamplingParams(
        max_token_count=20_000,
        stop=[chr(number + 1) * 1024 for number in range(16)],
        logit_bias=dict.fromkeys(range(256), 1.0),
        stop_token_ids=range(128, 192),
        ignore_end_token=True,
    )
    request = payloads.generate(sampling=options)
    await attacker.during(_again_and_again(attacker, request) for _ in range(32))


async def hold_stops(attacker: Attacker) -> None:
    """Answers of one character again and again, with which long stop strings begin: all of it is held back."""
    options = generation_pb2.SamplingParams(
        max_token_count=20_000,
        stop=["A" * 1023 + chr(ord("a") + number) for number in range(16)],
        logit_bias={TOKEN_ID: 100.0},
        ignore_end_token=True,
    )
    request = payloads.generate(sampling=options, num_samples=16)
    await attacker.during(_again_and_again(attacker, request) for _ in range(2))


async def make_shapes(attacker: Attacker) -> None:
    """Conversations of new roles, each of which is rendered, of a tenant that may generate nothing."""
    numbers = count(1)

    async def ask() -> None:
        while True:
            await attacker.ask(GENERATE, payloads.conversation(next(numbers)))
            await asyncio.sleep(0)

    await attacker.during(ask() for _ in range(64))


async def import_records(attacker: Attacker, make: Callable[[], Sequence[bytes]], num_calls: int) -> None:
    """Concurrent imports whose record is far larger than the context that it describes."""
    requests = make()

    async def send_one() -> None:
        call = attacker.upload(IMPORT)
        await send(call, *requests)
        with suppress(asyncio.InvalidStateError):
            await call.done_writing()
        await attacker.read(call)

    await attacker.during(send_one() for _ in range(num_calls))


async def reread_nothing(attacker: Attacker) -> None:
    """Requests a search of the folders of earlier checkpoints for a tenant that has no contexts there."""

    async def ask() -> None:
        while True:
            await attacker.ask(REREAD, b"")
            await asyncio.sleep(0)

    await attacker.during(ask() for _ in range(8))


def write_stale_contexts(data_folder: Path, model: str) -> None:
    """A folder of an earlier checkpoint of a model, with contexts of others in it."""
    folder = DataFolder.open(data_folder, "e" * 64, model, {"config.json": "0" * 64})

    async def fill() -> None:
        catalog = await Catalog.open(folder.database)
        for change in new_contexts(array("I", [TOKEN_ID]) * STALE_TOKENS, NUM_STALE, tenant="honest/"):
            await catalog.commit(change)
        await catalog.close()

    asyncio.run(fill())
    folder.close()


async def send_trailers(attacker: Attacker) -> None:
    """Trailers without end after requests that need no credentials, on several connections."""
    begin = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    await attacker.during(_send_on(attacker, begin, b"a:b\r\n" * 10_000) for _ in range(8))


async def leave_ids_at_the_gateway(attacker: Attacker) -> None:
    """Prompts of 500,000 ids that wait, through the gateway."""
    body = b'{"model":"x","max_tokens":20000,"prompt":[' + b"65," * 499_999 + b"65]}"
    authorization = "\r\n".join(f"{name}: {value}" for name, value in BEARER)
    head = f"Host: localhost\r\n{authorization}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    begin = f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode()
    await attacker.during(_send_on(attacker, begin + body) for _ in range(24))


async def _send_on(attacker: Attacker, begin: bytes, again: bytes = b"") -> None:
    """Sends on a dedicated connection until the server closes it, then opens another one."""
    url = urlsplit(attacker.http)
    while True:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(begin)
            await writer.drain()
            while again:
                writer.write(again)
                await writer.drain()
            while await reader.read(1 << 16):
                pass
            attacker.statuses["ended"] += 1
        except OSError:
            attacker.statuses["ended"] += 1
        except asyncio.CancelledError:
            attacker.statuses[OPEN] += 1
            raise
        finally:
            writer.close()


async def call_at_once(attacker: Attacker) -> None:
    """Far more short generations than may wait."""
    request = _generation(4)
    await asyncio.gather(*(attacker.ask(GENERATE, request) for _ in range(2500)))


async def burn(attacker: Attacker) -> None:
    """No attack: a process that only computes, to measure the CPU cost of an attacker on this machine."""

    def spin() -> None:
        deadline = time.monotonic() + attacker.seconds
        while time.monotonic() < deadline:
            pass

    await asyncio.to_thread(spin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack and the configuration of the service under attack."""

    run: Run
    description: str
    """For people."""
    options: Sequence[tuple[str, int]] = OPTIONS
    """Options of the channel."""
    kv_bytes: int = 6 << 30
    """Total bytes of the ranks' KV pools."""
    quotas: Quotas | None = None
    """Quotas of the attacker, who is one of two tenants; None: the service has no credentials."""
    prepare: Callable[[Path, str], None] | None = None
    """Fills the data folder of the service for its model; None: it has none."""
    has_gateway: bool = False
    """The service is also reachable over HTTP."""


ATTACKS = {
    "burn": Attack(run=burn, description="no attack: the attacker computes, and sends nothing"),
    "refused_16mib": Attack(
        run=partial(repeat, method=GENERATE, make=payloads.generate_ids, num_bytes=16 * MIB, count=12),
        description="12 prompts of 16 MiB, which are refused",
    ),
    "field_mask_64mib": Attack(run=huge(UPDATE, payloads.update_mask), description="an update of 22 million fields"),
    "token_ids_64mib": Attack(run=huge(GENERATE, payloads.generate_ids), description="a prompt of 67 million ids"),
    "stop_strings_64mib": Attack(run=huge(GENERATE, payloads.generate_stops), description="22 million stop strings"),
    "detokenize_64mib": Attack(run=huge(DETOKENIZE, payloads.detokenize), description="67 million ids to detokenize"),
    "logit_bias_64mib": Attack(run=huge(GENERATE, payloads.generate_biases), description="biases of 5.6 million ids"),
    "token_ids_4mib": Attack(
        run=huge(GENERATE, payloads.generate_ids, payloads.TAKEN, 12), description="4 million ids"
    ),
    "logit_bias_4mib": Attack(
        run=huge(GENERATE, payloads.generate_biases, payloads.TAKEN, 12), description="350,000 biases"
    ),
    "texts_abandoned": Attack(
        run=partial(abandon_texts, num_bytes=15_000_000, count=10), description="10 texts of 15 MB whose askers leave"
    ),
    "texts_abandoned_4mib": Attack(
        run=partial(abandon_texts, num_bytes=payloads.TAKEN, count=16),
        description="16 texts of 4 MiB whose askers leave",
    ),
    "ingested_ids_1mib": Attack(run=send_ids_at_once, description="100 documents of 2 million ids at once"),
    "unread_streams": Attack(run=leave_unread, description="320 streams that are never read", options=UNREAD_OPTIONS),
    "head_of_line": Attack(run=fill_the_pool, description="a document that waits for room", kv_bytes=SMALL_POOL),
    "stalled_uploads": Attack(run=stall_uploads, description="400 uploads that stall after 450,000 ids"),
    "list_contexts": Attack(run=list_forks, description="4 who list 5,001 contexts again and again"),
    "watchers": Attack(run=watch, description="100 who watch the cluster at 10 ms"),
    "many_sampling_settings": Attack(run=set_everything, description="32 generations with every setting at its limit"),
    "calls_at_once": Attack(run=call_at_once, description="2,500 generations asked for at once"),
    "held_stop_strings": Attack(run=hold_stops, description="32 samples that always begin 16 stop strings of 1 KiB"),
    "quotas_of_many": Attack(
        run=ask_beside_forks,
        description="generations of a tenant with 3,000 contexts",
        quotas=Quotas(generations=4, waiting=4),
    ),
    "conversation_shapes": Attack(
        run=make_shapes,
        description="64 conversations at a time of a tenant that may ask nothing",
        quotas=Quotas(generations=0),
    ),
    "segment_records": Attack(
        run=partial(import_records, make=payloads.import_runs, num_calls=4),
        description="4 archives with 60 MiB about one segment",
        quotas=Quotas(),
    ),
    "context_ends": Attack(
        run=partial(import_records, make=payloads.import_ends, num_calls=16),
        description="16 archives with 900,000 ends of a context",
        quotas=Quotas(),
    ),
    "earlier_contexts": Attack(
        run=reread_nothing,
        description="8 at a time have earlier contexts searched",
        quotas=Quotas(),
        prepare=write_stale_contexts,
    ),
    "trailers": Attack(run=send_trailers, description="HTTP requests whose trailers do not end", has_gateway=True),
    "ids_at_the_gateway": Attack(
        run=leave_ids_at_the_gateway, description="24 prompts of 500,000 ids over HTTP", has_gateway=True
    ),
}
"""All attacks by name. Each runs in a separate process."""


def attack(name: str, target: Target, seconds: float) -> Outcome:
    """Attacks a service; an attack without a natural end stops after `seconds`."""
    began = time.process_time()
    statuses = asyncio.run(_attack(ATTACKS[name], target, seconds))
    return Outcome(dict(statuses), time.process_time() - began)


async def _attack(chosen: Attack, target: Target, seconds: float) -> Counter[str]:
    async with grpc.aio.insecure_channel(target.address, options=chosen.options) as channel:
        attacker = Attacker(channel, target.http, seconds)
        try:
            await asyncio.wait_for(chosen.run(attacker), MOST_SECONDS)
        except TimeoutError:
            attacker.statuses["the attack took too long"] += 1
        return attacker.statuses
