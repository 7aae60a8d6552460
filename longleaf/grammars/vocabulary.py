# pyright: reportMissingTypeStubs=false
"""The vocabulary of a model as grammars see it: the bytes of each token."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from longleaf.errors import ModelRefused
from longleaf.token_bytes import read_token_texts


class GrammarVocabulary(NamedTuple):
    """The tokens that grammars are matched against."""

    tokens: LLTokenizer
    size: int
    """Number of ids. The id `size` is no token: in a mask it marks that the answer may end."""


class _TokenList:
    """The tokens in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*special, len(tokens)]
        self.eos_token_id = len(tokens)

    def __call__(self, text: str) -> list[int]:
        """Is never called: grammars do not force tokens, so no text is tokenized."""
        raise NotImplementedError("grammars leave the choice of tokens to the model")


def make_vocabulary(tokens: Sequence[bytes], silent: Sequence[int]) -> GrammarVocabulary:
    """The vocabulary with these bytes by id. Ids in `silent` have no text, and no grammar permits them."""
    listed = [token or b"<|%d|>" % i for i, token in enumerate(tokens)]
    special = sorted({*silent, *(i for i, token in enumerate(tokens) if not token)})
    size = len(tokens)
    return GrammarVocabulary(LLTokenizer(_TokenList(listed, special), n_vocab=size + 1, eos_token=size), size)  # pyright: ignore[reportArgumentType]


def read_vocabulary(folder: Path) -> GrammarVocabulary:
    """The vocabulary of the tokenizer in a model folder. Takes a second for 150,000 tokens.

    Raises ModelRefused if the tokenizer cannot be read, or if the text of its tokens depends on their neighbours.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelRefused(f"{path} cannot be read: {error}") from error

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)[0]

    size = 1 + max(tokenizer.get_vocab().values(), default=-1)
    texts = read_token_texts(tokenizer, size, decode)
    if (spell := texts.spell) is None:
        raise ModelRefused("the model's tokenizer makes text of its tokens together only")
    tokens = [b"" if token_id in texts.silent else spell(token_id, False) for token_id in range(size)]
    return make_vocabulary(tokens, sorted(texts.silent))
