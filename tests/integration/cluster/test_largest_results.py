"""The largest possible step result of a rank is accepted; larger messages close the connection and are not
delivered."""

import asyncio

import pytest

from coordinator.cluster.rank_manager import RankManager
from coordinator.scheduling.row_selection import MAX_PROBED
from longleaf.config import EngineConfig
from longleaf.rank_protocol.step import (
    MAX_ATTRIBUTED_SPANS,
    NUM_OTHER_SHARES,
    SPAN_BYTES,
    Attention,
    Decode,
    StepPlan,
    StepResult,
)
from longleaf.sampling import MAX_LOGPROBS, Logprobs, Token, TokenLogprob
from tests.support.members import ScriptedMember

pytestmark = pytest.mark.timeout(60)

LARGEST = 2**31 - 1
ALTERNATIVES = (TokenLogprob(LARGEST, -1e300),) * MAX_LOGPROBS


def attention(num_spans: int) -> Attention:
    numbers = bytes(SPAN_BYTES // 3 * num_spans)
    return Attention(numbers + bytes(4 * NUM_OTHER_SHARES), numbers, numbers)


@pytest.mark.parametrize("max_sequences", [1, 64])
@pytest.mark.parametrize("max_drafts", [0, 31])
async def test_largest_possible_step_result_is_accepted(max_sequences: int, max_drafts: int) -> None:
    control = RankManager(EngineConfig(model="none", max_sequences=max_sequences, max_draft_tokens=max_drafts))
    rank = ScriptedMember(control.invitations[0], 0)
    await control.start(1)
    step = asyncio.ensure_future(control.group.step(StepPlan(1, 1, Decode(()))))
    tokens = (Token(LARGEST, Logprobs(-1e300, ALTERNATIVES)),) * (1 + max_drafts)
    reported = StepResult(
        1,
        1,
        tokens=dict.fromkeys(range(LARGEST, LARGEST + max_sequences), tokens),
        attention=dict.fromkeys(
            range(LARGEST, LARGEST + max_sequences),
            (attention(MAX_ATTRIBUTED_SPANS // max_sequences // (1 + max_drafts)),) * (1 + max_drafts),
        ),
        scores=dict.fromkeys(range(LARGEST, LARGEST + max_sequences), (-1e300,) * (MAX_PROBED // max_sequences)),
    )
    await rank.send(reported)
    async with asyncio.timeout(10):
        assert await step == reported
    await rank.close()
    await control.close()
