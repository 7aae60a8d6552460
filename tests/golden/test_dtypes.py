"""Weights of every numeric type: the distance from float32 is at most twice that of the plain model in that type."""

import pytest

from tests.support.golden.plain import LIVELY
from tests.support.golden.rounding import ALLOWED, plain_logits, ratio, served_logits
from zoo.families import FAMILIES


async def check_half_precision(golden, dtype):
    found = await served_logits(golden, world_size=3, dtype=dtype)
    assert ratio(golden, found, plain_logits(golden, dtype), plain_logits(golden)) <= ALLOWED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", LIVELY)
async def test_half_precision_stays_close_to_the_plain_model(goldens, family, dtype):
    await check_half_precision(goldens(family), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LIVELY])
async def test_half_precision_of_every_family(goldens, family, dtype):
    await check_half_precision(goldens(family), dtype)
