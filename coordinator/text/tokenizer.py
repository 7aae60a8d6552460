"""Text to ids. What a client sends is plain text, even where it looks like a control token; templates are not."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as FastTokenizer

from coordinator.text.checkpoint import Checkpoint
from coordinator.text.detokenizer import Alphabet
from coordinator.text.encoder import Encoder
from coordinator.text.renderer import Renderer
from coordinator.text.shapes import Ids, NoTemplate, Parts, Shapes
from coordinator.text.spelling import spell_of
from coordinator.text.starts import Starts
from coordinator.text.template import Rendering, Shape
from longleaf.errors import ModelRefused

DEFAULT_SEPARATOR = "\n\n"
RenderTemplate = Callable[[str, dict[str, str], Sequence[Shape]], Sequence[Rendering]]
"""What a chat template, given special tokens, makes of shapes; see template.render_shapes and Renderer."""
_BYTE_PRESERVING = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}
"""Steps before the model that drop no text (Split unless told to remove)."""


class Tokenizer:
    """The ids of documents, questions and prompts, and their text."""

    def __init__(
        self, plain: FastTokenizer, control: FastTokenizer, checkpoint: Checkpoint, render: RenderTemplate
    ) -> None:
        """`plain` reads special tokens as text, `control` recognises them; otherwise the two are the same. Raises
        ModelRefused for a template that cannot show a user's message, and what `render` raises."""
        self._plain, self._control = plain, control
        self.checkpoint = checkpoint
        self.vocabulary_size = checkpoint.vocabulary_size or plain.get_vocab_size()
        self.has_chat_template = checkpoint.chat_template is not None
        self.opening = _opening(control)
        """Special tokens that come before a plain prompt."""
        separator = DEFAULT_SEPARATOR if checkpoint.document_separator is None else checkpoint.document_separator
        self._separator = self._control_ids(separator)
        self.shapes: Shapes | NoTemplate = NoTemplate(self.opening)
        """What is put around the texts of conversations."""
        if (template := checkpoint.chat_template) is not None:
            self.shapes = Shapes(partial(render, template, checkpoint.special_tokens), self._control_ids)
        description: dict[str, Any] = json.loads(plain.to_str())
        self.alphabet = self._alphabet(description)
        """What turns ids into text."""
        self.max_bytes_per_token = _max_bytes_per_token(plain, description)
        """Most UTF-8 bytes of text that one token can stand for; None when there is no such limit."""

    @classmethod
    def load(cls, folder: Path, render: RenderTemplate | None = None) -> "Tokenizer":
        """Takes seconds: call it in a thread. Raises ModelRefused with the reason when the folder has no readable
        tokenizer.json or template, and what `render` raises, which is by default a Renderer's."""
        checkpoint = Checkpoint.read(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelRefused(f"{folder} has no tokenizer.json")
        try:
            plain, control = FastTokenizer.from_file(str(path)), FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelRefused(f"{path} cannot be read: {error}") from error
        for tokenizer in (plain, control):
            # A file may carry the truncation of whoever saved it; nothing is ever cut silently here.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        plain.encode_special_tokens = True
        return cls(plain, control, checkpoint, render or Renderer().render)

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.checkpoint.end_tokens

    def document_encoder(self, is_first: bool, opening: Sequence[int] | None = None) -> Encoder:
        """Makes the ids of a document; those that start a context carry an opening before them, the template's unless
        another one is given. Notes where tokens begin."""
        before = (self.shapes.question[0] if opening is None else opening) if is_first else ()
        return Encoder(self._plain, before, starts=Starts(len(before), self.alphabet.spell))

    def question_encoder(self) -> Encoder:
        """Makes the ids that follow a document: separator, question, and the template's end."""
        return self.conversation_encoders(self.shapes.question, has_context=True)[0]

    def prompt_encoder(self, use_chat_template: bool) -> Encoder:
        """Makes the ids of a prompt without a context."""
        if not use_chat_template:
            return self.plain_encoder(True)
        return self.conversation_encoders(self.shapes.question, has_context=False)[0]

    def conversation_encoders(self, parts: Parts, has_context: bool) -> list[Encoder]:
        """One for each text of a conversation, whose ids are those of all, one after the other. After a document the
        separator stands in the place of the first part, which the context begins with."""
        before = (self._separator if has_context else parts[0], *parts[1:-1])
        last = len(before) - 1
        return [Encoder(self._plain, ids, parts[-1] if i == last else ()) for i, ids in enumerate(before)]

    def plain_encoder(self, has_opening: bool) -> Encoder:
        """Makes the ids of a text without a template, on request with the special tokens that come before a prompt."""
        return Encoder(self._plain, self.opening if has_opening else ())

    def _control_ids(self, text: str) -> Ids:
        return tuple(self._control.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        # The library lets other threads run in a batch only.
        return self._plain.decode_batch([list(token_ids)], skip_special_tokens=not keep_special)[0]

    def _alphabet(self, description: dict[str, Any]) -> Alphabet:
        added = self._plain.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        unused = set(range(self.vocabulary_size)) - set(self._plain.get_vocab().values())
        decoder, silent = _steps(description.get("decoder")), frozenset(special | unused)
        names = {byte: f"<0x{byte:02X}>" for byte in range(256) if "ByteFallback" in _kinds(description.get("decoder"))}
        found = {byte: self._plain.token_to_id(name) for byte, name in names.items()}
        fallback = {token_id: byte for byte, token_id in found.items() if token_id is not None}
        return Alphabet(
            decode=self.decode,
            silent=silent,
            bytes=frozenset(fallback),
            spell=spell_of(decoder, self._plain.id_to_token, self.decode, fallback, silent),
        )


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
    return any(step["type"] == "Replace" and step.get("pattern") != {"String": " "} for step in _steps(normalizer))


def _opening(tokenizer: FastTokenizer) -> tuple[int, ...]:
    """What the post-processor adds before a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return ()


def _steps(step: object) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as tokenizer.json describes them."""
    if not isinstance(step, dict):
        return []
    fields = cast(dict[str, Any], step)
    if fields["type"] != "Sequence":
        return [fields]
    inner = next(cast(list[object], value) for value in fields.values() if isinstance(value, list))
    return [found for one in inner for found in _steps(one)]


def _kinds(step: object) -> set[str]:
    return {found["type"] for found in _steps(step)}
