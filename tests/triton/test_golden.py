"""Whole small models on the kernels of GPUs: greedy text and logits equal those of transformers' `generate`."""

import itertools

import pytest
import torch

from longleaf.kernels.gpu import varlen_plan
from longleaf.kernels.gpu.backend import TritonKernels
from longleaf.kernels.gpu.flash import FlashKernels
from longleaf.kernels.gpu.work_items import MIN_PIECE
from tests.support.attention.varlen import PretendedFlash
from tests.support.golden.asking import ingest
from tests.support.golden.interpreted import Launches, served_by, use_kernels
from tests.support.golden.plain import LOGIT_TOLERANCE, ask_plain, draw_ids
from tests.support.golden.rounding import ALLOWED, Length, plain_logits, ratio, served_logits
from tests.support.golden.short import DOCUMENT, NEW, QUESTION, SETTINGS, STATES, Sampled, parted, say
from tests.support.golden.states import running
from tests.support.thinned import thinned
from tests.support.threads import config_for
from zoo.families import FAMILIES

NUM_MULTIPROCESSORS = 2
"""Each program takes milliseconds."""
DIFFERENT = ("llama", "gemma2", "gemma3", "gpt_oss", "llama4", "deepseek_v3")
"""Families that differ to kernels: groups, soft caps, windows, sinks, sections, latents."""
COVER = [(family, state, 1 + (i + j) % 2) for i, family in enumerate(DIFFERENT) for j, state in enumerate(STATES)]
"""Every family in every state, and both with one rank and with two."""
REPLICATED = {**STATES, "forked": parted}
WINDOWED = ("gemma3", "mistral", "gpt_oss", "llama4", "gemma2", "cohere2")
LENGTH = Length(DOCUMENT + QUESTION - NEW, NEW)
LONG = 2 * MIN_PIECE + 100
"""Tokens of a prompt whose keys two programs share."""
ATTENDING = {"store_tokens", "attend_items", "fold_items"}
MERGING = {"pack_rows", "fold_packed"}
"""Ranks with partials, and one rank with the partials of a window and of a chunk."""


def triton(launcher):
    return TritonKernels(NUM_MULTIPROCESSORS, launcher)


def flash(launcher):
    return FlashKernels(NUM_MULTIPROCESSORS, PretendedFlash().source, launcher)


async def served(short, state, make=triton, **settings):
    """Answers with the expected ones, the sampled logits, and the launches."""
    sampled = Sampled()
    config = config_for(short.folder, **{**SETTINGS, "merge": "exchange", **settings})
    with served_by(make) as launches:
        async with running(config, sampled.watch) as engine:
            output = await state(engine, short)
    return output, sampled, launches.names


def largest_error(said, sampled):
    """Of a logit, in standard deviations of the logits."""
    pairs = zip(said, sampled.answers(), strict=True)
    return max(float((found - golden.logits_TV).abs().max() / golden.logits_TV.std()) for (golden, _), found in pairs)


async def check_row(short, state, world_size, **settings):
    output, sampled, names = await served(short, state, world_size=world_size, **settings)
    assert [tokens for _, tokens in output] == [golden.tokens for golden, _ in output]
    assert largest_error(output, sampled) <= LOGIT_TOLERANCE
    assert sampled.most_rows == min(2, len(output))
    assert names - MERGING == ATTENDING
    assert world_size == 1 or names >= MERGING


def full_product():
    """Every family in every state with up to three ranks; how these merge and read changes from row to row."""
    others = itertools.cycle(itertools.product(("gather", "exchange"), ("queries", "keys")))
    for family, state, world_size in itertools.product(FAMILIES, STATES, (1, 2, 3)):
        yield family, state, world_size, *next(others)


def test_the_cover_covers():
    factors = (DIFFERENT, STATES, (1, 2))
    for (i, some), (j, others) in itertools.combinations(enumerate(factors), 2):
        assert {(row[i], row[j]) for row in COVER} == set(itertools.product(some, others))


@pytest.mark.parametrize(("family", "state", "world_size"), COVER)
async def test_tokens_equal_generate(shorts, family, state, world_size):
    await check_row(shorts(family), STATES[state], world_size)


@pytest.mark.parametrize(("family", "state", "world_size"), [("gemma3", "kept", 2), ("llama4", "forked", 2)])
async def test_tokens_equal_generate_with_replicated_windows(shorts, family, state, world_size):
    await check_row(shorts(family), REPLICATED[state], world_size, window_keys="replicated")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "state", "world_size", "merge", "prefill"), list(full_product()))
async def test_tokens_equal_generate_in_the_full_product(shorts, family, state, world_size, merge, prefill):
    await check_row(shorts(family), STATES[state], world_size, merge=merge, prefill=prefill)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("state", REPLICATED)
@pytest.mark.parametrize("family", WINDOWED)
async def test_tokens_equal_generate_with_replicated_windows_in_the_full_product(shorts, family, state, world_size):
    await check_row(shorts(family), REPLICATED[state], world_size, window_keys="replicated")


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
async def test_keys_that_are_split_say_the_same(shorts, family):
    """The kernels of CPUs read the document; those that are held answer, and split its keys."""
    golden, _ = ask_plain(shorts(family).folder, draw_ids(LONG), NEW)
    sampled, launches, ranks = Sampled(), Launches(), []

    def watch(number, rank):
        sampled.watch(number, rank)
        ranks.append(rank)

    config = config_for(golden.folder, block_size=64, kv_bytes=1 << 20)
    async with running(config, watch) as engine:
        await ingest(engine, "book", golden.prompt[:-QUESTION])
        use_kernels(ranks[0], triton(launches))
        output = [await say(engine, golden, LONG - QUESTION, "book")]
    assert launches.names == ATTENDING
    assert output[0][1] == golden.tokens
    assert largest_error(output, sampled) <= LOGIT_TOLERANCE


@pytest.fixture
def small_rounds(monkeypatch):
    """Flash kernels are used from a few rows and keys on."""
    monkeypatch.setattr(varlen_plan, "MIN_ROWS", 3)
    monkeypatch.setattr(varlen_plan, "MIN_KEYS", 3)


async def logits(short, make, **settings):
    """Logits of a service that follows the prompt, and its launches."""
    with served_by(make) as launches:
        found = await served_logits(short.goldens[0], length=LENGTH, **{**SETTINGS, "merge": "exchange", **settings})
    return found, launches.names


@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize(
    ("family", "make", "settings"),
    [
        ("llama", triton, {"dtype": "bfloat16"}),
        ("llama", flash, {"dtype": "bfloat16"}),
        ("gemma3", flash, {"dtype": "float16", "world_size": 2}),
        *thinned(
            itertools.product(
                DIFFERENT,
                (triton, flash),
                [{"dtype": dtype, "world_size": n} for dtype in ("bfloat16", "float16") for n in (1, 2)],
            ),
            0,
        ),
    ],
)
async def test_half_precision_stays_close_to_the_plain_model(shorts, family, make, settings):
    short = shorts(family)
    exact, plain = (plain_logits(short.goldens[0], dtype, LENGTH) for dtype in ("float32", settings["dtype"]))
    found, names = await logits(short, make, **settings)
    assert ratio(short.goldens[0], found, plain, exact) <= ALLOWED
    if family == "llama":  # the other families may have no reads here that flash kernels accept
        assert ("fold_rounds" in names) == (make is flash)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"block_size": 16}),
        ("gemma2", {"world_size": 2}),
        *thinned(
            itertools.product(
                (family for family in DIFFERENT if family != "deepseek_v3"),
                [{"world_size": n, "block_size": size} for n in (1, 2) for size in (4, 16)],
            ),
            0,
        ),
    ],
)
async def test_keys_in_8_bits_say_what_they_say_to_the_cpu(shorts, family, settings):
    """The rounding error is the same, except where a last bit crosses the edge between two steps."""
    short = shorts(family)
    wanted = await served_logits(short.goldens[0], length=LENGTH, kv_dtype="int8", **{**SETTINGS, **settings})
    found, names = await logits(short, triton, kv_dtype="int8", **settings)
    assert {"store_int8", "attend_items_int8"} <= names
    exact = plain_logits(short.goldens[0], length=LENGTH)
    apart, off = (torch.linalg.vector_norm(wanted - logits) for logits in (found, exact))
    assert 20 * apart <= off


class Capless(TritonKernels):
    """Kernels that lose the soft cap."""

    def attend(self, q_THD, k_KSD, v_KSV, reads, scale, softcap=None):
        return super().attend(q_THD, k_KSD, v_KSV, reads, scale)


class Forgetful(TritonKernels):
    """Kernels that lose a partial, the last one that is folded."""

    def fold(self, packed_NTHC):
        return super().fold(packed_NTHC[:-1])


@pytest.mark.parametrize(("family", "wrong", "world_size"), [("gemma2", Capless, 1), ("gpt_oss", Forgetful, 2)])
async def test_kernels_that_lose_something_are_noticed(shorts, family, wrong, world_size):
    output, sampled, _ = await served(
        shorts(family), STATES["fresh"], lambda launcher: wrong(NUM_MULTIPROCESSORS, launcher), world_size=world_size
    )
    assert largest_error(output, sampled) > 100 * LOGIT_TOLERANCE
