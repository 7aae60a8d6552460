"""OpenAI's Responses API over real sockets, with the openai package as the client."""

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent
from pydantic import BaseModel

from longleaf.errors import Unavailable
from tests.support.gateways import opened
from tests.support.scripted_answers import CALL, Scripted
from tests.support.service import FakeEngine, serving
from tests.support.tenants import ACME, BOLT, credential_of, credentials

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
QUESTION = "Is it cold in Köln?"
BODY: Any = {"model": "fake", "input": QUESTION}


async def create(hermes: Scripted, **fields: Any) -> Response:
    response = await hermes.client.responses.create(**BODY | fields)
    Response.model_validate(response.model_dump(by_alias=True), strict=True)
    return response


async def stream_of(hermes: Scripted, **fields: Any) -> list[Any]:
    """The events of a stream, whose types and numbers are checked."""
    stream = await hermes.client.responses.create(**BODY | fields, stream=True)
    events = [event async for event in stream]
    for number, event in enumerate(events):
        type(event).model_validate(event.model_dump(by_alias=True), strict=True)
        assert event.sequence_number == number
    return events


async def test_response_has_the_fields_of_its_type(hermes: Scripted) -> None:
    hermes.writes("No.")
    response = await create(
        hermes, instructions="Be short.", temperature=0.5, metadata={"a": "b"}, max_output_tokens=50, user="me"
    )
    assert (response.output_text, response.status, response.object) == ("No.", "completed", "response")
    assert (response.instructions, response.temperature, response.metadata) == ("Be short.", 0.5, {"a": "b"})
    assert response.usage is not None and response.usage.output_tokens == 4
    assert response.usage.total_tokens == response.usage.input_tokens + 4
    assert response.model_extra is not None and response.model_extra["exact"] is True
    assert "<|im_start|>system\nBe short.<|im_end|>" in hermes.prompt
    hermes.writes("No or", reason="length")
    cut = await create(hermes)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_stored_response_is_continued_read_and_deleted(hermes: Scripted) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}")
    first = await create(hermes, instructions="Be short.", tools=[WEATHER])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call: Any = first.output[2]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln"})
    hermes.writes("It is 3 degrees.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"celsius": 3}'}
    second = await create(hermes, input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "It is 3 degrees." and second.previous_response_id == first.id
    assert "Be short." not in hermes.prompt  # instructions are those of one request
    assert f"{QUESTION}<|im_end|>" in hermes.prompt and f"Let me see.\n{CALL}<|im_end|>" in hermes.prompt
    assert '<tool_response>\n{"celsius": 3}\n</tool_response>' in hermes.prompt
    read = await hermes.client.responses.retrieve(second.id)
    assert read == second
    await hermes.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as raised:
        await hermes.client.responses.retrieve(first.id)
    assert raised.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as raised:
        await create(hermes, previous_response_id=first.id)
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")
    hermes.writes("Yes.")
    await create(hermes, previous_response_id=second.id)  # it still has its whole conversation
    assert '<tool_response>\n{"celsius": 3}' in hermes.prompt and "It is 3 degrees.<|im_end|>" in hermes.prompt
    hermes.writes("No.")
    other = await create(hermes, previous_response_id=second.id, input="And in Rome?")  # a second branch
    assert "Yes." not in hermes.prompt and other.output_text == "No."


async def test_history_in_the_input_makes_the_same_prompt(hermes: Scripted) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}")
    first = await create(hermes, tools=[WEATHER])
    call: Any = first.output[2]
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "3"}],
    }
    hermes.writes("Yes.")
    await create(hermes, input=[result], previous_response_id=first.id, tools=[WEATHER])
    expected = hermes.prompt
    question = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    history: Any = [question, *(item.model_dump() for item in first.output), result]
    await create(hermes, input=history, tools=[WEATHER])
    assert hermes.prompt == expected


async def test_response_that_is_not_stored_is_unknown(hermes: Scripted) -> None:
    hermes.writes("No.")
    response = await create(hermes, store=False)
    with pytest.raises(openai.NotFoundError):
        await hermes.client.responses.retrieve(response.id)


async def test_streamed_events_match_the_types(hermes: Scripted) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}\n{CALL}")
    events = await stream_of(hermes, tools=[WEATHER])
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call", "function_call"]
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2, 3]
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    calls = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (thoughts, text, len(calls), calls[0].name) == ("They ask.", "Let me see.", 2, "get_weather")
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    assert [item.type for item in last.response.output] == added and last.response.usage is not None
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    assert await hermes.client.responses.retrieve(last.response.id) == last.response
    hermes.writes("No", reason="length")
    assert isinstance((await stream_of(hermes))[-1], ResponseIncompleteEvent)


async def test_stream_helper_and_parse(hermes: Scripted) -> None:
    class Answer(BaseModel):
        value: int

    hermes.writes('{"value": 3}')
    parsed = await hermes.client.responses.parse(model="fake", input=QUESTION, text_format=Answer)
    assert parsed.output_parsed == Answer(value=3)
    async with hermes.client.responses.stream(model="fake", input=QUESTION) as stream:
        final = await stream.get_final_response()
    assert final.output_text == '{"value": 3}'


async def test_other_owners_have_no_access(tmp_path: Path) -> None:
    engine = FakeEngine()
    served = serving(engine, tmp_path / "model", authenticator=credentials(tmp_path))
    async with served as (_, address), opened(address) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        acme, bolt = ({"authorization": f"Bearer {credential_of(tenant)}"} for tenant in (ACME, BOLT))
        made = await http.post("/v1/responses", json=BODY, headers=acme)
        path = f"/v1/responses/{made.json()['id']}"
        continued = BODY | {"previous_response_id": made.json()["id"]}
        assert (await http.get(path)).status_code == 401
        assert (await http.delete(path)).status_code == 401
        assert (await http.post("/v1/responses", json=BODY)).status_code == 401
        for other in (await http.get(path, headers=bolt), await http.delete(path, headers=bolt)):
            assert (other.status_code, other.json()["error"]["code"]) == (404, "response_not_found")
        assert (await http.post("/v1/responses", json=continued, headers=bolt)).status_code == 404
        assert (await http.get(path, headers=acme)).status_code == 200
        assert (await http.post("/v1/responses", json=continued, headers=acme)).status_code == 200
        assert (await http.delete(path, headers=acme)).json()["deleted"] is True


async def test_stored_responses_survive_a_restart_of_the_gateway(hermes: Scripted, tmp_path: Path) -> None:
    hermes.writes("No.")
    address, folder = hermes.rpc.server, str(tmp_path / "responses")
    async with opened(address, responses_dir=folder) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        first = (await http.post("/v1/responses", json=BODY)).json()
        second = (await http.post("/v1/responses", json=BODY | {"previous_response_id": first["id"]})).json()
        await http.delete(f"/v1/responses/{first['id']}")
    async with opened(address, responses_dir=folder) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        assert (await http.get(f"/v1/responses/{second['id']}")).json() == second
        assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 404
        await http.post("/v1/responses", json=BODY | {"previous_response_id": second["id"]})
        assert hermes.prompt.count(QUESTION) == 3


async def test_late_error_ends_the_stream(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes("Yes.")
    hermes.engine.late_error = Unavailable("the rank was lost")
    with pytest.raises(openai.APIError) as raised:
        await stream_of(hermes)
    assert raised.value.code == "unavailable"
    answer = await http.post("/v1/responses", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_client_that_vanishes_ends_the_generation(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes("Yes.")
    hermes.engine.is_endless = True
    async with http.stream("POST", "/v1/responses", json=BODY | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if "output_text.delta" in line:
                break
    await hermes.engine.streams[-1].closed.wait()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "robot"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "none", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}], "instructions": "x"},
            "input[0].arguments",
        ),
        ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "input[1].role"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"description": "x" * (1 << 20)}]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "robot"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "robot"}}}}, "text.format.schema"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_invalid_requests_name_the_field(http: httpx2.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/responses", json=BODY | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"]


async def test_harmless_fields_are_ignored_with_a_warning(hermes: Scripted, http: httpx2.AsyncClient) -> None:
    hermes.writes("Yes.")
    fields = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "background": False}
    answer = await http.post("/v1/responses", json=BODY | fields | {"truncation": "disabled", "top_logprobs": 0})
    assert answer.headers["longleaf-warning"] == "ignored: include, reasoning.summary"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"model": "fake"}', b'{"model": "fake", "input": null}'])
async def test_bodies_that_are_no_requests_are_refused(http: httpx2.AsyncClient, content: bytes) -> None:
    answer = await http.post("/v1/responses", content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
