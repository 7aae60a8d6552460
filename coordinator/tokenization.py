"""What the tokenizer service answers: texts to ids and back, within limits."""

import asyncio
from array import array
from collections.abc import Sequence

from coordinator.document import STEP_BYTES
from coordinator.tokenizer import Tokenizer
from longleaf.errors import InvalidArgument
from longleaf.messages import Tokenized

MAX_TEXT_BYTES = 1 << 20
MAX_TOKENS = 1 << 20
MAX_ANSWER_BYTES = 32 << 20


class Tokenization:
    """Works in threads, in steps between which a cancelled call ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def count(self, text: str) -> int:
        """Tokens of `text` as of a document, without the template's opening. Holds a window of the ids only.

        Raises InvalidArgument for a text in which the tokenizer cannot be cut.
        """
        encoder, count = self._tokenizer.document_encoder(is_first=False), 0
        for start in range(0, len(text), STEP_BYTES):
            await asyncio.to_thread(encoder.push, text[start : start + STEP_BYTES])
            count += len(encoder.token_ids)
            encoder.token_ids = array("I")
        await asyncio.to_thread(encoder.finish)
        return count + len(encoder.token_ids)

    async def tokenize(self, text: str, *, add_special: bool, has_spans: bool) -> Tokenized:
        """Raises InvalidArgument for a text that is too long, or has too many tokens."""
        size = len(text.encode())
        if size > MAX_TEXT_BYTES:
            told = f"has {size} bytes, at most {MAX_TEXT_BYTES} are tokenized at once; CountTokens takes more"
            raise InvalidArgument("text", told)
        encoder = self._tokenizer.document_encoder(is_first=False)
        opening = self._tokenizer.opening if add_special else ()
        encoder.token_ids.extend(opening)
        encoder.spans = [(0, 0)] * len(opening) if has_spans else None
        await asyncio.to_thread(encoder.push, text)
        await asyncio.to_thread(encoder.finish)
        if len(encoder.token_ids) > MAX_TOKENS:
            raise InvalidArgument("text", f"has {len(encoder.token_ids)} tokens, at most {MAX_TOKENS} can be answered")
        return Tokenized(tuple(encoder.token_ids), tuple(encoder.spans) if encoder.spans is not None else None)

    async def detokenize(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        """Raises InvalidArgument for too many ids, one that is not in the vocabulary, and too long a text."""
        if len(token_ids) > MAX_TOKENS:
            raise InvalidArgument("token_ids", f"are {len(token_ids)}, at most {MAX_TOKENS} are taken at once")
        size = self._tokenizer.vocabulary_size
        wrong = next((i for i, token_id in enumerate(token_ids) if token_id >= size), None)
        if wrong is not None:
            told = f"{token_ids[wrong]} is not in the vocabulary of {size} tokens"
            raise InvalidArgument(f"token_ids.ids[{wrong}]", told)
        text = await asyncio.to_thread(self._tokenizer.decode, token_ids, keep_special=keep_special)
        if len(text.encode()) > MAX_ANSWER_BYTES:
            told = f"make {len(text.encode())} bytes of text, at most {MAX_ANSWER_BYTES} are answered at once"
            raise InvalidArgument("token_ids", told)
        return text
