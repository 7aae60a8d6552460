"""Constrained answers of a service as a user runs it: the clients, the command line, HTTP with OpenAI's package, many
random schemas, and the loss of a rank."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from longleaf.client import AsyncClient, Client
from longleaf.errors import InvalidArgument
from longleaf.types import Delta, Finished, json_schema, lark, regex
from tests.support.command_line import Served, url_of
from tests.support.random_schemas import random_schema
from tests.support.witness import Witness

SHARE_ACCEPTED = 0.95
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 12},
        "b": {"type": "integer", "minimum": 100000, "maximum": 999999},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Item(pydantic.BaseModel):
    kind: Literal["book", "letter"]
    pages: int = pydantic.Field(ge=1, le=999)


class Order(pydantic.BaseModel):
    items: list[Item] = pydantic.Field(min_length=1, max_length=2)
    is_paid: bool
    state: Literal["open", "closed"] | None


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Served]:
    options = ("--model", str(checkpoint), "--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000")
    with Served(*options, "--http", "0") as found:
        yield found
        assert found.stop() == 0


def text_of(events: Any) -> tuple[str, str]:
    text, reason = "", ""
    for event in events:
        text += event.text if isinstance(event, Delta) else ""
        reason = event.reason if isinstance(event, Finished) else reason
    return text, reason


def test_both_clients_send_constraints(service: Served) -> None:
    async def ask() -> str:
        async with AsyncClient(service.address) as client:
            events = client.generate("Answer.", constraint=lark('start: "yes" | "no"'))
            return "".join([event.text async for event in events if isinstance(event, Delta)])

    assert asyncio.run(ask()) in ("yes", "no")
    with Client(service.address) as client:
        text, reason = text_of(client.generate("A number.", constraint=regex(r"\d{3}-\d{2}")))
        assert re.fullmatch(r"\d{3}-\d{2}", text) and reason == "stop"
        with pytest.raises(InvalidArgument, match="uniqueItems") as caught:
            text_of(client.generate("x", constraint=json_schema({"type": "array", "uniqueItems": True})))
        assert caught.value.field == "constraint.json_schema"
        with pytest.raises(InvalidArgument, match="ignore_end_token"):
            text_of(client.generate("x", constraint=regex("a"), ignore_end_token=True))


def test_commands_take_constraints(service: Served, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    found = service.run("generate", "--prompt", "Colours.", "--json-schema", str(file), "--max-tokens", "300")
    jsonschema.validate(json.loads(found.stdout), SCHEMA)
    assert ", complete" in found.stderr
    found = service.run("generate", "--prompt", "Sure?", "--regex", "(yes|no)!")
    assert found.stdout in ("yes!\n", "no!\n")
    found = service.run("generate", "--prompt", "Sure?", "--regex", "(yes", "--json-object")
    assert found.returncode != 0 and "--regex: cannot be given together with --json-object" in found.stderr
    found = service.run("generate", "--prompt", "Sure?", "--regex", "(yes")
    assert found.returncode != 0 and "constraint.regex: " in found.stderr


def test_openai_package_parses_a_model(service: Served) -> None:
    client = openai.OpenAI(base_url=f"{url_of(service)}/v1", api_key="none")
    with client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": "Order."}],
            response_format=Order,
            max_tokens=600,
            temperature=1,
            seed=1,
        )
        assert isinstance(answer.choices[0].message.parsed, Order)
        assert answer.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(
            model=model,
            messages=[{"role": "user", "content": "Order."}],
            response_format=Order,
            max_tokens=600,
            n=2,
            temperature=1,
            seed=2,
        ) as stream:
            final = stream.get_final_completion()
        assert all(isinstance(choice.message.parsed, Order) for choice in final.choices)
        grammar: Any = {"type": "grammar", "syntax": "regex", "definition": "(left|right)"}
        text = client.completions.create(model=model, prompt="Turn", extra_body={"response_format": grammar})
        assert text.choices[0].text in ("left", "right")
        wanted: Any = {"type": "json_object"}
        spoken = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], response_format=wanted, max_tokens=40
        )
        assert (spoken.choices[0].message.content or "").startswith("{")
        refused: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError, match="not") as caught:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "x"}], response_format=refused
            )
        assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.extended
@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.extended)])
def test_answers_to_random_schemas_validate(service: Served, count: int) -> None:
    async def ask(client: AsyncClient, number: int, turns: asyncio.Semaphore) -> str:
        schema, text, reason = random_schema(number), "", ""
        options: Any = {"max_tokens": 250, "temperature": 0.9, "seed": number, "constraint": json_schema(schema)}
        async with turns:
            try:
                async for event in client.generate(f"Item {number}.", **options):
                    text += event.text if isinstance(event, Delta) else ""
                    reason = event.reason if isinstance(event, Finished) else reason
            except InvalidArgument:
                return "refused"
        if reason != "length":
            jsonschema.validate(json.loads(text), schema)
        return reason

    async def ask_all() -> list[str]:
        async with AsyncClient(service.address) as client:
            turns = asyncio.Semaphore(8)
            return await asyncio.gather(*(ask(client, number, turns) for number in range(count)))

    reasons = asyncio.run(ask_all())
    accepted = [reason for reason in reasons if reason != "refused"]
    assert len(accepted) >= SHARE_ACCEPTED * count
    assert sum(reason != "length" for reason in accepted) >= 0.9 * len(accepted)


@pytest.mark.extended
def test_constrained_answer_survives_the_loss_of_a_rank(checkpoint: Path) -> None:
    """Rank 0, whose sampler has the state of the grammar, and then the other one: the answer is that of before."""
    options = ("--model", str(checkpoint), "--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000")
    options_of: Any = {"constraint": json_schema(SCHEMA), "max_tokens": 400, "temperature": 0.8, "seed": 5}
    with Served(*options) as service, Client(service.address) as client, Witness(service.address) as observer:
        wanted, _ = text_of(client.generate("Colours.", **options_of))
        for rank in (0, 1):
            pid, text, reason = service.rank_pids()[rank], "", ""
            for event in client.generate("Colours.", **options_of):
                if isinstance(event, Delta):
                    if len(text) < 20 <= len(text + event.text):
                        os.kill(pid, signal.SIGKILL)
                    text += event.text
                reason = event.reason if isinstance(event, Finished) else reason
            assert (text, reason) == (wanted, "stop")
            jsonschema.validate(json.loads(text), SCHEMA)
            observer.healed(2, rank + 1)
        assert service.stop() == 0
