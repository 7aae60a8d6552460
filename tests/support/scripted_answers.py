"""A service behind a gateway whose model writes given answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from longleaf.client import AsyncClient
from tests.support.gateways import opened
from tests.support.service import END, FakeEngine, byte_tokenizer, serving

CONTROL = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>")
QUESTION: Any = [{"role": "user", "content": "Is it cold in Köln?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def vocabulary() -> FastTokenizer:
    found = byte_tokenizer()
    found.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])  # pyright: ignore[reportUnknownMemberType]
    return found


TOKENIZER = vocabulary()


class Scripted:
    """A service whose model writes the given answers, and a gateway in front of it."""

    def __init__(self, engine: FakeEngine, url: str, client: AsyncOpenAI, rpc: AsyncClient) -> None:
        self.engine, self.url, self.client, self.rpc = engine, url, client, rpc

    def writes(self, text: str, *, reason: Any = "end_token") -> None:
        """The next answer, three tokens at a time, with an end token."""
        token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        if reason == "end_token":
            end = TOKENIZER.token_to_id(END)
            assert end is not None
            token_ids.append(end)
        self.engine.answer = tuple(tuple(token_ids[i : i + 3]) for i in range(0, len(token_ids), 3))
        self.engine.reason = reason

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return TOKENIZER.decode(list(self.engine.prompts[-1].token_ids), skip_special_tokens=False)

    async def ask(self, messages: Any = QUESTION, **options: Any) -> ChatCompletion:
        answer = await self.client.chat.completions.create(model="fake", messages=messages, **options)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        return answer


@asynccontextmanager
async def scripted(folder: Path, template: str) -> AsyncIterator[Scripted]:
    engine = FakeEngine()
    async with (
        serving(engine, folder, template=template, vocabulary=vocabulary()) as (_, address),
        opened(address) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        AsyncClient(address, retries=0) as rpc,
    ):
        yield Scripted(engine, url, client, rpc)
