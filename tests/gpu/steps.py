"""A prefill and decode steps of a small random model: a rank on the GPU against one on the CPU."""

from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu import ground
from tests.gpu.place import Place

BLOCK_SIZE, NUM_ANSWERS = 32, 3
TOLERANCE = 2e-3
"""Of a logprob, in float32."""


def a_model_answers_as_on_the_cpu(place: Place) -> None:
    """Greedy tokens are the same, and logprobs nearly so, in float32."""
    ground.need(ground.NEEDED_BY_RANKS)
    from zoo.checkpoints import make_checkpoint

    with TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), "llama", num_layers=2, hidden=256, num_heads=4, num_kv_heads=2)
        here, there = answer(model, place, on_cpu=False), answer(model, place, on_cpu=True)
    assert [token for token, _ in here] == [token for token, _ in there]
    assert max(abs(a - b) for (_, a), (_, b) in zip(here, there, strict=True)) < TOLERANCE


def answer(model: Path, place: Place, *, on_cpu: bool) -> list[tuple[int, float]]:
    """Ids and logprobs of an answer to a prompt, of which all tokens but the last come as a chunk."""
    from longleaf.config import EngineConfig
    from longleaf.rank_protocol.group_messages import Join
    from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
    from longleaf.rank_protocol.step import Decode, Prefill, Row, SamplingTerms, StepPlan
    from longleaf.runs import Run, ceil_div
    from longleaf.sampling import SamplingParams
    from workers.rank import Rank

    config = EngineConfig(
        model=str(model),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_bytes=16 << 20,
        device="cuda" if place.is_gpu and not on_cpu else "cpu",
    )
    unused = ConnectInfo(address="", server_key=b"", public_key=b"", secret_key=b"")
    where = {"host": "127.0.0.1", "node": "here", "num_ranks_here": 1, "gpu": 0}
    rank = Rank(RankSpec(member=0, config=config, invitation=unused, **where))
    rank.load()
    if not on_cpu:
        rank.backend = place.kernels
    rank.join(Join(1, 0, "", 0, ("here",)))

    def runs(end: int) -> tuple[Run, ...]:
        return (Run(0, 0, end, tuple(range(1, 1 + ceil_div(end, BLOCK_SIZE)))),)

    num_tokens = place.num_prompt
    ids = tuple(3 + i * 7 % 400 for i in range(num_tokens))
    rank.execute(StepPlan(1, 0, Prefill((0,), 0, ids[:-1], runs(num_tokens - 1))))
    first = Row(0, (0,), num_tokens - 1, ids[-1:], runs(num_tokens), 0, SamplingTerms(SamplingParams(num_logprobs=0)))
    more = [Row(0, (), num_tokens + i, (), runs(num_tokens + i + 1), i + 1) for i in range(NUM_ANSWERS - 1)]
    results = [rank.execute(StepPlan(1, 1 + i, Decode((row,)))) for i, row in enumerate([first, *more])]
    return [(token.id, token.logprobs.logprob) for result in results for token in result.tokens[0]]
