"""Text to ids. Text from clients is plain text, even where it looks like a control token; templates are not."""

import json
import secrets
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from coordinator.text.answer_formats import AnswerFormat, recognized_format
from coordinator.text.answer_parser import ends_in_reasoning
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.checkpoint import Checkpoint
from coordinator.text.control_tokens import ControlTokens, Marks, TemplatePiece
from coordinator.text.detokenizer import Alphabet
from coordinator.text.encoder import Encoder
from coordinator.text.renderer import TemplateRenderer
from coordinator.text.token_offsets import TokenOffsets
from longleaf.errors import ModelRefused
from longleaf.token_bytes import decoder_steps, read_token_texts

DEFAULT_SEPARATOR = "\n\n"
MAX_TAIL = 4096
"""Characters before a document that are encoded together with it."""
MAX_MARKER_TOKENS = 32
"""Tokens at the end of a prompt among which the start of reasoning is looked for."""
_BYTE_PRESERVING = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}
"""Pre-tokenizer steps that drop no text (Split unless configured to remove)."""


class Opening(NamedTuple):
    """The beginning of a context, before its document."""

    token_ids: tuple[int, ...] = ()
    tail: str = ""
    """Text between the last control token and the document, which is encoded together with the document."""


class Tokenizer:
    """The ids of documents, questions and prompts, and their text."""

    def __init__(self, control: FastTokenizer, checkpoint: Checkpoint, renderer: TemplateRenderer) -> None:
        """`control` recognises control tokens. Raises ModelRefused for a template that cannot render a user's message,
        and the errors of the renderer."""
        self._control = control
        self.checkpoint = checkpoint
        self.vocabulary_size = checkpoint.vocabulary_size or control.get_vocab_size()
        self.opening = _opening(control)
        """Special tokens that come before a plain prompt."""
        self.separator = DEFAULT_SEPARATOR if checkpoint.document_separator is None else checkpoint.document_separator
        template = checkpoint.chat_template
        tool_template = checkpoint.tool_template if template is not None else None
        sources = [source for source in (template, tool_template) if source is not None]
        written = "\0".join(text for source in sources for text in renderer.literals(source))
        description: dict[str, Any] = json.loads(control.to_str())
        names = _control_tokens(control, written)
        self._break = "\ufdef" + secrets.token_hex(8)
        self._plain = _without(description, names, self._break)
        """Reads control tokens as text. After `_break`, text is encoded as after a control token."""
        self._newline = tuple(control.encode("\n", add_special_tokens=False).ids)
        self.control_tokens = ControlTokens(names)
        self.chat_template: ChatTemplate | None = None
        """Makes prompts of conversations; None for a model without one."""
        if template is not None:
            self.chat_template = ChatTemplate(
                template, checkpoint.special_tokens, renderer, self.control_tokens, self.separator, tool_template
            )
        self.alphabet = self._alphabet()
        """The decoder from ids to text."""
        added_tokens = control.get_added_tokens_decoder()
        added = [token.content for token in added_tokens.values()]
        self.answer_format = recognized_format("\n".join(sources), added) if sources else AnswerFormat()
        """The format of reasoning and tool calls."""
        self.marker_ids = {
            token.content: token_id
            for token_id, token in added_tokens.items()
            if token.special and token.content in self.answer_format.markers
        }
        """The ids of markers that are special tokens."""
        self.parsing_alphabet = self._alphabet(self.answer_format.markers)
        """As `alphabet`, but special tokens that mark reasoning or calls have their text."""
        self.max_bytes_per_token = _max_bytes_per_token(control, description)
        """Most UTF-8 bytes of text that one token can stand for; None when there is no such limit."""

    @classmethod
    def load(cls, folder: Path, renderer: TemplateRenderer) -> "Tokenizer":
        """Takes seconds: call it in a thread. Raises ModelRefused with the reason when the folder has no readable
        tokenizer.json or template, and the errors of `renderer`."""
        checkpoint = Checkpoint.read(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelRefused(f"{folder} has no tokenizer.json")
        try:
            control = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelRefused(f"{path} cannot be read: {error}") from error
        # a file may contain a saved truncation; input must never be truncated silently
        control.no_truncation()
        control.no_padding()
        return cls(control, checkpoint, renderer)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def uses_template(self, wanted: bool | None) -> bool:
        """Whether a prompt without a context goes through the template, as asked for or by default."""
        return self.has_chat_template if wanted is None else wanted

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end an answer: those of generation_config.json, else config.json, and the tokenizer's own end token.

        The last one is as in vLLM, not as in transformers' `generate`, which runs on where generation_config.json names
        only others, as that of a base model does under the tokenizer of its chat model.
        """
        name = self.checkpoint.special_tokens.get("eos_token")
        own = None if name is None else self._control.token_to_id(name)
        return self.checkpoint.end_tokens if own is None else self.checkpoint.end_tokens | {own}

    def document_encoder(self, is_first: bool, opening: Opening | None = None) -> Encoder:
        """Makes the ids of a document; those that start a context carry an opening before them, the template's unless
        another one is given. Notes where tokens begin."""
        ids, tail = Opening()
        if is_first:
            ids, tail = self.usual_opening() if opening is None else opening
        starts = TokenOffsets(len(ids), self.alphabet.spell, self._break, tail)
        if is_first and ids and self.chat_template is not None:
            return Encoder(self._plain, ids, lead=self._break + tail, num_lead=1, starts=starts)
        return Encoder(self._plain, ids, lead=tail, starts=starts)

    def usual_opening(self) -> Opening:
        """The beginning of a context without a system message."""
        if self.chat_template is None:
            return Opening(self.opening)
        pieces, tail = self.cut_tail([TemplatePiece(self.chat_template.before_document)])
        encoders = self.encoders(pieces)
        for encoder, text in encoders:
            encoder.push(text)
            encoder.finish()
        return Opening(tuple(chain.from_iterable(encoder.token_ids for encoder, _ in encoders)), tail)

    def cut_tail(self, pieces: Sequence[TemplatePiece]) -> tuple[list[TemplatePiece], str]:
        """The part before a document, without its tail: the text after the last control token, which is encoded
        together with the document. Empty where that would be too long."""
        if not pieces or pieces[-1].is_plain:
            return [*pieces], ""
        *stable, (text, _) = pieces
        encoding = self._control.encode(text[-2 * MAX_TAIL :], add_special_tokens=False)
        added = self._control.get_added_tokens_decoder()
        ends = (span[1] for each, span in zip(encoding.ids, encoding.offsets, strict=True) if each in added)
        size = min(len(text), 2 * MAX_TAIL) - max(ends, default=0)
        if size > MAX_TAIL or size == 0:
            return [*pieces], ""
        return [*stable, TemplatePiece(text[:-size])] if size < len(text) else stable, text[-size:]

    def encoders(self, pieces: Sequence[TemplatePiece], *, is_continued: bool = False) -> list[tuple[Encoder, str]]:
        """An encoder for each piece, and its text: the ids of all, one after the other, are those of the prompt. With
        `is_continued` the first one follows other text."""
        return [self._encoder(piece, is_continued or i > 0 or piece.is_plain) for i, piece in enumerate(pieces)]

    def _encoder(self, piece: TemplatePiece, is_continued: bool) -> tuple[Encoder, str]:
        tokenizer = self._plain if piece.is_plain else self._control
        if is_continued:
            # After a line break, tokenizers in the manner of SentencePiece put no space before a text.
            ids = tokenizer.encode("\n" + piece.text[:MAX_TAIL], add_special_tokens=False).ids
            if tuple(ids[: len(self._newline)]) == self._newline:
                return Encoder(tokenizer, lead="\n", num_lead=len(self._newline)), piece.text
        return Encoder(tokenizer), piece.text

    def plain_question(self, text: str) -> list[TemplatePiece]:
        """The part after a document for a model without a template."""
        marks = Marks.beside([text])
        return self.control_tokens.split(self.separator + self.control_tokens.mark(text, marks), marks)

    def prompt_encoders(self, text: str) -> list[tuple[Encoder, str]]:
        """Those of a prompt without a template."""
        return [(self.plain_encoder(True), text)]

    def plain_encoder(self, has_opening: bool) -> Encoder:
        """Makes the ids of a text without a template, on request with the special tokens that come before a prompt."""
        return Encoder(self._plain, self.opening if has_opening else ())

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        # The library lets other threads run in a batch only.
        return self._control.decode_batch([list(token_ids)], skip_special_tokens=not keep_special)[0]

    def ends_in_reasoning(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt has begun the reasoning of its answer."""
        return ends_in_reasoning(self.answer_format, self.decode(token_ids[-MAX_MARKER_TOKENS:], keep_special=True))

    def _alphabet(self, markers: Collection[str] = ()) -> Alphabet:
        """`markers` are special tokens that are shown."""
        added = self._control.get_added_tokens_decoder()
        shown = {token_id for token_id, token in added.items() if token.special and token.content in markers}
        special = {token_id for token_id, token in added.items() if token.special} - shown
        decode = self._decode_showing(special) if shown else self.decode
        texts = read_token_texts(self._control, self.vocabulary_size, decode, shown)
        return Alphabet(decode=decode, silent=texts.silent, bytes=frozenset(texts.fallback), spell=texts.spell)

    def _decode_showing(self, hidden: Collection[int]) -> Callable[[Sequence[int]], str]:
        """Decodes ids with all special tokens except `hidden`."""

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode([each for each in token_ids if each not in hidden], keep_special=True)

        return decode


def _control_tokens(tokenizer: FastTokenizer, written: str) -> set[str]:
    """Special tokens, and added tokens that the chat template writes: `written` are its literal texts."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    return {
        token.content for token in added if token.special or (token.content in written and not token.content.isspace())
    }


def _without(description: dict[str, Any], names: set[str], added: str) -> FastTokenizer:
    """A tokenizer that reads control tokens as text, and knows one added token more."""
    tokens: list[dict[str, Any]] = description["added_tokens"]
    special = [{**token, "special": token["special"] or token["content"] in names} for token in tokens]
    tokenizer = FastTokenizer.from_str(json.dumps({**description, "added_tokens": special}))
    tokenizer.encode_special_tokens = True
    untyped: Any = tokenizer
    untyped.add_tokens([AddedToken(added, special=False, normalized=False)])
    return tokenizer


def _max_bytes_per_token(tokenizer: FastTokenizer, description: dict[str, Any]) -> int | None:
    model: dict[str, Any] = description["model"]
    normalizer, pre_tokenizer = description.get("normalizer"), description.get("pre_tokenizer")
    drops = '"Removed"' in json.dumps(pre_tokenizer) or _kinds(pre_tokenizer) - _BYTE_PRESERVING
    shrinks = _kinds(normalizer) - {"NFC", "Prepend", "Replace"} or _replaces_more_than_spaces(normalizer)
    greedy = any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values() if not t.special)
    if model.get("type") != "BPE" or model.get("fuse_unk") or drops or shrinks or greedy:
        return None
    longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
    # Composing joins at most three bytes into one: no character's NFC is shorter than a third.
    return max(longest, 4) * (3 if "NFC" in _kinds(normalizer) else 1)


def _replaces_more_than_spaces(normalizer: object) -> bool:
    return any(
        step["type"] == "Replace" and step.get("pattern") != {"String": " "} for step in decoder_steps(normalizer)
    )


def _opening(tokenizer: FastTokenizer) -> tuple[int, ...]:
    """Tokens that the post-processor adds before a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return ()


def _kinds(step: object) -> set[str]:
    return {found["type"] for found in decoder_steps(step)}
