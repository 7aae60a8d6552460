"""Constrained tool calls of a random model, on ranks that compute, behind the gateway."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from openai import AsyncOpenAI
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from longleaf.client import AsyncClient
from longleaf.errors import InvalidArgument
from longleaf.types import Conversation, Delta, Message, regex
from tests.support.chat_templates import HARMONY, HERMES
from tests.support.golden.behind_gateway import behind_gateway
from tests.support.service import END, byte_tokenizer

QUESTION: Any = [{"role": "user", "content": "Is it cold?"}]
MARKERS = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>")
PLAIN = HERMES.replace("think>", "thought>")
"""Without reasoning, which a random model would not end."""


def tool(name: str, properties: dict[str, Any], *, strict: bool = False) -> Any:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


CITY = {"type": "string", "enum": ["Köln", "Rome"]}
TOOLS = [tool("get_weather", {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}}), tool("stop", {})]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}


def make_random(folder: Path, template: str) -> Path:
    """A model with random weights, whose answers are arbitrary."""
    fast = byte_tokenizer()
    fast.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])  # pyright: ignore[reportUnknownMemberType]
    fast.add_tokens([AddedToken(each, special=False, normalized=False) for each in ("<tool_call>", "</tool_call>")])  # pyright: ignore[reportUnknownMemberType]
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=fast.get_vocab_size(),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        eos_token_id=fast.token_to_id(END),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Service:
    """A service behind a gateway, and clients of both."""

    def __init__(self, client: AsyncOpenAI, rpc: AsyncClient, model: str, marker: int) -> None:
        """`marker` is the id of the token before a call."""
        self.client, self.rpc, self._model, self.marker = client, rpc, model, marker

    async def ask(self, **options: Any) -> Any:
        return await self.client.chat.completions.create(
            model=self._model, messages=QUESTION, temperature=1.0, **{"max_tokens": 200} | options
        )


@asynccontextmanager
async def serving_random(folder: Path, template: str) -> AsyncIterator[Service]:
    async with behind_gateway(make_random(folder, template)) as found, AsyncClient(found.address) as rpc:
        yield Service(found.client, rpc, found.model, found.tokenizer.vocabulary_size - 2)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving_random(tmp_path / "model", PLAIN) as found:
        yield found


def check(calls: Any) -> list[str]:
    """The names of the calls, whose arguments are valid."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


async def test_random_model_always_calls_a_tool_if_required(service: Service) -> None:
    names = set[str]()
    for seed in range(2):
        answer = await service.ask(tools=TOOLS, tool_choice="required", seed=seed, n=4)
        for choice in answer.choices:
            message = choice.message
            if choice.finish_reason == "tool_calls":
                assert message.tool_calls and message.content is None
                names |= {*check(message.tool_calls)}
            else:  # cut off
                assert choice.finish_reason == "length"
    assert names == {*SCHEMAS}
    answer = await service.ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4, seed=7)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert len(check(choice.message.tool_calls)) == 1
    open_tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    [cut] = (await service.ask(tools=[open_tool], tool_choice="required", max_tokens=8, seed=3)).choices
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)


async def test_named_tool_is_called_once_in_a_stream(service: Service) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    for seed in range(2):
        stream = await service.ask(tools=TOOLS, tool_choice=choice, seed=seed, stream=True)
        chunks = [chunk async for chunk in stream]
        deltas = [each for chunk in chunks for each in chunk.choices]
        pieces = [piece for each in deltas for piece in each.delta.tool_calls or ()]
        assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"]
        arguments = "".join(piece.function.arguments or "" for piece in pieces)
        jsonschema.validate(json.loads(arguments), SCHEMAS["get_weather"])
        assert "".join(each.delta.content or "" for each in deltas) == ""
        assert [each.finish_reason for each in deltas if each.finish_reason] == ["tool_calls"]


async def test_strict_tools_leave_text_possible(service: Service) -> None:
    strict = [tool("get_weather", {"city": CITY}, strict=True)]
    answer = await service.ask(tools=strict, seed=1, max_tokens=40)
    assert answer.choices[0].finish_reason in ("length", "stop")  # a random model does not write the marker
    assert answer.choices[0].message.content
    bias = {str(service.marker): 50}
    answer = await service.ask(tools=strict, seed=1, parallel_tool_calls=False, logit_bias=bias)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in CITY["enum"]


async def test_strict_tools_and_a_format_of_the_answer(service: Service) -> None:
    """The answer is a call, or JSON that the other schema accepts."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kinds = set[str]()
    answer = await service.ask(tools=[*TOOLS, tool("go", {}, strict=True)], response_format=form, n=6, seed=1)
    for choice in answer.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
    assert "stop" in kinds and kinds <= {"stop", "tool_calls", "length"}


async def test_harmony_calls_a_tool_if_required(tmp_path: Path) -> None:
    async with serving_random(tmp_path / "model", HARMONY.replace("<|end|>", "<|call|>")) as harmony:
        with pytest.raises(openai.BadRequestError) as raised:  # the end token of this tokenizer is a marker
            await harmony.ask(tools=TOOLS, tool_choice="required")
        assert raised.value.param == "tools" and "<|end|> ends an answer" in raised.value.message


async def test_unsupported_combinations_are_refused_by_name(service: Service) -> None:
    unique, impossible = {"x": {"type": "array", "uniqueItems": True}}, {"x": {"not": {}}}
    other: Any = {"type": "function", "function": {"name": "x"}}
    json_object: Any = {"type": "json_object"}
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": unique["x"]}}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": other, "tools": TOOLS}, "tool_choice", "x is not in tools"),
        ({"tools": [TOOLS[0], tool("f", unique, strict=True)]}, "tools[1].function.parameters", "uniqueItems"),
        (
            {"tool_choice": "required", "tools": [tool("f", impossible, strict=True)]},
            "tools[0].function.parameters",
            "not",
        ),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": json_object}, "response_format", "required"),
        (
            {"tools": [tool("f", {}, strict=True)], "response_format": wrong},
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
    ]
    for options, param, words in cases:
        with pytest.raises(openai.BadRequestError, match=words) as raised:
            await service.ask(**options)
        assert raised.value.param == param
    # a schema that cannot be honoured leaves any object, unless it is strict
    loose = tool("f", unique)
    answer = await service.ask(tools=[loose], tool_choice="required", parallel_tool_calls=False, max_tokens=40)
    assert answer.choices[0].finish_reason in ("tool_calls", "length")


async def test_grpc_requires_calls(service: Service) -> None:
    conversation = Conversation((Message("user", "Is it cold?"),))
    options: Any = {"tools": TOOLS, "parse_answer": True, "max_tokens": 300, "temperature": 1.0, "seed": 1}
    for wanted in ({"require_tool_call": True, "single_tool_call": True}, {"required_tool": "stop"}):
        events = [event async for event in service.rpc.generate(conversation, **options | wanted)]
        (call,) = [call for event in events if isinstance(event, Delta) for call in event.tool_calls]
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert call.name == "stop"
    with pytest.raises(InvalidArgument) as raised:
        [event async for event in service.rpc.generate(conversation, **options, required_tool="x")]
    assert raised.value.field == "required_tool"
    strict = {"tools": [tool("f", {}, strict=True)]}
    with pytest.raises(InvalidArgument) as raised:
        [event async for event in service.rpc.generate(conversation, **options | strict, constraint=regex("a"))]
    assert raised.value.field == "constraint"
