"""Conversion of generation requests and the events of their streams."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.struct_pb2 import Struct

from longleaf.codec.conversation import decode_conversation, encode_conversation
from longleaf.codec.derived import Wire, derive, derive_union
from longleaf.codec.names import (
    BytesLike,
    check_range,
    check_utf8,
    context_id,
    context_name,
    decode_ids,
    encode_ids,
    is_sequence,
    to_text,
)
from longleaf.codec.provenance import decode_hidden, decode_provenance, encode_hidden, encode_provenance
from longleaf.codec.sampling import decode_sampling, encode_sampling
from longleaf.codec.scheduling_options import decode_scheduling, encode_scheduling
from longleaf.codec.times import decode_seconds, encode_duration
from longleaf.config import MAX_DRAFT_TOKENS
from longleaf.errors import InvalidArgument
from longleaf.sampling import GREEDY, SamplingParams
from longleaf.types import (
    JSON_OBJECT,
    Constraint,
    Conversation,
    Delta,
    Finished,
    Generate,
    GenerateOptions,
    Progress,
    Recovering,
    Resume,
    Started,
    Timings,
)
from longleaf.types.tools import MAX_TOOL_BYTES, check_tools, parse_json
from longleaf.v1 import generation_pb2 as generation_pb
from longleaf.v1 import generation_service_pb2 as service_pb

MAX_SAMPLES = 16
MAX_RESUME_SECONDS = 600.0
TEMPLATE_KWARGS = "chat_template_kwargs"
MAX_TEMPLATE_KWARGS = 16 << 10
"""Encoded bytes."""
TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables that the service itself passes to templates."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def _microseconds(duration: str) -> Wire:
    return Wire(duration, encode_duration, decode_seconds)


derive(
    Timings,
    generation_pb.Timings,
    queue_seconds=_microseconds("queue_duration"),
    first_token_seconds=_microseconds("first_token_duration"),
    decode_seconds=_microseconds("decode_duration"),
    prefill_seconds=_microseconds("prefill_duration"),
)
derive(Started, generation_pb.Started, is_beyond_trained="beyond_trained_length")
derive(Progress, generation_pb.Progress)
derive(Recovering, generation_pb.Recovering)
derive(Delta, generation_pb.Delta, index="token_index")
derive(Finished, generation_pb.Finished, reason="finish_reason")
encode_event, decode_event = derive_union(
    service_pb.GenerateResponse, "event", Started, Progress, Recovering, Delta, Finished
)


def encode_generate(
    input: str | BytesLike | Iterable[int] | Conversation,
    context: str | None,
    options: GenerateOptions,
    *,
    request_id: str = "",
    resume_seconds: float = 0.0,
) -> service_pb.GenerateRequest:
    """`request_id` and `resume_seconds` replace those of `options`, because a client generates an id to resume with.
    Raises InvalidArgument when a value does not fit its field."""
    template_kwargs, provenance = options.get("chat_template_kwargs"), options.get("provenance")
    most_drafts, constraint = options.get("max_draft_tokens"), options.get("constraint")
    resume_seconds = check_range("resume_duration", resume_seconds, 0.0, MAX_RESUME_SECONDS, " seconds")
    message = service_pb.GenerateRequest(
        context=context_name(context) if context is not None else "",
        sampling=encode_sampling(options),
        use_chat_template=options.get("use_chat_template"),
        chat_template_kwargs=_encode_template_kwargs(template_kwargs) if template_kwargs else None,
        tools=_encode_tools(options.get("tools", ())),
        parse_answer=options.get("parse_answer", False),
        single_tool_call=options.get("single_tool_call", False),
        require_tool_call=options.get("require_tool_call", False),
        required_tool=check_utf8(options.get("required_tool", ""), "required_tool"),
        return_token_bytes=options.get("with_token_bytes", False),
        until_full=options.get("until_full", False),
        sample_count=check_range("sample_count", options.get("num_samples", 1), 1, MAX_SAMPLES),
        provenance=None if provenance is None else encode_provenance(provenance),
        hidden=encode_hidden(options.get("hidden", ())),
        max_draft_token_count=None if most_drafts is None else _draft_count(most_drafts),
        constraint=None if constraint is None else _encode_constraint(constraint),
        request_id=_request_id(request_id) if request_id else "",
        resume_duration=encode_duration(resume_seconds) if resume_seconds else None,
    )
    if isinstance(input, str | BytesLike):
        message.text = to_text(input, "text")
    elif isinstance(input, Conversation):
        message.conversation.CopyFrom(encode_conversation(input))
    elif is_sequence(input):
        message.token_ids.CopyFrom(encode_ids(input))
    else:
        raise InvalidArgument(
            "input", f"{type(input).__name__} is neither text, a sequence of token ids nor a conversation"
        )
    encode_scheduling(options.get("priority", 0), options.get("client", ""), message)
    return message


def encode_resume(resume: Resume) -> service_pb.GenerateRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    index = check_range("resume_token_index", resume.token_index, 0, 2**63 - 1)
    return service_pb.GenerateRequest(request_id=_request_id(resume.request_id), resume_token_index=index)


def encode_cancel(request_id: str) -> service_pb.CancelGenerationRequest:
    """Raises InvalidArgument when a value does not fit its field."""
    return service_pb.CancelGenerationRequest(request_id=_request_id(request_id))


def decode_cancel(message: service_pb.CancelGenerationRequest) -> str:
    """The generation's id. Raises InvalidArgument naming the field."""
    return _request_id(message.request_id)


def decode_generate(
    message: service_pb.GenerateRequest, random_seed: int, defaults: SamplingParams = GREEDY
) -> Generate | Resume:
    """`random_seed` and `defaults` replace missing sampling parameters. Raises InvalidArgument naming the field."""
    if message.HasField("resume_token_index"):
        index = check_range("resume_token_index", message.resume_token_index, 0, 2**63 - 1)
        return Resume(_request_id(message.request_id), index)
    priority, client = decode_scheduling(message)
    if message.return_token_bytes and not message.sampling.HasField("logprob_count"):
        raise InvalidArgument("return_token_bytes", "needs sampling.logprob_count: bytes come with logprobs")
    if message.until_full and message.sampling.HasField("max_token_count"):
        raise InvalidArgument("until_full", "cannot be given together with sampling.max_token_count")
    if message.HasField("constraint") and message.sampling.ignore_end_token:
        raise InvalidArgument("sampling.ignore_end_token", "cannot be set together with constraint")
    if message.single_tool_call and not message.parse_answer:
        raise InvalidArgument("single_tool_call", "needs parse_answer")
    duration = decode_seconds(message.resume_duration)
    return Generate(
        input=_decode_input(message),
        context=context_id(message.context, "context") if message.context else None,
        use_chat_template=message.use_chat_template if message.HasField("use_chat_template") else None,
        chat_template_kwargs=_decode_template_kwargs(message),
        tools=_decode_tools(message),
        parse_answer=message.parse_answer,
        single_tool_call=message.single_tool_call,
        require_tool_call=message.require_tool_call,
        required_tool=message.required_tool,
        sampling=decode_sampling(message.sampling, random_seed, defaults),
        with_token_bytes=message.return_token_bytes,
        until_full=message.until_full,
        num_samples=_sample_count(message),
        provenance=decode_provenance(message.provenance) if message.HasField("provenance") else None,
        hidden=decode_hidden(message),
        max_draft_tokens=_max_draft_tokens(message),
        constraint=_decode_constraint(message),
        request_id=_request_id(message.request_id) if message.request_id else "",
        resume_seconds=check_range("resume_duration", duration, 0.0, MAX_RESUME_SECONDS, " seconds"),
        priority=priority,
        client=client,
    )


def _encode_constraint(constraint: Constraint) -> service_pb.Constraint:
    """Raises InvalidArgument for a text that is missing, not UTF-8, or longer than the limit."""
    constraint.check()
    if constraint.kind == "json_object":
        return service_pb.Constraint(json_object=Empty())
    message = service_pb.Constraint()
    setattr(message, constraint.kind, check_utf8(constraint.text, constraint.field))
    return message


def _decode_constraint(message: service_pb.GenerateRequest) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    kind = message.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("constraint", "give json_schema, json_object, regex or lark")
    constraint = JSON_OBJECT if kind == "json_object" else Constraint(kind, getattr(message.constraint, kind))
    constraint.check()
    return constraint


def _encode_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Raises InvalidArgument naming the field."""
    checked = check_tools(list(map(dict, tools)))
    try:
        return [_without_surrogates(json.dumps(tool, ensure_ascii=False, allow_nan=False)) for tool in checked]
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("tools", f"cannot be sent: {error}") from None


def _decode_tools(message: service_pb.GenerateRequest) -> tuple[dict[str, Any], ...]:
    """Raises InvalidArgument naming the field."""
    if not message.tools:
        return ()
    if message.WhichOneof("input") != "conversation":
        raise InvalidArgument("tools", "require a conversation")
    if (size := sum(len(tool.encode()) for tool in message.tools)) > MAX_TOOL_BYTES:
        raise InvalidArgument("tools", f"have {size:,} bytes; the limit is {MAX_TOOL_BYTES:,}")
    try:
        tools = [parse_json(tool) for tool in message.tools]
        for tool, text in zip(tools, message.tools, strict=True):
            if "\\u" in text:
                _without_surrogates(json.dumps(tool, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("tools", f"are not valid JSON: {error}") from None
    return check_tools(tools)


def _without_surrogates(text: str) -> str:
    """The text. Raises ValueError for lone surrogates, which cannot be encoded."""
    text.encode()
    return text


def _encode_template_kwargs(given: Mapping[str, Any]) -> Struct:
    """Raises InvalidArgument for values that JSON cannot represent."""
    found = Struct()
    try:
        ParseDict(dict(given), found)
    except (ParseError, TypeError, ValueError) as error:
        raise InvalidArgument(TEMPLATE_KWARGS, f"cannot be sent: {error}") from None
    return found


def _decode_template_kwargs(message: service_pb.GenerateRequest) -> dict[str, Any]:
    if not message.HasField(TEMPLATE_KWARGS):
        return {}
    if (size := message.chat_template_kwargs.ByteSize()) > MAX_TEMPLATE_KWARGS:
        raise InvalidArgument(TEMPLATE_KWARGS, f"has {size:,} bytes; the limit is {MAX_TEMPLATE_KWARGS:,}")
    if message.WhichOneof("input") == "token_ids" or (
        message.HasField("use_chat_template") and not message.use_chat_template
    ):
        raise InvalidArgument(TEMPLATE_KWARGS, "requires an input that uses the chat template")
    for name in message.chat_template_kwargs.fields:
        if not name.isidentifier() or name in TEMPLATE_NAMES:
            raise InvalidArgument(TEMPLATE_KWARGS, f"has {name!r}, which is reserved")
    try:
        return _with_integers(MessageToDict(message.chat_template_kwargs))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(TEMPLATE_KWARGS, f"is not valid JSON: {error}") from None


def _with_integers(value: Any) -> Any:
    """Converts integral floats back to integers: Struct has no integers, and a template would render 5 as 5.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in cast(dict[str, Any], value).items()}
    return [_with_integers(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def _decode_input(message: service_pb.GenerateRequest) -> str | Sequence[int] | Conversation:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return decode_ids(message.token_ids)
        case "conversation":
            if message.HasField("use_chat_template") and not message.use_chat_template:
                raise InvalidArgument("use_chat_template", "must be on for a conversation")
            return decode_conversation(message.conversation, has_context=bool(message.context))
        case _:
            raise InvalidArgument("input", "give text, token_ids or conversation")


def _sample_count(message: service_pb.GenerateRequest) -> int:
    return check_range("sample_count", message.sample_count, 1, MAX_SAMPLES) if message.HasField("sample_count") else 1


def _max_draft_tokens(message: service_pb.GenerateRequest) -> int | None:
    return _draft_count(message.max_draft_token_count) if message.HasField("max_draft_token_count") else None


def _draft_count(count: int) -> int:
    return check_range("max_draft_token_count", count, 0, MAX_DRAFT_TOKENS)


def _request_id(text: str) -> str:
    if _REQUEST_ID.fullmatch(text) is None:
        raise InvalidArgument("request_id", "must be 1 to 128 characters of a-z, A-Z, 0-9, '.', '_', '-'")
    return text
