"""Anthropic's Messages API over real sockets."""

import json
from typing import Any

import httpx2
import pytest

from longleaf.errors import ResourceExhausted, Unavailable
from tests.support.scripted_answers import CALL, Scripted

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION: Any = [{"role": "user", "content": "Is it cold in Köln?"}]
BODY: Any = {"model": "fake", "max_tokens": 200, "messages": QUESTION}


async def post(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/messages", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are checked."""
    answer = await http.post("/v1/messages", json=BODY | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    found = list[dict[str, Any]]()
    for block in filter(None, answer.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_message_has_text_usage_and_the_stop_reason(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes("No.")
    answer = await post(http, system=[{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}])
    assert answer["content"] == [{"type": "text", "text": "No."}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fake")
    assert (answer["stop_reason"], answer["stop_sequence"], answer["exact"]) == ("end_turn", None, True)
    assert answer["usage"]["input_tokens"] > 0 and answer["usage"]["output_tokens"] == 4
    assert answer["usage"]["cache_read_input_tokens"] == 0
    assert "<|im_start|>system\nBe short.\n\nBe kind." in hermes.prompt
    hermes.writes("No or yes", reason="length")
    assert (await post(http))["stop_reason"] == "max_tokens"
    hermes.writes("No or yes")
    stopped = await post(http, stop_sequences=[" or"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " or")
    assert stopped["content"] == [{"type": "text", "text": "No"}]


async def test_tool_use_and_its_result_make_a_round_trip(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}")
    answer = await post(http, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    thinking, text, call = answer["content"]
    assert answer["stop_reason"] == "tool_use"
    assert thinking == {"type": "thinking", "thinking": "They ask.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Köln"})
    definition = {"name": "get_weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert json.dumps({"type": "function", "function": definition}, ensure_ascii=False) in hermes.prompt
    hermes.writes("It is 3 degrees.")
    cached = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3 °C"}], **cached}
    failed = {"type": "tool_result", "tool_use_id": call["id"], "content": "no wind", "is_error": True}
    last = {"role": "user", "content": [result, failed, {"type": "text", "text": "And now?", **cached}]}
    history = [*QUESTION, {"role": "assistant", "content": answer["content"]}, last]
    assert (await post(http, messages=history, tools=[WEATHER]))["content"][0]["text"] == "It is 3 degrees."
    assert f"Let me see.\n{CALL}<|im_end|>" in hermes.prompt
    assert "<tool_response>\n3 °C\n</tool_response>" in hermes.prompt
    assert "<tool_response>\nError: no wind\n</tool_response>" in hermes.prompt
    assert "<|im_start|>user\nAnd now?<|im_end|>" in hermes.prompt


async def test_stream_has_one_block_for_each_part(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}\n{CALL}")
    found = await events(http, tools=[WEATHER])
    assert [each["type"] for each in found[:2]] == ["message_start", "ping"]
    assert found[0]["message"]["content"] == [] and found[0]["message"]["usage"]["input_tokens"] > 0
    starts = [each for each in found if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [each["index"] for each in starts] == [0, 1, 2, 3]
    assert [each["index"] for each in found if each["type"] == "content_block_stop"] == [0, 1, 2, 3]
    deltas = [(each["index"], each["delta"]) for each in found if each["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for index, delta in deltas if index == 0) == "They ask."
    assert "".join(delta.get("text", "") for index, delta in deltas if index == 1) == "Let me see."
    arguments = ["".join(delta.get("partial_json", "") for at, delta in deltas if at == index) for index in (2, 3)]
    assert [json.loads(each) for each in arguments] == [{"city": "Köln"}] * 2
    last, stop = found[-2:]
    assert (last["type"], last["delta"]["stop_reason"], stop) == ("message_delta", "tool_use", {"type": "message_stop"})
    assert last["usage"]["output_tokens"] > 0 and last["exact"]


async def test_thinking_is_switched_and_may_be_omitted(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes("Now.\n</think>\n\nYes.")
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    answer = await http.post("/v1/messages", json=BODY | {"thinking": thinking, "service_tier": "auto"})
    assert hermes.prompt.endswith("<think>\n")
    assert answer.json()["content"] == [{"type": "text", "text": "Yes."}]
    assert answer.headers["longleaf-warning"] == "ignored: service_tier, thinking.budget_tokens"
    hermes.writes("Yes.")
    await post(http, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert not hermes.prompt.endswith("<think>\n") and "Effort: low" in hermes.prompt


async def test_context_is_named_by_the_model(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.engine.contexts["book"] = [1, 2]
    hermes.writes("Yes.")
    answer = await post(http, model="fake:book")
    assert (answer["model"], hermes.engine.prompts[-1].context) == ("fake:book", "book")
    assert answer["usage"]["cache_read_input_tokens"] == 1  # the last token is read again


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: give"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "x"}], "system": "s"}, "messages[1].role"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x"},
                            {"type": "tool_result", "tool_use_id": "none", "content": "3"},
                        ],
                    }
                ],
                "system": "s",
            },
            "messages[0].tool_use_id",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0]"),
        ({"tools": [{"name": "a", "input_schema": {}, "description": "x" * (1 << 20)}]}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "robot"}}, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "robot"}}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"robot": 1}, "robot"),
    ],
)
async def test_invalid_requests_name_the_field(http: httpx2.AsyncClient, fields: dict[str, Any], message: str) -> None:
    answer = await http.post("/v1/messages", json=BODY | fields)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), body
    assert body["error"]["message"].startswith(message), body


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b"[]", 400, "invalid_request_error"),
        (b"\xff", 400, "invalid_request_error"),
        (b'{"model": "fake", "model": "fake"}', 400, "invalid_request_error"),
        (b'{"model": "none", "messages": [{"role": "user", "content": "x"}]}', 404, "not_found_error"),
        (b"[" * 60_000, 413, "request_too_large"),
    ],
)
async def test_bodies_that_are_no_requests_get_typed_errors(
    http: httpx2.AsyncClient, content: bytes, status: int, kind: str
) -> None:
    answer = await http.post("/v1/messages", content=content)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)


async def test_errors_of_routes_and_the_service_have_anthropics_format(
    hermes: Scripted, http: httpx2.AsyncClient
) -> None:
    for answer, status, kind in (
        (await http.get("/v1/messages"), 405, "invalid_request_error"),
        (await http.get("/v1/messages/none"), 404, "not_found_error"),
        (await http.post("/v1/messages", json=BODY, headers={"host": "evil.example"}), 421, "invalid_request_error"),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), answer.text
    hermes.engine.error = ResourceExhausted("blocks", "full", 3.0)
    answer = await http.post("/v1/messages", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    hermes.engine.error = None
    hermes.engine.late_error = Unavailable("the rank was lost")
    hermes.writes("Yes.")
    *_, last = await events(http)
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


async def test_client_that_vanishes_ends_the_generation(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes("Yes.")
    hermes.engine.is_endless = True
    async with http.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if "text_delta" in line:
                break
    await hermes.engine.streams[-1].closed.wait()
