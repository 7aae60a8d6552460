"""A service without ranks: the real servicers and tokenizer on an engine with scripted answers."""

import asyncio
import copy
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders as decoding

from coordinator import engine_messages
from coordinator.auth.tenant_usage import Room, TenantUsage
from coordinator.change_feed import ChangeCounter
from coordinator.grpc_server.server import GrpcServer
from coordinator.handlers.application import Application
from coordinator.kv_cache.positions import Positions
from coordinator.telemetry.observers import NO_OBSERVERS
from coordinator.text.encoder import Encoder
from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.client import AsyncClient
from longleaf.config import join_address
from longleaf.document_text import DocumentText
from longleaf.errors import AlreadyExists, LongleafError, NotFound
from longleaf.positions import Rotary
from longleaf.rank_protocol.verdict import Verification
from longleaf.sampling import GREEDY, SamplingParams, Token
from longleaf.tenants import DEFAULT_TENANT, tenant_of
from longleaf.types import (
    Cluster,
    Context,
    ContextSettings,
    Delta,
    Drafting,
    Event,
    Finished,
    Loss,
    ModelInfo,
    Progress,
    RankShare,
    RecomputeResult,
    Recovery,
    SkippedContext,
    Worker,
)
from tests.support.fakes.echo_model import FULL_LAYER, echo_attention, echo_scores, echo_spans
from tests.support.fakes.transfer_engine import FakeTransferEngine

END = "<|end|>"
TEMPLATE = (
    "{{ bos_token }}<|user|>{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
SPECIAL = ("<|begin|>", END, "<|user|>", "<|model|>", "<|separator|>")
_LOADED: dict[tuple[tuple[str, bytes], ...], Tokenizer] = {}
"""Tokenizers by the names and contents of their files."""


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> FastTokenizer:
    """Byte-level BPE: ids 0-255 are bytes in the alphabet's order, then merges, then the special tokens."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = FastTokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoding.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def write_model(folder: Path, tokenizer: FastTokenizer | None = None, template: str | None = TEMPLATE) -> Path:
    """A model folder without weights."""
    tokenizer = tokenizer or byte_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.token_to_id(END),
    }
    settings = {"bos_token": {"content": "<|begin|>"}, "chat_template": template}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Folders with equal files share all but their path: most tests serve the same
    model, and loading takes 17 ms."""
    key = tuple((path.name, path.read_bytes()) for path in sorted(folder.glob("*.*")) if path.is_file())
    if key not in _LOADED:
        _LOADED[key] = Tokenizer.load(folder, DirectRenderer())
    tokenizer = copy.copy(_LOADED[key])
    tokenizer.checkpoint = msgspec.structs.replace(tokenizer.checkpoint, folder=folder)
    return tokenizer


class FakeStream:
    """Yields its events, then fails, waits for its release, or ends."""

    def __init__(self, script: Sequence[engine_messages.Event], error: LongleafError | None, is_endless: bool) -> None:
        self._script = list(script)
        self._error = error
        self._is_endless = is_endless
        self.on_release: Callable[[], None] = lambda: None
        self.released = asyncio.Event()
        self.closed = asyncio.Event()
        self.cancelled: list[int] = []

    def __aiter__(self) -> AsyncIterator[engine_messages.Event]:
        return self

    async def __anext__(self) -> engine_messages.Event:
        if self._script:
            return self._script.pop(0)
        if self._error is not None:
            raise self._error
        if self._is_endless:
            await self.released.wait()
            self.on_release()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()

    def cancel_sample(self, sample: int) -> None:
        self.cancelled.append(sample)


class FakeEngine:
    """Answers every prompt with `answer` (ids), or with `error`; keeps contexts as lists of ids."""

    def __init__(self) -> None:
        self.max_positions = 4096
        self.limit_name = "the length that it was trained for"
        self.exactness_note = self.scaling = self.dequantization = ""
        self.max_draft_tokens = 7
        self.total_tokens = 1 << 20
        self.answer: tuple[tuple[int, ...], ...] = ()
        self.script: tuple[engine_messages.Event, ...] = ()
        """The events of streams after Started and Progress, instead of `answer`."""
        self.interlude: tuple[engine_messages.Event, ...] = ()
        """The events of ingests between their halves."""
        self.reason: engine_messages.EndReason = "length"
        self.error: Exception | None = None
        """Raised at once by submit and ingest."""
        self.late_error: LongleafError | None = None
        """Raised by streams after their first events."""
        self.is_endless = False
        self.comparison = Verification()
        """Of prompts that are compared."""
        self.prompts: list[engine_messages.Prompt] = []
        self.schedulings: list[engine_messages.SchedulingParams] = []
        """Of ingests."""
        self.contexts: dict[str, list[int]] = {}
        self.settings: dict[str, ContextSettings] = {}
        self.texts: dict[str, DocumentText | None] = {}
        """Of contexts of one document."""
        self.earlier: dict[str, list[int] | LongleafError] = {}
        """Contexts of an earlier checkpoint, or why they cannot be read."""
        self.created = 1.5
        self.streams: list[FakeStream] = []
        self.opened = asyncio.Event()
        self.changes = ChangeCounter()
        self.running = 3
        self.recovery: Recovery | None = None
        self.losses: tuple[Loss, ...] = ()
        self.drafting: Drafting | None = None
        self.looked = asyncio.Event()

    def check_capacity(self, declared: int) -> None:
        Positions(Rotary(), self.max_positions).check_capacity(declared)

    def _stream(self, script: Sequence[engine_messages.Event]) -> FakeStream:
        stream = FakeStream(script, self.late_error, self.is_endless)
        self.streams.append(stream)
        self.opened.set()
        return stream

    def submit(self, prompt: engine_messages.Prompt) -> FakeStream:
        self.prompts.append(prompt)
        if self.error is not None:
            raise self.error
        resident = len(self.get_context(prompt.context).shares) if prompt.context else 0
        num_prompt = resident + len(prompt.token_ids)
        spans = echo_spans((0,), self.num_tokens(prompt.context or ""), prompt.cuts.size) if prompt.cuts else []
        if prompt.is_probe:
            scores = echo_scores(prompt.token_ids[-prompt.num_scored :] if prompt.num_scored else (), prompt.hidden)
            attention = echo_attention(spans, prompt.hidden, num_prompt - 1) if spans else None
            found = engine_messages.ProbeResult(scores, attention)
            return self._stream([engine_messages.Ended("length", num_prompt, resident, 0, 0.0, 0.0, 0.0, found=found)])
        script: list[engine_messages.Event] = [
            engine_messages.Admitted(num_prompt, resident),
            Progress(num_prompt, num_prompt),
        ]
        index = 0
        for token_ids in self.answer:
            reported = tuple(echo_attention(spans, (), num_prompt + index + i) for i in range(len(token_ids)))
            script.append(engine_messages.Tokens(index, tokens(token_ids), 0, reported if spans else ()))
            index += len(token_ids)
        script += self.script
        if not self.is_endless and self.late_error is None and not self.script:
            comparison = self.comparison if prompt.is_compared else None
            script.append(
                engine_messages.Ended(self.reason, num_prompt, resident, index, 0.5, 1.5, 2.25, 0, comparison)
            )
        return self._stream(script)

    def ingest(self, document: engine_messages.DocumentPrompt) -> FakeStream:
        context, token_ids = document.context, document.token_ids
        self.schedulings.append(document.scheduling)
        if self.error is not None:
            raise self.error
        if not document.append and context in self.contexts:
            raise AlreadyExists(f"contexts/{context}")
        total = len(token_ids)
        stream = self._stream([Progress(total // 2, total), *self.interlude, Progress(total, total)])
        stream.on_release = lambda: self._acknowledge(context, token_ids, document.settings)
        if not self.is_endless and self.late_error is None:
            self._acknowledge(context, token_ids, document.settings)
        self.texts[context] = None if context in self.texts else document.text
        return stream

    def _acknowledge(self, context: str, token_ids: Sequence[int], settings: ContextSettings) -> None:
        self.contexts.setdefault(context, []).extend(token_ids)
        self.settings.setdefault(context, settings)

    def answer_room(self, context: str | None, num_tokens: int, num_samples: int, *, is_whole: bool = True) -> int:
        resident = len(self.contexts[context]) if context is not None else 0
        return min(self.max_positions - resident - num_tokens, self.total_tokens // num_samples)

    def scaling_note(self, context: str | None, num_tokens: int, max_tokens: int, *, is_whole: bool = True) -> str:
        return self.scaling

    def attribution_context(self, context_id: str) -> engine_messages.AttributionContext:
        token_ids = self.get_context(context_id) and self.contexts[context_id]
        return engine_messages.AttributionContext(
            segments=(1,),
            ends=(len(token_ids),),
            num_opening=4,
            owner=self,
            block_size=128,
            full_layers=(FULL_LAYER,),
        )

    def num_tokens(self, context_id: str) -> int:
        return self.get_context(context_id).tokens

    def text_parts(self, context_id: str) -> list[engine_messages.DocumentPart]:
        self.get_context(context_id)
        resident = array("I", self.contexts[context_id])
        return [
            engine_messages.DocumentPart(token_ids=resident, num_tokens=len(resident), text=self.texts.get(context_id))
        ]

    def last_upload_id(self, context_id: str) -> str:
        self.get_context(context_id)
        return ""

    def get_context(self, context_id: str) -> Context:
        if context_id not in self.contexts:
            raise NotFound(f"contexts/{context_id}")
        size = len(self.contexts[context_id])
        given = self.settings.get(context_id, ContextSettings())
        return Context(
            id=context_id,
            tokens=size,
            kv_bytes=size * 64,
            created=self.created,
            updated=2.5,
            shares=(RankShare(0, size, size * 64),),
            display_name=given.display_name or "",
            expires=given.expires or None,
            is_pinned=bool(given.is_pinned),
            is_exact=not self.exactness_note,
            exactness_note=self.exactness_note,
            dequantization=self.dequantization,
        )

    def usage(self, tenant: str) -> TenantUsage:
        own = [ids for name, ids in self.contexts.items() if tenant_of(name) == tenant]
        running = sum(not stream.closed.is_set() for stream in self.streams)
        return TenantUsage(contexts=len(own), tokens=sum(map(len, own)), running=running)

    def storage_bytes(self, tenant: str) -> int:
        return 0

    def list_contexts(
        self, after: str = "", limit: int | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> list[Context]:
        own = (name for name in sorted(self.contexts) if tenant_of(name) == tenant)
        return [self.get_context(name) for name in own if name > after][:limit]

    async def fork_context(self, source: str, context_id: str, num_tokens: int | None = None) -> Context:
        self.get_context(source)
        if context_id in self.contexts:
            raise AlreadyExists(f"contexts/{context_id}")
        self.contexts[context_id] = self.contexts[source][:num_tokens]
        return self.get_context(context_id)

    def place_before(self, context_id: str, position: int) -> int:
        """Its contexts can be forked anywhere."""
        self.get_context(context_id)
        return position

    async def recompute_context(self, context_id: str, vocabulary_size: int, room: Room) -> Context:
        assert vocabulary_size == BYTES.get_vocab_size()
        if context_id in self.contexts:
            raise AlreadyExists(f"contexts/{context_id}")
        found = self.earlier.get(context_id, NotFound(f"contexts/{context_id}"))
        if isinstance(found, LongleafError):
            raise found
        with room(len(found)):
            await asyncio.sleep(0)  # it is kept
            self.contexts[context_id] = found
        return self.get_context(context_id)

    async def recompute_contexts(self, vocabulary_size: int, tenant: str, room: Room) -> RecomputeResult:
        contexts, skipped = list[Context](), list[SkippedContext]()
        for name in sorted(name for name in self.earlier if tenant_of(name) == tenant):
            try:
                contexts.append(await self.recompute_context(name, vocabulary_size, room))
            except LongleafError as error:
                skipped.append(SkippedContext(name, str(error)))
        return RecomputeResult(contexts=tuple(contexts), skipped=tuple(skipped))

    async def update_context(self, context_id: str, settings: ContextSettings) -> Context:
        self.get_context(context_id)
        self.settings[context_id] = settings
        return self.get_context(context_id)

    async def delete_context(self, context_id: str) -> None:
        self.get_context(context_id)
        del self.contexts[context_id]
        self.settings.pop(context_id, None)

    def describe(self) -> Cluster:
        return self.cluster()

    def cluster(self) -> Cluster:
        self.looked.set()
        if self.error is not None:
            raise self.error
        model = ModelInfo(
            name="fake",
            architecture="LlamaForCausalLM",
            dtype="float32",
            max_context_tokens=4096,
            vocabulary_size=BYTES.get_vocab_size(),
        )
        worker = Worker(
            rank=0,
            node="here",
            pid=4711,
            device="cpu",
            tokens=12,
            max_tokens=1 << 20,
            kv_bytes=768,
            max_kv_bytes=64 << 20,
            kernels="compiled",
        )
        return Cluster(
            model=model,
            workers=(worker,),
            world_size=1,
            epoch=1,
            launcher="local",
            merge="auto",
            waiting=2,
            running=self.running,
            block_size=128,
            is_exact=not self.exactness_note,
            exactness_note=self.exactness_note,
            dequantization=self.dequantization,
            recovery=self.recovery,
            losses=self.losses,
            drafting=self.drafting,
        )


@asynccontextmanager
async def serving(
    engine: FakeEngine,
    folder: Path,
    host: str = "127.0.0.1",
    transfers: FakeTransferEngine | None = None,
    sampling_defaults: SamplingParams = GREEDY,
    template: str = TEMPLATE,
    vocabulary: FastTokenizer | None = None,
    **options: Any,
) -> AsyncGenerator[tuple[GrpcServer, str], None]:
    """The service on its own port; gives the server and its address. `options` are the server's; its observers also
    observe generations.
    """
    tokenizer = load_tokenizer(write_model(folder, vocabulary, template))
    observers = options.get("observers", NO_OBSERVERS)
    application = Application(
        cast(Any, engine),
        tokenizer,
        engine.describe,
        transfers=cast(Any, transfers),
        observers=observers,
        sampling_defaults=sampling_defaults,
    )
    server = GrpcServer(application, **options)
    port = await server.start(host, 0)
    try:
        yield server, join_address(host, port)
    finally:
        await server.stop(None)
        await application.close()


class Served:
    """A running service, its engine, and a client of it."""

    def __init__(self, engine: FakeEngine, server: GrpcServer, address: str, client: AsyncClient) -> None:
        self.engine, self.server, self.address, self.client = engine, server, address, client


TEXT = "Grüße, 世界! 🦙 e\u0301"
BYTES = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    """Ids of `text` in the served model's tokenizer."""
    return tuple(BYTES.encode(text).ids)


def tokens(token_ids: Sequence[int]) -> tuple[Token, ...]:
    """Tokens as an engine returns them without logprobs."""
    return tuple(map(Token, token_ids))


def encoded(encoder: Encoder, text: str) -> list[int]:
    """The ids of a text, as a tokenizer's encoder makes them."""
    encoder.push(text)
    encoder.finish()
    return list(encoder.token_ids)


async def collect(answer: AsyncIterator[Event]) -> tuple[str, Finished]:
    """The text of a generation, and its end."""
    text, last = "", None
    async for event in answer:
        text += event.text if isinstance(event, Delta) else ""
        last = event
    assert isinstance(last, Finished)
    return text, last
