"""Tokenizers of other kinds than that of the served model."""

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders as decoding

MERGES = [("Ã", "©"), ("Ġ", "a"), ("ä", "¸"), ("ä¸", "ĸ"), ("ð", "Ł"), ("¦", "Ļ"), ("b", "ä¸")]


def metaspace_tokenizer(has_bytes: bool) -> FastTokenizer:
    """Pieces that begin with a mark for the space, and byte tokens for other text (as in Llama 2)."""
    words = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "世", "\ufffd", "▁▁"]
    fallback = [f"<0x{byte:02X}>" for byte in (0x0A, 0x41, 0x80, 0xA9, 0xC3, 0xF0, 0x9F, 0xA6, 0x99)]
    names = ["<unk>", *words, *(fallback if has_bytes else [])]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=has_bytes))
    if has_bytes:
        steps = [decoding.Replace("▁", " "), decoding.ByteFallback(), decoding.Fuse(), decoding.Strip(" ", 1, 0)]
        tokenizer.decoder = decoding.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoding.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer
