"""POST /v1/completions."""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.bodies import MemoryLease, body_of, share_of
from gateway.callers import client_of, peer_of
from gateway.models import model_name, target_of
from gateway.openai.answers import (
    PendingCompletion,
    answer,
    exactness_of,
    finite,
    new_id,
    now,
    reason_of,
    text_logprobs,
)
from gateway.openai.lengths import with_length
from gateway.openai.requests import TextCompletionRequest, decode_text
from gateway.openai.response_format import NAMES as FORMAT_NAMES
from gateway.openai.sources import NAMES as SOURCE_NAMES
from gateway.openai.sources import source_reader
from longleaf.sampling import TokenLogprob
from longleaf.types import Delta, Finished

NAMES = {
    "return_token_bytes": "logprobs",
    "sampling.logprob_count": "logprobs",
    "text": "prompt",
    "token_ids": "prompt",
    "input": "prompt",
    **SOURCE_NAMES,
    **FORMAT_NAMES,
}


async def completions(request: Request) -> Response:
    with share_of(request) as share:
        return await answer(request, await _start_completion(request, share), share)


async def _start_completion(request: Request, share: MemoryLease) -> PendingCompletion:
    """Only the return value references the prompt."""
    client = client_of(request)
    served = await model_name(request, client)  # authenticates the caller before the body is read
    requested, prompt, ignored = await body_of(request, share, decode_text)
    target = target_of(served, requested.model, requested.context)
    options = with_length(requested.options(peer_of(request)), requested.max_tokens)
    sources = source_reader(client, request, requested.sources, target.context)
    if requested.logprobs is not None:
        options |= {"num_logprobs": requested.logprobs, "with_token_bytes": True}
    if target.context is None:
        options |= {"use_chat_template": False}
    events = client.generate(prompt, context=target.context, **options)
    names = NAMES | {"context": "model" if requested.context is None else "context"}
    formatter = TextChunkFormatter(target.model, requested)
    return PendingCompletion(events, formatter, sources, requested.stream, names, ignored)


class TextChunkFormatter:
    """Formats answers as text completions."""

    def __init__(self, model: str, request: TextCompletionRequest) -> None:
        self.num_samples = request.n
        self.with_usage = request.stream_options is not None and request.stream_options.include_usage
        self._has_logprobs = request.logprobs is not None
        self._lengths = [CharCounter() for _ in range(request.n)]
        self._base: dict[str, Any] = {"id": new_id("cmpl"), "object": "text_completion", "created": now()}
        self._base |= {"model": model, "system_fingerprint": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._base, "choices": choices}
        return chunk | {"usage": None} if self.with_usage else chunk

    def begin(self) -> list[dict[str, Any]]:
        return []

    def delta(self, delta: Delta) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(delta.sample, [delta])])]

    def _choice(self, sample: int, deltas: list[Delta], reason: str | None = None) -> dict[str, Any]:
        logprobs = self._logprobs(sample, deltas) if self._has_logprobs and deltas else None
        text = "".join(delta.text for delta in deltas)
        return {"index": sample, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, sample: int, deltas: list[Delta]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in text_logprobs(deltas):
            found["tokens"].append(_text(entry.token_bytes))
            found["token_logprobs"].append(finite(entry.logprob))
            found["top_logprobs"].append(_tops(entry.top))
            found["text_offset"].append(self._lengths[sample].num_characters)
            self._lengths[sample].add(entry.token_bytes or b"")
        return found

    def finish(self, finished: Finished, fields: dict[str, Any]) -> dict[str, Any]:
        choice = self._choice(finished.sample, [], reason_of(finished))
        return self._chunk([choice | fields]) | exactness_of([finished])

    def last(self, usage: dict[str, Any], exactness: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage, **exactness}

    def whole(
        self, deltas: list[list[Delta]], ends: list[Finished], fields: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        choices = [self._choice(i, deltas[i], reason_of(end)) | fields[i] for i, end in enumerate(ends)]
        return {**self._base, "choices": choices, "usage": usage}


class CharCounter:
    """Counts the characters of a text that arrives as pieces of bytes."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.num_characters = 0

    def add(self, content: bytes) -> None:
        """An incomplete character counts once it is complete."""
        self.num_characters += len(self._decoder.decode(content))


def _tops(tops: Iterable[TokenLogprob]) -> dict[str, float]:
    """All of them: two tokens may have the same text."""
    found = dict[str, float]()
    for top in tops:
        text = _text(top.token_bytes)
        found[text if text not in found else f"token_id:{top.token_id}"] = finite(top.logprob)
    return found


def _text(content: bytes | None) -> str:
    """A token as OpenAI writes it: incomplete characters as escaped bytes."""
    content = content or b""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in content)
