"""The tokenizer service: text to ids and back, within limits."""

from collections.abc import Sequence

from coordinator.text.encoder import Encoder
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from coordinator.text.vocabulary import check_known
from longleaf.errors import InvalidArgument
from longleaf.types import Tokenized

MAX_TEXT_BYTES = 1 << 20
MAX_TOKENS = 1 << 20
MAX_ANSWER_BYTES = 32 << 20


class Tokenization:
    """Works in `threads`, in steps; a cancelled call ends between two steps."""

    def __init__(self, tokenizer: Tokenizer, threads: TokenizerPool) -> None:
        self._tokenizer = tokenizer
        self._threads = threads

    async def count(self, text: str) -> int:
        """Tokens of `text` as a document, without the opening of the template. Holds only a window of the ids.

        Raises InvalidArgument for a text that the tokenizer cannot split.
        """
        encoder = self._tokenizer.plain_encoder(has_opening=False)
        counts: list[int] = []

        def take() -> None:
            counts.append(len(encoder.token_ids))
            del encoder.token_ids[:]

        await self._threads.encode(encoder, text, take)
        return sum(counts)

    async def tokenize(self, text: str, *, add_special: bool, has_spans: bool) -> Tokenized:
        """Raises InvalidArgument if the text is too long or has too many tokens."""
        size = len(text.encode())
        if size > MAX_TEXT_BYTES:
            message = f"has {size:,} bytes; the limit is {MAX_TEXT_BYTES:,}. CountTokens allows more"
            raise InvalidArgument("text", message)
        encoder = self._tokenizer.plain_encoder(has_opening=add_special)
        if has_spans:
            encoder.record_spans()
        await self._threads.encode(encoder, text, lambda: _check_count(encoder))
        return Tokenized(tuple(encoder.token_ids), tuple(encoder.spans) if encoder.spans is not None else None)

    async def detokenize(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        """Raises InvalidArgument if there are too many ids, an id is not in the vocabulary, or the text is too long."""
        if len(token_ids) > MAX_TOKENS:
            raise InvalidArgument("token_ids", f"has {len(token_ids):,} ids; the limit is {MAX_TOKENS:,}")
        text = await self._threads.run(self._decode, token_ids, keep_special)
        if len(text.encode()) > MAX_ANSWER_BYTES:
            message = f"decode to {len(text.encode()):,} bytes of text; the limit is {MAX_ANSWER_BYTES:,}"
            raise InvalidArgument("token_ids", message)
        return text

    def _decode(self, token_ids: Sequence[int], keep_special: bool) -> str:
        """Decodes in one step: a decoder may depend on neighbouring tokens, so parts cannot be joined."""
        check_known(token_ids, self._tokenizer.vocabulary_size)
        return self._tokenizer.decode(token_ids, keep_special=keep_special)


def _check_count(encoder: Encoder) -> None:
    if len(encoder.token_ids) > MAX_TOKENS:
        raise InvalidArgument("text", f"has {len(encoder.token_ids):,} tokens; the limit is {MAX_TOKENS:,}")
