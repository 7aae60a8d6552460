"""Clients and services of different versions: unknown fields and messages are ignored or refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from longleaf.client import AsyncClient, Client, Retries
from longleaf.codec.status import DETAILS_KEY, decode_error
from longleaf.errors import Cancelled, InvalidArgument, LongleafError, ModelRefused, StartError
from longleaf.types import Context, Delta, Event, Finished, IngestProgress, Progress, Recovering, Started
from longleaf.v1 import generation_service_pb2 as service_pb
from tests.support.fuzz.messages import methods
from tests.support.network.newer import NEWER, VALUE, Newer
from tests.support.service import Served
from tests.support.terminal import Terminal

NEW = Newer()
QUICK = Retries(limit=2, first_delay=0.001, longest_delay=0.002)
UNKNOWN = NEW.GenerateResponse(event_newer="an event of a kind that there was not")
STARTED = NEW.GenerateResponse(started={"prompt_token_count": 5, NEWER: "x"})
PROGRESS = NEW.GenerateResponse(progress={"processed_token_count": 5, "total_token_count": 5, NEWER: "x"})
POSITIONS = {"precision": "float128", NEWER: "x"}
CONTEXT = {"name": "contexts/book", "token_count": 3, "position_info": POSITIONS, NEWER: "x"}
Answer = Callable[[Any, grpc.aio.ServicerContext], AsyncIterator[Message]]


def delta(index: int, *token_ids: int, sample: int = 0) -> Message:
    text = "".join(chr(97 + token_id) for token_id in token_ids)
    logprobs = [{"logprob": -1.0, "top": [{"token_id": 1, NEWER: "x"}], NEWER: "x"} for _ in token_ids]
    fields = {"token_index": index, "token_ids": token_ids, "text": text, "sample_index": sample, "logprobs": logprobs}
    return NEW.GenerateResponse(delta=fields | {NEWER: "x"})


def finished(reason: int = VALUE, sample: int = 0) -> Message:
    return NEW.GenerateResponse(finished={"finish_reason": reason, "sample_index": sample, NEWER: "x"})


class LaterService(grpc.GenericRpcHandler):
    """Answers the methods in `answers` with messages of a later version."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[Any] = []
        self.num_lacking = 0
        """Calls of methods that it does not implement."""
        self.address = ""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        name = handler_call_details.method.rpartition("/")[2]
        if name not in self.answers:
            self.num_lacking += 1
            return None
        method = next(method for method in methods() if method.name == name)
        request = getattr(NEW, method.input_type.name).FromString

        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for message in self.answers[name](requests, context):
                yield message.SerializeToString()

        return grpc.stream_stream_rpc_method_handler(answer, request)

    def say(self, method: str, *messages: Message) -> None:
        """Answers after the first request, and stores it."""

        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
            self.requests.append(await anext(aiter(requests)))
            for message in messages:
                yield message

        self.answers[method] = answer


@pytest.fixture
async def later() -> AsyncIterator[LaterService]:
    service = LaterService()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield service
    await server.stop(None)


class Both:
    """Both clients behind one interface."""

    def __init__(self, address: str, is_plain: bool) -> None:
        self._address, self._is_plain = address, is_plain

    async def list(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """All items of a stream."""
        if self._is_plain:
            return await self._plainly(lambda client: list(getattr(client, method)(*arguments, **options)))
        async with AsyncClient(self._address, retries=QUICK, on_retry=lambda _: None) as client:
            return [item async for item in getattr(client, method)(*arguments, **options)]

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._is_plain:
            return await self._plainly(lambda client: getattr(client, method)(*arguments, **options))
        async with AsyncClient(self._address, retries=QUICK, on_retry=lambda _: None) as client:
            return await getattr(client, method)(*arguments, **options)

    async def _plainly(self, work: Callable[[Client], Any]) -> Any:
        def run() -> Any:
            with Client(self._address, retries=QUICK, on_retry=lambda _: None) as client:
                return work(client)

        return await asyncio.to_thread(run)


@pytest.fixture(params=[False, True], ids=["aio", "sync"])
def client(later: LaterService, request: pytest.FixtureRequest) -> Both:
    return Both(later.address, request.param)


# --- an older client ---


async def test_unknown_events_are_ignored(later: LaterService, client: Both) -> None:
    later.say("Generate", STARTED, UNKNOWN, PROGRESS, delta(0, 1, 2), UNKNOWN, finished())
    found = await client.list("generate", "x")
    assert [type(event) for event in found] == [Started, Progress, Delta, Finished]
    assert found[-1].reason == "unspecified"


async def test_unset_reason_is_unspecified(later: LaterService, client: Both) -> None:
    later.say("Generate", STARTED, finished(0))
    assert (await client.list("generate", "x"))[-1].reason == "unspecified"


RECOVERING = {"lost_token_count": 8, "recovered_token_count": 32, "total_token_count": 64, NEWER: "x"}


async def test_recovery_is_reported_between_consecutive_deltas(later: LaterService, client: Both) -> None:
    recovering = NEW.GenerateResponse(recovering=RECOVERING)
    later.say("Generate", STARTED, delta(0, 1), recovering, recovering, delta(1, 2), finished(2))
    found = await client.list("generate", "x")
    assert found[2:4] == [Recovering(8, 32, 64)] * 2
    assert [event.index for event in found if isinstance(event, Delta)] == [0, 1]


async def test_answer_interrupted_in_a_recovery_resumes_at_the_next_token(later: LaterService, client: Both) -> None:
    recovering = NEW.GenerateResponse(recovering=RECOVERING)
    breaking_off(later, [STARTED, delta(0, 1), recovering], [STARTED, recovering, delta(1, 2), finished(2)])
    found = await client.list("generate", "x", resumable=True)
    assert later.requests[1].resume_token_index == 1
    assert text_of(found) == "bc"


async def test_ingest_reports_a_recovery(later: LaterService, client: Both) -> None:
    reported = [progress(1), progress(5, recovering=RECOVERING, processed_token_count=3), progress(4, context=CONTEXT)]
    later.say("IngestContext", *reported)
    found: list[IngestProgress] = await client.list("ingest_steps", "book", b"")
    assert [(step.phase, step.recovering) for step in found] == [
        ("receiving", None),
        ("recovering", Recovering(8, 32, 64)),
        ("ready", None),
    ]


def breaking_off(later: LaterService, *parts: list[Message]) -> None:
    """Each call gets the next of `parts`; all but the last call fail after theirs."""
    left = list(parts)

    async def answer(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        later.requests.append(await anext(aiter(requests)))
        for message in left.pop(0):
            yield message
        if left:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    later.answers["Generate"] = answer


def text_of(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, Delta))


@pytest.mark.parametrize(
    ("before", "after", "index", "text"),
    [
        ([UNKNOWN], [STARTED, delta(0, 1)], None, "b"),
        ([STARTED, UNKNOWN], [STARTED, delta(0, 1)], 0, "b"),
        ([STARTED, delta(0, 1, 2), UNKNOWN], [STARTED, UNKNOWN, delta(2, 3)], 2, "bcd"),
        ([STARTED, UNKNOWN, delta(3, 1, 2)], [STARTED, delta(5, 3)], 5, "bcd"),
        ([STARTED, delta(0, 1), UNKNOWN, delta(4, 2)], [STARTED, UNKNOWN, delta(5, 3)], 5, "bcd"),
    ],
    ids=["first", "nothing yet", "last", "in front", "between"],
)
async def test_answer_resumes_at_its_offset_despite_ignored_messages(
    later: LaterService, client: Both, before: list[Message], after: list[Message], index: int | None, text: str
) -> None:
    """Even if ignored messages carried tokens: the index of the next message includes them."""
    breaking_off(later, before, [*after, finished(2)])
    found = await client.list("generate", "x", resumable=True, request_id="one")
    second = later.requests[1]
    assert (second.resume_token_index if second.HasField("resume_token_index") else None) == index
    assert text_of(found) == text
    assert found[-1].reason == "stop"


async def test_tokens_of_all_samples_are_counted(later: LaterService, client: Both) -> None:
    first = [STARTED, UNKNOWN, delta(2, 1), delta(0, 2, sample=1), UNKNOWN]
    breaking_off(later, first, [STARTED, delta(3, 3), finished(2), finished(2, 1)])
    found = await client.list("generate", "x", resumable=True, num_samples=2)
    assert later.requests[1].resume_token_index == 4
    assert text_of(found) == "bcd"


def progress(phase: int, **fields: Any) -> Message:
    return NEW.IngestContextResponse(phase=phase, **fields, newer="x")


async def test_unknown_ingest_phases_are_unspecified(later: LaterService, client: Both) -> None:
    """The document is sent from the offset that the service wants."""
    sent: list[Any] = []

    async def answer(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        stream = aiter(requests)
        sent.append(await anext(stream))
        yield progress(VALUE, received_size_bytes=2)
        sent.extend([message async for message in stream])
        for phase in (1, VALUE, 3):
            yield progress(phase, received_size_bytes=5)
        yield progress(VALUE, context=CONTEXT)

    later.answers["IngestContext"] = answer
    found: list[IngestProgress] = await client.list("ingest_steps", "book", "grass", upload_id="one")
    phases = ["unspecified", "receiving", "unspecified", "prefilling", "unspecified"]
    assert [step.phase for step in found] == phases
    assert [message.text for message in sent[1:]] == [b"ass"]
    sent.clear()
    assert (await client.call("ingest", "book", "grass", upload_id="one")).tokens == 3


async def test_messages_after_the_context_do_not_hide_it(later: LaterService, client: Both) -> None:
    later.say("IngestContext", progress(1), progress(4, context=CONTEXT), progress(VALUE))
    assert (await client.call("ingest", "book", b"")).id == "book"


async def test_unknown_fields_are_ignored(later: LaterService, client: Both) -> None:
    later.say("GetContext", NEW.Context(**CONTEXT))
    found: Context = await client.call("get_context", "book")
    assert (found.id, found.tokens, found.positions.precision) == ("book", 3, "unspecified")
    cluster = NEW.Cluster(model={"name": "m", NEWER: "x"}, workers=[{"rank": 1, NEWER: "x"}], newer="x")
    later.say("GetCluster", cluster)
    assert (await client.call("cluster")).model.name == "m"
    later.say("WatchCluster", NEW.WatchClusterResponse(cluster=cluster, newer="x"))
    assert [seen.workers[0].rank for seen in await client.list("watch_cluster")] == [1]
    later.say("VerifyCluster", NEW.VerifyClusterResponse(passed=True, newer="x"))
    assert (await client.call("verify")).passed
    later.say("ListContexts", NEW.ListContextsResponse(contexts=[CONTEXT], newer="x"))
    assert [one.id for one in await client.call("list_contexts")] == ["book"]
    later.say("Tokenize", NEW.TokenizeResponse(token_ids={"ids": [1, 2], NEWER: "x"}, newer="x"))
    assert (await client.call("tokenize", "ab")).token_ids == (1, 2)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "START_ERROR", StartError),
        (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_REFUSED", ModelRefused),
        (grpc.StatusCode.FAILED_PRECONDITION, "CONTEXT_PARKED", LongleafError),
        (grpc.StatusCode.FAILED_PRECONDITION, None, LongleafError),
        (grpc.StatusCode.DATA_LOSS, "CONTEXT_HALVED", LongleafError),
        (grpc.StatusCode.ABORTED, "CANCELLED", Cancelled),
        (grpc.StatusCode.ABORTED, "CONTEXT_MOVED", LongleafError),
    ],
    ids=str,
)
def test_unknown_error_reason_is_unspecified(
    code: grpc.StatusCode, reason: str | None, kind: type[LongleafError]
) -> None:
    status = status_pb2.Status(code=code.value[0], message="it is so")
    if reason is not None:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="longleaf"))
    trailers = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    error = decode_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers), "here")
    assert type(error) is kind
    assert str(error) == ("it is so" if kind is not LongleafError else f"{code.name}: it is so")


async def test_command_line_ignores_unknown_fields(
    later: LaterService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    terminal = Terminal(later.address, None, capsys)  # type: ignore[arg-type]
    later.say("Generate", STARTED, UNKNOWN, delta(0, 1, 2), UNKNOWN, finished())
    code, out, err = await terminal.run("ask", "book", "who?")
    assert (code, out) == (0, "bc\n")
    assert "for an unknown reason" in err
    code, out, _ = await terminal.run("ask", "book", "who?", "--json")
    assert (code, json.loads(out.splitlines()[-1])["finish_reason"]) == (0, "unspecified")
    (tmp_path / "book").write_text("grass")
    phases = [progress(phase, received_size_bytes=5) for phase in (VALUE, 1)]
    later.say("IngestContext", *phases, progress(VALUE, received_size_bytes=5, context=CONTEXT))
    code, out, err = await terminal.run("ingest", str(tmp_path / "book"), "--name", "book")
    assert (code, out.startswith("book: 3 tokens")) == (0, True)
    assert "working" in err
    later.say("GetContext", NEW.Context(**CONTEXT))
    code, out, _ = await terminal.run("contexts", "show", "book")
    assert (code, "unspecified" in out) == (0, False)


# --- a newer client ---


async def test_call_missing_in_an_older_service_is_made_once(later: LaterService, client: Both) -> None:
    with pytest.raises(LongleafError, match="does not implement this call of longleaf.v1") as caught:
        await client.call("cluster")
    assert (type(caught.value), later.num_lacking) == (LongleafError, 1)


REFUSED = [
    ("GenerationService/Generate", NEW.GenerateRequest(input_newer="x"), "input"),
    (
        "GenerationService/Generate",
        NEW.GenerateRequest(conversation={"messages": [{"role": VALUE, "parts": [{"text": "x"}]}]}),
        "conversation.messages[0].role",
    ),
    (
        "GenerationService/Generate",
        NEW.GenerateRequest(text="x", provenance={"ranking": VALUE}),
        "provenance.ranking",
    ),
    (
        "GenerationService/Generate",
        NEW.GenerateRequest(conversation={"messages": [{"role": 2, "parts": [{"kind_newer": "x"}]}]}),
        "conversation.messages[0].parts[0]",
    ),
    ("ContextService/IngestContext", NEW.IngestContextRequest(payload_newer="x"), "payload"),
    (
        "ContextService/UpdateContext",
        NEW.UpdateContextRequest(context={"name": "contexts/a", NEWER: "x"}, update_mask={"paths": [NEWER]}),
        "update_mask",
    ),
]


@pytest.mark.parametrize(("path", "request_", "field"), REFUSED, ids=[field for *_, field in REFUSED])
async def test_unsupported_field_of_a_newer_client_is_refused_by_name(
    service: Served, channel: grpc.aio.Channel, path: str, request_: Message, field: str
) -> None:
    call: Any = channel.stream_stream(f"/longleaf.v1.{path}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in call(iter([request_.SerializeToString()]))]
    error = decode_error(caught.value, "here")
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_fields_unknown_to_the_service_have_no_effect(service: Served, channel: grpc.aio.Channel) -> None:
    service.engine.answer = ((1, 2),)
    request = NEW.GenerateRequest(text="x", sampling={"top_k": 3, NEWER: "x"}, newer="x")
    call: Any = channel.unary_stream("/longleaf.v1.GenerationService/Generate")
    found = [service_pb.GenerateResponse.FromString(data) async for data in call(request.SerializeToString())]
    assert found[-1].finished.usage.completion_token_count == 2


def test_requests_have_no_other_enum() -> None:
    """A new enum must be decoded so that unknown values are refused by field name; then it belongs in the table of
    refused fields, and this list changes."""
    waiting, seen = [method.input_type for method in methods()], set()
    while waiting:
        message = waiting.pop()
        seen.add(message.full_name)
        enums = [field.full_name for field in message.fields if field.enum_type is not None]
        unread = {"longleaf.v1.Context.state", "google.protobuf.Value.null_value"}
        refused = {"longleaf.v1.Message.role", "longleaf.v1.Provenance.ranking"}
        assert set(enums) <= unread | refused, "no request is read for the former, the latter are in the list"
        waiting += [f.message_type for f in message.fields if f.message_type and f.message_type.full_name not in seen]
