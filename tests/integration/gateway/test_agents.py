"""The OpenAI Agents SDK as a client of a gateway."""

from typing import Any

import pytest

from tests.support.scripted_answers import CALL, Scripted

agents = pytest.importorskip("agents", reason="openai-agents is not installed")
agents.set_tracing_disabled(True)


def agent_of(hermes: Scripted) -> Any:
    @agents.function_tool(strict_mode=False)
    def get_weather(city: str) -> str:
        """The weather in a city."""
        hermes.writes("It is 3 degrees.")
        return f"{city}: 3 degrees"

    model = agents.OpenAIResponsesModel(model="fake", openai_client=hermes.client)
    return agents.Agent(name="weather", instructions="Be short.", model=model, tools=[get_weather])


async def test_agent_runs_tools_and_continues_a_response(hermes: Scripted) -> None:
    hermes.writes(f"Let me see.\n{CALL}")
    agent = agent_of(hermes)
    first = await agents.Runner.run(agent, "Is it cold in Köln?")
    assert first.final_output == "It is 3 degrees." and "Köln: 3 degrees" in hermes.prompt
    hermes.writes("Yes.")
    second = await agents.Runner.run(agent, "Are you sure?", previous_response_id=first.last_response_id)
    assert second.final_output == "Yes."
    # the last response continues the items that the agent sent, which end with the result of the call
    assert "Köln: 3 degrees" in hermes.prompt and "Are you sure?" in hermes.prompt


async def test_agent_streams(hermes: Scripted) -> None:
    hermes.writes(CALL)
    result = agents.Runner.run_streamed(agent_of(hermes), "Is it cold in Köln?")
    kinds = [event.type async for event in result.stream_events()]
    assert result.final_output == "It is 3 degrees." and "run_item_stream_event" in kinds
