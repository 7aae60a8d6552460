"""Short texts and small models for kernels that take milliseconds per row: the output of `generate`, and states of a
prompt."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coordinator.engine.engine import Engine
from longleaf.rank_protocol.step import Row
from tests.support.golden.asking import Ids, answer, ingest
from tests.support.golden.plain import Golden, ask_plain, draw_ids, tokens_with_hidden_keys
from workers.rank import Rank
from workers.sampling.sampler import Choice
from zoo.checkpoints import make_checkpoint
from zoo.families import Family

DOCUMENT, QUESTION, NEW = 12, 3, 3
HIDDEN = 2
LONGEST = 100
"""Tokens of a context at most."""
SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 32}
HEADS: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}
"""For all families except Llama, which has two KV heads with two query heads each."""
SHORTER = {"sliding_window": 5, "attention_chunk_size": 6}
"""Windows and sections that these texts pass twice."""
SETTINGS: dict[str, Any] = {"chunk_size": 8, "block_size": 4, "replicate_below": QUESTION + 1, "kv_bytes": 1 << 20}
"""Two chunks of a document, the first of two blocks; a question is read as replicated rows."""
SEEDS = range(1, 20)


class Short(NamedTuple):
    """The continuations of a document and two questions."""

    goldens: tuple[Golden, Golden]

    @property
    def folder(self) -> Path:
        return self.goldens[0].folder

    @property
    def document(self) -> Ids:
        return self.goldens[0].prompt[:DOCUMENT]

    def question(self, number: int) -> Ids:
        return self.goldens[number].prompt[DOCUMENT:]


def make_short(folder: Path, family: Family) -> Short:
    """The first weights whose output would reveal an error."""
    heads = {} if family == "llama" else HEADS
    prompts = [draw_ids(DOCUMENT) + draw_ids(QUESTION, seed) for seed in (8, 9)]
    for seed in SEEDS:
        make_checkpoint(folder, family, seed=seed, **SIZES, **heads)
        shorten(folder / "config.json")
        (one, gap), (other, other_gap) = (ask_plain(folder, prompt, NEW) for prompt in prompts)
        differ = one.tokens != other.tokens and len({*one.tokens, *other.tokens}) > NEW
        if differ and min(gap, other_gap) > 1e-3 and tokens_with_hidden_keys(one, HIDDEN) != one.tokens:
            return Short((one, other))
    raise AssertionError(f"{family}: all weights repeat themselves, come close to ties, or overlook hidden keys")


def shorten(path: Path) -> None:
    """Rewrites the config of a checkpoint, whose weights do not depend on it. Of two layers with sections one becomes
    one without."""
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part |= {name: length for name, length in SHORTER.items() if part.get(name)}
        if "no_rope_layers" in part and part.get("attention_chunk_size"):
            part |= {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}
    path.write_text(json.dumps(config))


Answers = list[tuple[Golden, Ids]]
"""Answers in the order of the requests, and the expected output of each."""
State = Callable[[Engine, Short], Awaitable[Answers]]


async def say(engine: Engine, golden: Golden, num_resident: int = 0, context: str | None = None) -> tuple[Golden, Ids]:
    """Asks for the continuation of the tokens that a context holds."""
    return golden, await answer(engine, golden.prompt[num_resident:], context, NEW)


async def fresh(engine: Engine, short: Short) -> Answers:
    return [await say(engine, short.goldens[0])]


async def read(engine: Engine, context: str, token_ids: Ids) -> None:
    """Into a context that stays so short that it is rotated as these texts are."""
    await ingest(engine, context, token_ids, LONGEST)


async def kept(engine: Engine, short: Short) -> Answers:
    """Read in two parts, then asked two questions at once."""
    await read(engine, "book", short.document[:7])
    await read(engine, "book", short.document[7:])
    return await asyncio.gather(*(say(engine, golden, DOCUMENT, "book") for golden in short.goldens))


async def forked(engine: Engine, short: Short) -> Answers:
    """Inside of a segment whose end is wrong, and whose other owner goes away."""
    await read(engine, "trunk", short.document[:9] + short.document[:3])
    await engine.fork_context("trunk", "twig", 9)
    await engine.delete_context("trunk")
    await read(engine, "twig", short.document[9:])
    return [await say(engine, short.goldens[1], DOCUMENT, "twig")]


async def parted(engine: Engine, short: Short) -> Answers:
    """As `forked`, at the end of a segment: elsewhere the keys of windows are gone."""
    await read(engine, "trunk", short.document[:9])
    await read(engine, "trunk", short.document[:3])
    await engine.fork_context("trunk", "twig", 9)
    await engine.delete_context("trunk")
    await read(engine, "twig", short.document[9:])
    return [await say(engine, short.goldens[1], DOCUMENT, "twig")]


STATES: dict[str, State] = {state.__name__: state for state in (fresh, kept, forked)}


class Sampled:
    """Records the inputs of rank 0's sampling, and its batch sizes."""

    def __init__(self) -> None:
        self._found: dict[int, list[torch.Tensor]] = {}
        self.most_rows = 0

    def watch(self, number: int, rank: Rank) -> None:
        """Hand this to `running`."""
        start = rank.sampler.start

        def watched(rows: Sequence[Row], logits_RV: torch.Tensor) -> Choice:
            self.most_rows = max(self.most_rows, len(rows))
            for row, logits_V in zip(rows, logits_RV, strict=True):
                self._found.setdefault(row.sequence, []).append(logits_V.float())
            return start(rows, logits_RV)

        rank.sampler.start = watched

    def answers(self) -> list[torch.Tensor]:
        """[T, V] of each answer, in the order in which they were asked for."""
        return [torch.stack(self._found[sequence][:NEW]) for sequence in sorted(self._found)]
