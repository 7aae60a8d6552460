"""Questions with known answers, from transformers' `generate` and from an undisturbed service."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

POISON = (511, 3, 511, 3, 511)
"""Ids that no document contains: a rank that reads them raises."""
DEADLY = (511, 4, 511, 4, 511)
"""Ids that kill rank 0."""
BOOK, FORKED, LONG, VISITOR = "book", "forked", "long", "visitor"
FILLER = "crowd"
"""Name prefix of the contexts that cause evictions."""
TEMPERATURE = 0.8
TOP_P = [0.95 - 0.001 * i for i in range(100)]
CLEAR = 3e-6
"""Minimum distance, in probability, of a draw from the border of another token. Logits that are computed in other parts
move these borders by about 1e-7."""
LOGPROB_TOLERANCE = 2e-4
"""Tolerance of a token's logprob, in standard deviations of the logits: twice the tolerance of a logit."""


@dataclass(frozen=True)
class Known:
    """A question to a context and its answer: tokens and logprobs."""

    context: str
    question: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """A checkpoint, the documents of its contexts, and the known answers."""

    folder: Path
    documents: dict[str, tuple[int, ...]]
    known: list[Known]
    drawn: tuple[Known, ...]
    """Questions with sampled answers; their logprobs are taken from an undisturbed service."""

    def asks(self, context: str) -> list[Known]:
        return [one for one in self.known if one.context == context]


NEW = 40
CUT = 410
"""Fork position of the forked context."""


def make_reference(folder: Path, family: Any, seed: int) -> Reference:
    """Creates a checkpoint with small random weights and answers whose tokens all win by a clear margin."""
    from transformers.utils.logging import disable_progress_bar

    from tests.support.golden.plain import draw_ids
    from zoo.checkpoints import make_checkpoint

    disable_progress_bar()
    make_checkpoint(folder, family, seed=1 + seed % 5)
    book, other, long, visitor = (draw_ids(count, seed * 10 + i) for i, count in enumerate((700, 300, 1500, 900)))
    documents = {BOOK: book, FORKED: book[:CUT] + other, LONG: long, VISITOR: visitor}
    sizes = {BOOK: (7, 90), FORKED: (5,), LONG: (9, 80), VISITOR: (6,)}
    known = [_ask(folder, name, documents[name], size, seed) for name, found in sizes.items() for size in found]
    drawn = [_draw(folder, documents[one.context], one) for one in known if one.context in (BOOK, LONG)]
    return Reference(folder, documents, known, tuple(drawn))


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


def _draw(folder: Path, document: tuple[int, ...], known: Known) -> Known:
    """The same question with a seed and a `top_p` for which no draw is close to a border."""
    from tests.support.golden.plain import load_plain

    model: Any = load_plain(folder)
    for seed, top_p in enumerate(TOP_P):
        options = {"temperature": TEMPERATURE, "top_p": top_p, "seed": seed}
        if (tokens := _drawn(model, document + known.question, options)) is not None:
            return replace(known, tokens=tokens, logprobs=(), options=options)
    raise AssertionError("every draw comes close to another one")


def _drawn(model: Any, prompt: Sequence[int], options: dict[str, Any]) -> tuple[int, ...] | None:
    """Samples an answer from transformers' logits. None if another token was nearly drawn."""
    import torch

    from longleaf.sampling import Sampling
    from workers.sampling.distribution import distribution, draw
    from workers.sampling.uniforms import uniform

    sampling, past, ids, tokens = Sampling(max_tokens=NEW, **options), None, list(prompt), list[int]()
    for index in range(NEW):
        with torch.inference_mode():
            found = model(torch.tensor([ids]), past_key_values=past, use_cache=True)
        scores_V, past = found.logits[0, -1].double(), found.past_key_values
        number, borders_V = uniform(options["seed"], index), distribution(scores_V, sampling).cumsum(0)
        shares_V = torch.softmax(scores_V / TEMPERATURE, dim=-1).sort().values.cumsum(0)
        near = min((borders_V - number).abs().min(), (shares_V - (1 - options["top_p"])).abs().min())
        if near < CLEAR:
            return None
        ids = [draw(scores_V, sampling, number)]
        tokens += ids
    return tuple(tokens)
