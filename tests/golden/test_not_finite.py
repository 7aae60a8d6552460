"""NaN or infinity ends only the work that depends on it, with an error that names the tokens."""

import asyncio
import contextlib

import pytest

from coordinator.engine_messages import Ended, Prompt, Tokens
from longleaf.errors import NotFinite, NotFound
from longleaf.sampling import SamplingParams
from tests.support.golden.asking import answer, ingest
from tests.support.golden.plain import NEW_TOKENS
from tests.support.golden.states import running
from tests.support.threads import config_for
from workers.kv_cache.slots import FloatKvPool

NAN, INF = float("nan"), float("inf")


async def ask(engine, prompt, context=None, **options):
    """The ids by sample, the samples that ended, and the error of the stream."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
    ids, ended = {}, []
    with contextlib.suppress(NotFound):
        stream = engine.submit(Prompt(context=context, token_ids=prompt, sampling=sampling, **options))
        try:
            async for event in stream:
                if isinstance(event, Tokens):
                    ids[event.sample] = ids.get(event.sample, ()) + event.token_ids
                ended += [event.sample] if isinstance(event, Ended) else []
        except NotFinite as error:
            return ids, ended, error.tokens
    return ids, ended, ""


class Logits:
    """Spoils the logits of one sequence at one token, on rank 0. Jobs are numbered as they come."""

    def __init__(self, sequence, token_index, spoil):
        self._wanted, self._spoil, self._rows = (sequence, token_index), spoil, ()

    def watch(self, index, rank):
        start, runner = rank.start, rank.epoch._decode._model_runner
        logits = runner.logits

        def started(plan):
            self._rows = getattr(plan.work, "rows", ())
            return start(plan)

        def spoilt(*arguments):
            logits_RV = logits(*arguments).clone()
            rows = [row for row in self._rows if row.token_index >= 0]
            for i, row in enumerate(rows):
                if (row.sequence, row.token_index) == self._wanted:
                    self._spoil(logits_RV[i])
            return logits_RV

        if index == 0:
            rank.start, runner.logits = started, spoilt


def nan(logits_V):
    logits_V[7] = NAN


def infinite(logits_V):
    logits_V[7] = INF


def nothing(logits_V):
    logits_V[:] = -INF


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("world_size", "spoil", "token_index"), [(1, nan, 0), (3, nan, 5), (3, infinite, 0), (1, nothing, NEW_TOKENS - 1)]
)
async def test_logits_that_are_not_finite_end_their_sequence_alone(goldens, world_size, spoil, token_index):
    golden = goldens("llama")
    config = config_for(golden.folder, world_size=world_size, chunk_size=300)
    async with running(config, Logits(1, token_index, spoil).watch) as engine:
        requested = [ask(engine, golden.prompt) for _ in range(3)]
        first, broken, last = await asyncio.gather(*requested)
        assert first == last == ({0: golden.tokens}, [0], "")
        assert broken[1:] == ([], f"token {token_index} of the answer")
        assert broken[0].get(0, ()) == golden.tokens[:token_index]
        assert await answer(engine, golden.prompt) == golden.tokens


async def test_of_several_samples_the_broken_one_ends_and_the_others_are_right(goldens):
    golden = goldens("llama")
    async with running(config_for(golden.folder, world_size=2, chunk_size=300), Logits(1, 3, nan).watch) as engine:
        ids, ended, tokens = await ask(engine, golden.prompt, num_samples=3)
    assert (ids[0], ids[2], sorted(ended)) == (golden.tokens, golden.tokens, [0, 2])
    assert (ids[1], tokens) == (golden.tokens[:3], "token 3 of answer 1")


async def test_a_token_that_the_model_rules_out_is_no_error(goldens):
    def rule_out(logits_V):
        logits_V[logits_V.argmin()] = -INF

    golden = goldens("llama")
    async with running(config_for(golden.folder), Logits(0, 3, rule_out).watch) as engine:
        assert await answer(engine, golden.prompt) == golden.tokens


class Projection:
    """Spoils the key of the first row of one layer on one rank, while it is armed."""

    def __init__(self, rank, value):
        self._rank, self._value, self.is_armed = rank, value, False

    def watch(self, index, rank):
        if index == self._rank:
            layers = [part for name, part in rank.model.module.named_modules() if name.endswith("k_proj")]
            layers[1].register_forward_hook(self._spoil)

    def _spoil(self, part, inputs, keys_1TC):
        if self.is_armed:
            keys_1TC = keys_1TC.clone()
            keys_1TC[0, 0, 3] = self._value
        return keys_1TC


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "value", "settings"),
    [
        ("llama", NAN, {"world_size": 1}),
        ("llama", -INF, {"world_size": 3, "prefill": "queries"}),
        ("llama", INF, {"world_size": 3, "prefill": "keys", "merge": "butterfly"}),
        ("llama", INF, {"world_size": 2, "kv_dtype": "int8"}),
        ("gemma3", -INF, {"world_size": 3, "window_keys": "replicated"}),
        ("gemma2", INF, {"world_size": 2}),
    ],
)
async def test_a_document_of_which_a_key_is_not_finite_is_not_acknowledged(goldens, family, value, settings):
    """Earlier contexts still give the same answers."""
    golden, projection = goldens(family), Projection(settings["world_size"] - 1, value)
    config = config_for(golden.folder, chunk_size=256, **settings)
    async with running(config, projection.watch) as engine:
        await ingest(engine, "book", golden.prompt[:900])
        before = await answer(engine, golden.prompt[900:], "book")
        projection.is_armed = True
        with pytest.raises(NotFinite, match="tokens 0 to 255 of the document"):
            await ingest(engine, "spoilt", golden.prompt)
        with pytest.raises(NotFinite, match="tokens 0 to 199 of the document"):
            await ingest(engine, "book", golden.prompt[:200])
        assert (await ask(engine, golden.prompt[::-1]))[2] == "tokens 0 to 255 of the prompt"
        projection.is_armed = False
        assert [view.id for view in engine.list_contexts()] == ["book"]
        assert await answer(engine, golden.prompt[900:], "book") == before
        assert config.kv_dtype == "int8" or before == golden.tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stored", "value", "retained", "tokens"),
    [
        ("keys", NAN, 981, "token 0 of the answer"),
        ("keys", -INF, 981, "token 0 of the answer"),
        ("keys", -INF, 900, "tokens 0 to 98 of the prompt"),
        ("values", INF, 981, "token 0 of the answer"),
    ],
)
async def test_a_non_finite_value_in_a_context_ends_only_the_answers_over_it(goldens, stored, value, retained, tokens):
    golden, pools = goldens("llama"), {}

    def watch(index, rank):
        assert isinstance(rank.pool, FloatKvPool)
        pools[index] = rank.pool

    async with running(config_for(golden.folder, world_size=2, chunk_size=300), watch) as engine:
        await ingest(engine, "spoilt", golden.prompt[:retained])
        await ingest(engine, "book", golden.prompt[:retained])
        getattr(pools[1], stored)[2][1, 5, 3] = value
        requested = [ask(engine, golden.prompt[retained:], name) for name in ("book", "spoilt", "book")]
        first, broken, last = await asyncio.gather(*requested)
    assert first == last == ({0: golden.tokens}, [0], "")
    assert broken == ({}, [], tokens)
