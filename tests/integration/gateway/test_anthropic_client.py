"""The anthropic package as a client of a gateway."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.gateway.test_anthropic import QUESTION, WEATHER
from tests.support.scripted_answers import CALL, Scripted

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
REQUEST: Any = {"model": "fake", "max_tokens": 200, "messages": QUESTION}


@pytest.fixture
async def client(hermes: Scripted) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=hermes.url, api_key="none", max_retries=0) as client:
        yield client


async def test_message_matches_the_types(hermes: Scripted, client: Any) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}")
    message = await client.messages.create(**REQUEST, tools=[WEATHER])
    anthropic.types.Message.model_validate(message.model_dump(exclude={"content"}) | {"content": []}, strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"city": "Köln"} and message.stop_reason == "tool_use"
    hermes.writes("It is 3 degrees.")
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "3"}
    history = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    last = await client.messages.create(**REQUEST | {"messages": history}, tools=[WEATHER])
    assert last.content[0].text == "It is 3 degrees." and "<tool_response>\n3\n" in hermes.prompt


async def test_stream_helper_accumulates_blocks(hermes: Scripted, client: Any) -> None:
    hermes.writes(f"<think>\nThey ask.\n</think>\nLet me see.\n{CALL}")
    async with client.messages.stream(**REQUEST, tools=[WEATHER]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    thinking, block, call = message.content
    assert (thinking.thinking, block.text, text) == ("They ask.", "Let me see.", "Let me see.")
    assert (call.name, call.input, message.stop_reason) == ("get_weather", {"city": "Köln"}, "tool_use")
    assert message.usage.output_tokens > 0 and message.usage.input_tokens > 0


async def test_tool_runner_calls_functions(hermes: Scripted, client: Any) -> None:
    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        hermes.writes("It is 3 degrees.")
        return f"{city}: 3 degrees"

    hermes.writes(CALL)
    runner = client.beta.messages.tool_runner(**REQUEST, tools=[get_weather])
    message = await runner.until_done()
    assert message.content[0].text == "It is 3 degrees." and "Köln: 3 degrees" in hermes.prompt


async def test_errors_have_the_types_of_the_package(hermes: Scripted, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**REQUEST | {"model": "claude"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as invalid:
        await client.messages.create(**REQUEST, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert "tools[0].type" in invalid.value.api_message
    hermes.writes("Yes.")
    hermes.engine.reason = "length"
    message = await client.messages.create(**REQUEST, metadata={"user_id": "x" * 300})
    assert message.stop_reason == "max_tokens"
