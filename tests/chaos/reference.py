"""Questions whose answers are known: what transformers' own `generate` says, and an undisturbed service."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

POISON = (511, 3, 511, 3, 511)
"""Ids that no text has: a rank that is told to read them raises."""
DEADLY = (511, 4, 511, 4, 511)
"""Ids of which rank 0 dies."""
BOOK, FORKED, LONG, VISITOR = "book", "forked", "long", "visitor"
CROWD = "crowd"
"""How contexts are called that take the room of others."""
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
LOGPROB_TOLERANCE = 2e-4
"""Of a token's logprob, in standard deviations of the logits: twice what a logit may be off."""


@dataclass(frozen=True)
class Known:
    """A question to a context, and its answer: tokens and their logprobs."""

    context: str
    question: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)

    def sampled(self) -> "Known":
        """The same question, whose answer is drawn and not known yet."""
        return replace(self, tokens=(), logprobs=(), options=SAMPLED)


@dataclass(frozen=True)
class Reference:
    """A checkpoint, the documents of its contexts, and what is known of them."""

    folder: Path
    documents: dict[str, tuple[int, ...]]
    known: list[Known]

    def asks(self, context: str) -> list[Known]:
        return [one for one in self.known if one.context == context]


NEW = 40
CUT = 410
"""Where the forked context leaves the other one."""


def make_reference(folder: Path, family: Any, seed: int) -> Reference:
    """Small random weights; every token of the known answers is chosen by a clear distance."""
    from transformers.utils.logging import disable_progress_bar

    from tests.support.golden.plain import draw_ids
    from zoo.checkpoints import make_checkpoint

    disable_progress_bar()
    make_checkpoint(folder, family, seed=1 + seed % 5)
    book, other, long, visitor = (draw_ids(count, seed * 10 + i) for i, count in enumerate((700, 300, 1500, 900)))
    documents = {BOOK: book, FORKED: book[:CUT] + other, LONG: long, VISITOR: visitor}
    sizes = {BOOK: (7, 90), FORKED: (5,), LONG: (9, 80), VISITOR: (6,)}
    known = [_ask(folder, name, documents[name], size, seed) for name, found in sizes.items() for size in found]
    return Reference(folder, documents, known)


def _ask(folder: Path, context: str, document: tuple[int, ...], size: int, seed: int) -> Known:
    from tests.support.golden.plain import ask_plain, draw_ids

    for turn in range(20):
        question = draw_ids(size, seed * 1000 + size * 20 + turn)
        golden, gap = ask_plain(folder, document + question, NEW)
        if gap > 1e-3:
            logits = golden.logits_TV
            chosen = [row[token] for row, token in zip(logits.log_softmax(-1).tolist(), golden.tokens, strict=True)]
            tolerance = LOGPROB_TOLERANCE * float(logits.std())
            return Known(context, question, golden.tokens, tuple(chosen), tolerance)
    raise AssertionError("every answer comes close to a tie")
