"""Messages and errors survive the wire."""

import math
from array import array
from base64 import b64encode
from types import SimpleNamespace
from typing import Any, cast, get_args
from urllib.parse import quote

import msgspec
import pytest

from longleaf import codec
from longleaf.codec.status import encode_error
from longleaf.config import MAX_DRAFT_TOKENS
from longleaf.errors import (
    AlreadyExists,
    ContextLost,
    InvalidArgument,
    LongleafError,
    ModelRefused,
    NotFinite,
    NotFound,
    RankLost,
    ResourceExhausted,
    StartError,
    Unavailable,
)
from longleaf.rank_protocol.group_messages import MergeTiming
from longleaf.sampling import Logprobs, SamplingParams, TokenLogprob
from longleaf.tenants import DEFAULT_TENANT
from longleaf.types import (
    Attribution,
    Cluster,
    Context,
    ContextSettings,
    Conversation,
    Delta,
    Drafting,
    Event,
    Finished,
    FinishReason,
    ForkContext,
    Generate,
    IngestHeader,
    IngestPhase,
    IngestPiece,
    IngestProgress,
    Loss,
    Message,
    ModelInfo,
    PositionInfo,
    Progress,
    Provenance,
    RankShare,
    RecomputeResult,
    Recovering,
    Recovery,
    Resume,
    SkippedContext,
    SlotState,
    Source,
    Started,
    Storage,
    Timings,
    Usage,
    Worker,
)
from longleaf.v1 import cluster_service_pb2 as cluster_pb
from longleaf.v1 import context_pb2 as context_pb
from longleaf.v1 import context_service_pb2 as ingest_pb
from longleaf.v1 import generation_pb2 as generation_pb
from longleaf.v1 import generation_service_pb2 as service_pb

CONTEXT = Context(
    "moby", 12, 768, 1.5, 2.25, (RankShare(0, 5, 320), RankShare(1, 7, 448)), "The whale", 4.5, True, is_exact=True
)
FAR = PositionInfo(
    capacity=1 << 40, rope="yarn", precision="float64", scaled_for=5, phase_error=1e-9, is_beyond_trained=True
)
SETTINGS = [
    ContextSettings(),
    ContextSettings(display_name="", is_pinned=False, expires=None),
    ContextSettings(display_name="Grüße", expires=1.5),
    ContextSettings(is_pinned=True, ttl=0.25),
]


@pytest.mark.parametrize(
    "event",
    [
        Started(5, 3),
        Started(5, 3, 2, "a.B-c_9"),
        Started(5, 3, 2, "a.B-c_9", True),
        Started(5, 3, 2, "a.B-c_9", is_exact=True),
        Started(5, 3, 2, "a.B-c_9", exactness_note="not verified"),
        Started(5, 3, 2, "a.B-c_9", is_exact=True, dequantization="fp8 checkpoint, computed in bfloat16"),
        Finished("stop", exactness_note="not verified"),
        Finished("stop", is_exact=True, dequantization="fp8 checkpoint, computed in bfloat16"),
        Progress(3, 5),
        Recovering(3, 5, 9),
        Recovering(0, 0, 0),
        Delta(7, (1, 2), "Grüße 🦙"),
        Delta(7, (1, 2), "ab", (Logprobs(-0.5, (TokenLogprob(1, -0.5),)), Logprobs(-math.inf, ())), 3),
        Delta(
            7, (1,), "\xe9", (Logprobs(-0.5, (TokenLogprob(1, -0.5, b"\xc3"), TokenLogprob(2, -1.0, b"")), b"\xc3"),)
        ),
        Finished("stop", "END", Usage(5, 3, 9), Timings(0.5, 1.25, 2.5, 0.75), 2, True),
        Finished("length", usage=Usage(5, 3, 9, 40, 7)),
        Finished("end_token"),
        Finished("stop_token"),
        Finished("length"),
    ],
)
def test_events_survive(event: Event) -> None:
    data = codec.encode_event(event).SerializeToString()
    assert codec.decode_event(service_pb.GenerateResponse.FromString(data)) == event


def test_finish_reasons_have_wire_values() -> None:
    names = {reason: codec.encode_event(Finished(reason)).finished.finish_reason for reason in get_args(FinishReason)}
    wanted = {reason: f"FINISH_REASON_{reason.upper()}" for reason in names}
    assert {reason: generation_pb.FinishReason.Name(number) for reason, number in names.items()} == wanted


def test_contexts_survive() -> None:
    data = codec.encode_context(CONTEXT).SerializeToString()
    assert codec.decode_context(context_pb.Context.FromString(data)) == CONTEXT


@pytest.mark.parametrize(
    "fork", [ForkContext("moby", "ahab"), ForkContext("a", "b", 0), ForkContext("a", "b", -(2**63))]
)
def test_forks_survive(fork: ForkContext) -> None:
    data = codec.encode_fork(fork).SerializeToString()
    assert codec.decode_fork(ingest_pb.ForkContextRequest.FromString(data)) == fork


@pytest.mark.parametrize(
    "recomputed",
    [
        RecomputeResult(contexts=(), skipped=()),
        RecomputeResult(
            contexts=(Context(id="a", tokens=3, kv_bytes=0, created=1.5, updated=2.5, shares=()),),
            skipped=(SkippedContext("b", "its tokenizer is another one — 白鯨"),),
        ),
    ],
)
def test_recompute_results_survive(recomputed: RecomputeResult) -> None:
    data = codec.encode_recompute(recomputed).SerializeToString()
    assert codec.decode_recompute(ingest_pb.RecomputeContextsResponse.FromString(data)) == recomputed


def test_invalid_forks_name_the_field() -> None:
    good = {"name": "contexts/a", "new_name": "contexts/b"}
    for field, value in (("name", ""), ("name", "a"), ("new_name", ""), ("new_name", "contexts/-b")):
        with pytest.raises(InvalidArgument) as caught:
            codec.decode_fork(ingest_pb.ForkContextRequest(**{**good, field: value}))
        assert caught.value.field == field
    with pytest.raises(InvalidArgument) as caught:
        codec.encode_fork(ForkContext("a", "b", 2**63))
    assert caught.value.field == "token_count"


@pytest.mark.parametrize(
    "piece",
    [
        IngestHeader("moby"),
        IngestHeader("moby", True, 0),
        IngestHeader("a", False, 5, "id", SETTINGS[3]),
        IngestHeader("a", True, None, "", SETTINGS[0], priority=-100, client="a client"),
        IngestHeader("a", settings=ContextSettings(capacity=1 << 40)),
        b"\xff\x00",
        (1, 2),
    ],
)
def test_ingest_pieces_survive(piece: IngestPiece) -> None:
    data = codec.encode_ingest_piece(piece).SerializeToString()
    decoded = codec.decode_ingest_piece(ingest_pb.IngestContextRequest.FromString(data))
    assert (tuple(decoded) if isinstance(decoded, array) else decoded) == piece


@pytest.mark.parametrize(
    ("fields", "words"), [({"capacity_token_count": 0}, "not positive"), ({"append": True}, "is only for new contexts")]
)
def test_invalid_capacity_is_named(fields: dict[str, Any], words: str) -> None:
    config = {"name": "contexts/a", "capacity_token_count": 5} | fields
    with pytest.raises(InvalidArgument, match=words) as caught:
        codec.decode_ingest_piece(ingest_pb.IngestContextRequest(config=config))
    assert caught.value.field == "config.capacity_token_count"


def test_capacity_cannot_be_changed_or_exceed_its_field() -> None:
    with pytest.raises(InvalidArgument, match="fixed when a context is created"):
        codec.encode_update("moby", ContextSettings(capacity=5))
    with pytest.raises(InvalidArgument, match="out of range"):
        codec.encode_ingest_piece(IngestHeader("a", settings=ContextSettings(capacity=2**63)))


def test_positions_survive() -> None:
    context = msgspec.structs.replace(CONTEXT, positions=FAR)
    data = codec.encode_context(context).SerializeToString()
    assert codec.decode_context(context_pb.Context.FromString(data)) == context


@pytest.mark.parametrize("settings", SETTINGS)
def test_changes_survive(settings: ContextSettings) -> None:
    data = codec.encode_update("moby", settings).SerializeToString()
    assert codec.decode_update(ingest_pb.UpdateContextRequest.FromString(data)) == ("moby", settings)


@pytest.mark.parametrize("phase", [phase for phase in get_args(IngestPhase) if phase != "unspecified"])
def test_ingest_progress_survives(phase: Any) -> None:
    progress = IngestProgress(
        phase=phase,
        received_bytes=5,
        received_tokens=2,
        processed=3,
        total=9,
        tokens_per_second=2.5,
        context=CONTEXT,
        recovering=Recovering(1, 2, 3) if phase == "recovering" else None,
    )
    message = codec.encode_ingest_progress(progress)
    assert codec.decode_ingest_progress(message) == progress
    assert ingest_pb.IngestPhase.Name(message.phase) == f"INGEST_PHASE_{phase.upper()}"


def test_clusters_survive() -> None:
    workers = tuple(
        Worker(rank=rank, node="here", pid=7, device="cpu", tokens=1, max_tokens=2, kv_bytes=3, kernels=kernels)
        for rank, kernels in enumerate(("compiled", "dense"))
    )
    cluster = Cluster(
        model=ModelInfo(
            name="m", architecture="A", dtype="f", max_context_tokens=4, vocabulary_size=5, rope="yarn", kv_dtype="g"
        ),
        workers=workers,
        world_size=2,
        epoch=1,
        launcher="ray",
        merge="auto",
        transport="gloo",
        merge_timings=(
            MergeTiming(1, "gather", {"gather": 1.5, "paper": 3.0}),
            MergeTiming(8, "paper", {"paper": 2.0}),
        ),
        waiting=8,
        running=9,
        window_keys="replicated",
        window_tokens=10,
        max_window_tokens=11,
        states=12,
        max_states=13,
        state_bytes=2**40,
        is_exact=True,
        exactness_note="not verified",
        dequantization="fp8 checkpoint, computed in bfloat16",
        recovery=Recovery(
            epoch=2, lost_tokens=9, recovered_tokens=5, seconds=0.25, is_done=True, dropped_contexts=("a", "b")
        ),
        losses=(
            Loss(time=1.5, member=2, rank=0, epoch=1, node="here", reason="killed", slot="waiting", retry_time=9.5),
            Loss(
                time=2.5, member=7, rank=None, epoch=0, node="", reason="", slot="abandoned", slot_reason="three times"
            ),
        ),
        storage=Storage(snapshots="seal", url="s3://bucket", error="it is away"),
        drafting=Drafting(drafted_tokens=2**40, accepted_tokens=9, tokens_per_step=1.25),
    )
    data = codec.encode_cluster(cluster).SerializeToString()
    assert codec.decode_cluster(cluster_pb.Cluster.FromString(data)) == cluster


@pytest.mark.parametrize("slot", get_args(SlotState))
def test_slot_states_have_wire_values(slot: SlotState) -> None:
    loss = Loss(time=1.5, member=2, rank=0, epoch=1, node="here", reason="killed", slot=slot)
    model = ModelInfo(name="m")
    cluster = Cluster(model=model, workers=(), world_size=2, epoch=1, launcher="", merge="", losses=(loss,))
    [message] = codec.encode_cluster(cluster).losses
    assert cluster_pb.SlotState.Name(message.slot_state) == f"SLOT_STATE_{slot.upper()}"
    assert codec.decode_cluster(codec.encode_cluster(cluster)).losses == (loss,)
    decoded = codec.decode_cluster(codec.encode_cluster(cluster))
    assert (decoded.recovery, decoded.storage) == (None, None)


SAMPLING = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    logit_bias={0: -100.0, 7: 1.5},
    seed=2**64 - 1,
    stop=("a", "ü"),
    stop_tokens=(0, 9),
    ignore_end_token=True,
    num_logprobs=20,
)


@pytest.mark.parametrize(
    "request_",
    [
        Generate(input="x", sampling=SAMPLING),
        Generate(
            input=array("I", [1, 2]),
            context="moby",
            sampling=SamplingParams(seed=5, num_logprobs=0),
            with_token_bytes=True,
            num_samples=16,
            request_id="a" * 128,
            resume_seconds=600.0,
            priority=-100,
            client="c" * 256,
        ),
        Generate(
            input="x",
            context="moby",
            sampling=SAMPLING,
            provenance=Provenance(
                span_tokens=32, num_spans=64, layers=(0, 7), per_token=True, ranking="contrast", confirm=True
            ),
            hidden=((0, 3), (3, 5), (9, 2**62)),
        ),
        Generate(input="x", context="moby", sampling=SAMPLING, provenance=Provenance()),
        Generate(input="x", sampling=SAMPLING, max_draft_tokens=0),
        Generate(input="x", sampling=SAMPLING, max_draft_tokens=MAX_DRAFT_TOKENS),
    ],
)
def test_requests_survive(request_: Generate) -> None:
    sampling: Any = {name: getattr(request_.sampling, name) for name in SamplingParams.__struct_fields__}
    values = msgspec.structs.asdict(request_) | sampling
    assert values.pop("tenant") == DEFAULT_TENANT  # the service knows it; it does not travel
    resumption = {name: values.pop(name) for name in ("request_id", "resume_seconds")}
    data = codec.encode_generate(values.pop("input"), values.pop("context"), values, **resumption).SerializeToString()
    assert codec.decode_generate(service_pb.GenerateRequest.FromString(data), 42) == request_


@pytest.mark.parametrize(
    "options",
    [
        {"provenance": Provenance(num_spans=65)},
        {"provenance": Provenance(span_tokens=2**40)},
        {"provenance": Provenance(layers=(-1,))},
        {"provenance": Provenance(ranking=cast(Any, "best"))},
        {"hidden": [(0, 2**63)]},
        {"max_draft_tokens": -1},
        {"max_draft_tokens": 2**40},
    ],
)
def test_values_outside_their_field_are_refused_before_sending(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="provenance|hidden|max_draft_token_count"):
        codec.encode_generate("x", "moby", cast(Any, options))


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": f"ROLE_{role.upper()}", "parts": [{"text": text}]} for role, text in turns]}


QUERY, REPLY = ("user", "Who?"), ("assistant", "I.")


@pytest.mark.parametrize(
    ("turns", "context", "error"),
    [
        ((), "", r"conversation\.messages: has 0 messages; allowed are 1 to 512"),
        ((QUERY,) * 513, "", r"conversation\.messages: has 513 messages"),
        ((QUERY, REPLY), "", r"messages\[1\]\.role: has the role assistant; the last message must have the role user"),
        ((("user", ""), REPLY, QUERY), "", r"messages\[0\]\.parts: have no text"),
        ((REPLY, QUERY), "contexts/book", r"messages\[0\]\.role: .* the first message after the context"),
        ((("unspecified", ""), QUERY), "", r"messages\[0\]\.role: is missing"),
    ],
)
def test_service_validates_conversations_of_any_client(turns: Any, context: str, error: str) -> None:
    request = service_pb.GenerateRequest(conversation=conversation(*turns), context=context)
    with pytest.raises(InvalidArgument, match=error):
        codec.decode_generate(request, 42)


def test_system_messages_may_precede_the_first_turn_after_a_context() -> None:
    turns = (("system", "Be short."), ("system", ""), QUERY, REPLY, QUERY)
    decoded = codec.decode_generate(
        service_pb.GenerateRequest(conversation=conversation(*turns), context="contexts/book"), 42
    )
    assert isinstance(decoded, Generate)
    assert decoded.input == Conversation(tuple(Message(role, text) for role, text in cast(Any, turns)))


SOURCES = (
    Source(token_start=64, token_end=128, share=0.5, largest_share=1.0, largest_layer=3, largest_head=11),
    Source(
        token_start=0,
        token_end=64,
        share=0.25,
        largest_share=0.75,
        largest_layer=0,
        largest_head=0,
        contrast=-0.125,
        drop=-(2.0**-40),
        bytes=(0, 2**40),
        file="a.txt",
    ),
)
ATTRIBUTION = Attribution(
    sources=SOURCES, context_share=0.5, prompt_share=0.25, answer_share=0.125, sink_share=0.125, num_tokens=3
)


@pytest.mark.parametrize("attribution", [None, Attribution(), ATTRIBUTION])
def test_attributions_survive(attribution: Attribution | None) -> None:
    for event in (Delta(3, (7,), "x", attribution=attribution), Finished("length", attribution=attribution)):
        data = codec.encode_event(event).SerializeToString()
        assert codec.decode_event(service_pb.GenerateResponse.FromString(data)) == event


def test_resume_request_needs_only_its_id() -> None:
    resume = Resume("abc", 17)
    assert codec.decode_generate(codec.encode_resume(resume), 42) == resume


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sample_count": 0}, "sample_count"),
        ({"sample_count": 17}, "sample_count"),
        ({"max_draft_token_count": -1}, "max_draft_token_count"),
        ({"max_draft_token_count": MAX_DRAFT_TOKENS + 1}, "max_draft_token_count"),
        ({"request_id": "a/b"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"request_id": "a", "resume_token_index": -1}, "resume_token_index"),
        ({"resume_token_index": 0}, "request_id"),
        ({"resume_duration": {"seconds": 601}}, "resume_duration"),
        ({"resume_duration": {"seconds": -(2**63)}}, "resume_duration"),
        ({"resume_duration": {"nanos": -1}}, "resume_duration"),
        ({"priority": 101}, "priority"),
        ({"return_token_bytes": True}, "return_token_bytes"),
        ({"return_token_bytes": True, "sampling": {"top_k": 1}}, "return_token_bytes"),
        ({"priority": -(2**31)}, "priority"),
        ({"client_id": "ü" * 129}, "client_id"),
        ({"provenance": {"span_token_count": 16}}, "provenance.span_token_count"),
        ({"provenance": {"span_token_count": 96}}, "provenance.span_token_count"),
        ({"provenance": {"span_token_count": -64}}, "provenance.span_token_count"),
        ({"provenance": {"span_count": 0}}, "provenance.span_count"),
        ({"provenance": {"span_count": 65}}, "provenance.span_count"),
        ({"provenance": {"layers": [1] * 4097}}, "provenance.layers"),
        ({"provenance": {"ranking": 3}}, "provenance.ranking"),
        ({"hidden": [{"token_start": 1, "token_end": 1}]}, "hidden[0]"),
        ({"hidden": [{"token_start": -1, "token_end": 1}]}, "hidden[0]"),
        ({"hidden": [{"token_end": 3}, {"token_start": 2, "token_end": 5}]}, "hidden[1]"),
        ({"hidden": [{"token_start": 5, "token_end": 6}, {"token_end": 2}]}, "hidden[1]"),
        ({"hidden": [{"token_start": i, "token_end": i + 1} for i in range(1025)]}, "hidden"),
        ({"sampling": {"min_p": 1.5}}, "sampling.min_p"),
        ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": math.inf}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": math.nan}}, "sampling.frequency_penalty"),
        ({"sampling": {"logit_bias": {1: math.nan}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {-1: 0.5}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 0.5)}}, "sampling.logit_bias"),
        ({"sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids"),
        ({"sampling": {"stop_token_ids": [1] * 65}}, "sampling.stop_token_ids"),
        ({"sampling": {"logprob_count": 21}}, "sampling.logprob_count"),
        ({"sampling": {"logprob_count": -1}}, "sampling.logprob_count"),
    ],
    ids=str,
)
def test_field_out_of_range_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_generate(service_pb.GenerateRequest(**({"text": "x"} | fields)), 42)
    assert caught.value.field == field


class Uncounted(list[int]):
    """Has a length, and cannot be read."""

    def __iter__(self) -> Any:
        raise AssertionError("it was converted before it was counted")

    __getitem__ = keys = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize(("field", "limit"), [("stop", 16), ("stop_token_ids", 64), ("logit_bias", 1024)])
def test_collections_are_counted_before_they_are_converted(field: str, limit: int) -> None:
    fields = {"stop": [], "stop_token_ids": [], "logit_bias": {}} | {field: Uncounted([1] * (limit + 1))}
    with pytest.raises(InvalidArgument, match=rf"sampling\.{field}: must be at most {limit}"):
        codec.decode_sampling(cast(Any, SimpleNamespace(**fields)), 42)


def test_ids_and_paths_are_counted_before_they_are_converted() -> None:
    ids = SimpleNamespace(ids=Uncounted([1, 2, 3]))
    with pytest.raises(InvalidArgument, match="token_ids: has 3 ids; the limit is 2"):
        codec.decode_ids(cast(Any, ids), 2)
    update = SimpleNamespace(update_mask=SimpleNamespace(paths=Uncounted([1] * 17)))
    with pytest.raises(InvalidArgument, match="update_mask: has 17 paths; the limit is 16"):
        codec.decode_update(cast(Any, update))


def test_zero_is_a_value_and_a_missing_field_is_a_default() -> None:
    assert codec.decode_sampling(generation_pb.SamplingParams(), 42) == SamplingParams(seed=42)
    zeros = codec.encode_sampling({"seed": 0, "top_k": 0, "temperature": 0.0, "ignore_end_token": False})
    assert zeros.HasField("seed")
    assert codec.decode_sampling(zeros, 42) == SamplingParams(seed=0)
    with pytest.raises(InvalidArgument, match="max_token_count"):
        codec.decode_sampling(codec.encode_sampling({"max_tokens": 0}), 42)


def test_missing_fields_use_defaults_of_the_service() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert codec.decode_sampling(generation_pb.SamplingParams(), 42, defaults) == msgspec.structs.replace(
        defaults, seed=42
    )
    given = codec.encode_sampling({"temperature": 0.0, "top_k": 0, "seed": 1, "stop": ["x"]})
    wanted = SamplingParams(repetition_penalty=1.1, seed=1, stop=("x",))
    assert codec.decode_sampling(given, 42, defaults) == wanted


def test_negative_ids_name_their_index() -> None:
    message = ingest_pb.IngestContextRequest(token_ids={"ids": [1, 2, -3]})
    with pytest.raises(InvalidArgument, match="-3 is negative") as caught:
        codec.decode_ingest_piece(message)
    assert caught.value.field == "token_ids.ids[2]"


def test_integers_are_limited_by_their_wire_type() -> None:
    wrong = {"stop_tokens": [2**31], "logit_bias": {2**31: 1.0}, "num_logprobs": 2**31, "stop": [1]}
    for field, value in ({"seed": 2**64, "top_k": 2**31, "max_tokens": "many"} | wrong).items():
        with pytest.raises(InvalidArgument, match="sampling"):
            codec.encode_sampling({field: value})  # type: ignore[misc]


@pytest.mark.parametrize("name", ["a", "moby", "a.b_c-d", "0", "a" * 63])
def test_valid_names_are_accepted(name: str) -> None:
    assert codec.context_id(codec.context_name(name)) == name
    assert codec.context_name(f"contexts/{name}") == f"contexts/{name}"


@pytest.mark.parametrize(
    "name", ["", "moby", "contexts/", "contexts/A", "contexts/-a", "contexts/a-", "contexts/a/b", "contexts/a\n"]
)
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        codec.context_id(name, "config.name")
    assert caught.value.field == "config.name"


def test_long_name_is_truncated_in_the_message() -> None:
    with pytest.raises(InvalidArgument) as caught:
        codec.context_id("contexts/" + "a" * 10**6)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("x" * 10_000, "✝" * 10_000),
        NotFound("contexts/" + "ü" * 10_000),
        NotFound("€" * 10_000),
        AlreadyExists("contexts/" + "a" * 10_000),
        ResourceExhausted("pool", "x" * 10_000, 1.5),
        RankLost(3, "\ud800" * 10_000),
        NotFinite("x" * 10_000),
        ContextLost("contexts/" + "ü" * 10_000, "\ud800" * 10_000),
        Unavailable("x" * 10_000),
        StartError("x" * 10_000),
        ModelRefused("x" * 10_000),
        LongleafError("x" * 10_000),
    ],
    ids=lambda error: type(error).__name__,
)
def test_statuses_stay_small_enough_for_headers(error: LongleafError) -> None:
    status = encode_error(error)
    message, details = quote(status.message, safe=" "), b64encode(status.SerializeToString())
    assert len(message) + len(details) < 7_500, "below 8 KiB, with space for other trailers of a response"
