"""Tokenizers in the manner of SentencePiece, which put a space before a text."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

WORDS = ("▁Hi", "▁there", "INST", "▁[", "▁▁", "Hi", "▁User", "▁Assistant", "▁the", "th", "in")
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>")


def sentencepiece_tokenizer(space: str) -> FastTokenizer:
    """The tokenizer of Llama 2. `space` selects the position of the added space: `prepend` (by the normalizer, before
    each piece of text between special tokens), `always` (the same by Metaspace), `first` (by Metaspace, at the start of
    a text).
    """
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges: list[tuple[str, str]] = []
    characters = [*"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]/<>.,:!?"]
    names += characters
    for word in WORDS:
        joined = word[0]
        for character in word[1:]:
            merges += [] if (joined, character) in merges else [(joined, character)]
            joined += character
            names += [] if joined in names else [joined]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = FastTokenizer(model)
    if space == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", space, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
