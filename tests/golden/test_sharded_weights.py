"""Weights divided over the ranks: tokens equal `generate`, and each rank holds and reads its part only."""

import errno
import itertools
import os
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.predict.formulas import Cluster
from bench.predict.sharded_weights import exchanges_of
from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.rank_manager import RankManager
from coordinator.cluster.replacement_supervisor import ReplacementSupervisor
from coordinator.engine.engine import Engine
from coordinator.engine_messages import Prompt, Tokens
from longleaf.attention import Partial
from longleaf.errors import ModelRefused
from longleaf.rank_protocol.verdict import judge
from longleaf.sampling import SamplingParams
from longleaf.shares import NUM_PARTS, even_share
from longleaf.topology import Topology
from longleaf.types import Recovering
from tests.support.golden.asking import MAX_TOKENS, answer, compare, ingest
from tests.support.golden.plain import LOGIT_TOLERANCE, NEW_TOKENS, load_plain
from tests.support.golden.states import CONTEXT_LEN, STATES, Logits, running
from tests.support.loopback import LoopbackComm
from tests.support.on_threads import on_groups
from tests.support.running import running as run
from tests.support.running import running_on
from tests.support.thinned import thinned
from tests.support.threads import ThreadRanks, config_for, make_spec
from workers import rank as rank_module
from workers.__main__ import main
from workers.model.meta_model import outline
from workers.model.model import read_config
from workers.model.sharded_model import load_share
from workers.model.weight_parts import plan_weights
from workers.model.weight_reader import WeightReader
from workers.model.weight_shares import Share
from workers.rank import Rank
from zoo.families import FAMILIES

MERGES, CHUNKS, PREFILLS = ("gather", "exchange", "butterfly"), (64, 300, 4096), ("auto", "queries", "keys")
WAYS = zip(*map(itertools.cycle, (MERGES, CHUNKS, STATES, PREFILLS)))  # noqa: B905
COVER = [(family, world_size, *way) for (family, world_size), way in zip(itertools.product(FAMILIES, (2, 3)), WAYS)]  # noqa: B905
COVER += [(family, 4, *way) for family, way in zip(FAMILIES, WAYS)]  # noqa: B905
SINGLE = ("llama", "qwen2.5", "mixtral", "gpt_oss", "gpt2")
"""Families without a vision part or latents, which are on every rank."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "world_size", "merge", "chunk_size", "state", "prefill"), COVER)
async def test_tokens_equal_generate(goldens, family, world_size, merge, chunk_size, state, prefill):
    golden = goldens(family)
    settings = {"merge": merge, "chunk_size": chunk_size, "prefill": prefill, "weights": "sharded"}
    logits = Logits()
    async with running(config_for(golden.folder, world_size=world_size, **settings), logits.watch) as engine:
        answers = await STATES[state](engine, golden.prompt)
    assert answers == [golden.tokens] * len(answers)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


class ReadingRank(Rank):
    """After its start it holds parts in many places, as after several losses."""

    def load(self, parts: Sequence[int] = ()) -> None:
        super().load(parts)
        self.hold([part for part in range(NUM_PARTS) if part // 7 % 2 == self._spec.member])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "state"), list(zip(FAMILIES, itertools.cycle(STATES))))
async def test_tokens_equal_generate_after_losses(goldens, family, state):
    golden, logits = goldens(family), Logits()
    config = config_for(golden.folder, world_size=2, weights="sharded", chunk_size=300)
    engine = Engine(ThreadRanks(config, logits.watch, make_rank=ReadingRank), config, max_positions=8192)
    async with run(engine) as found:
        answers = await STATES[state](found.engine, golden.prompt)
    assert answers == [golden.tokens] * len(answers)
    difference = (logits.first(NEW_TOKENS) - golden.logits_TV).abs().max()
    assert difference <= LOGIT_TOLERANCE * golden.logits_TV.std()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
async def test_one_rank_may_hold_all_parts(goldens, family):
    golden = goldens(family)
    rank = Rank(make_spec(0, config_for(golden.folder, world_size=2, weights="sharded", verify_model=False)))
    rank.load(even_share(1, 2))
    rank.hold(range(NUM_PARTS))
    rank.connect(None)
    whole = load_plain(golden.folder)
    ids = torch.tensor([golden.prompt[:9]])
    with pytest.raises(RuntimeError, match="within an epoch"):
        rank.hold(even_share(1, 2))
    rows = rank.model.module.get_input_embeddings()(ids)
    torch.testing.assert_close(rows, whole.get_input_embeddings()(ids))
    rank.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"dtype": "bfloat16"}),
        ("mixtral", {"dtype": "bfloat16"}),
        ("gemma3", {"window_keys": "replicated"}),
        ("qwen2", {"kv_dtype": "int8"}),
        ("llama", {}),
    ],
)
async def test_verification_passes(goldens, family, settings):
    """All ranks compute plain attention together."""
    golden = goldens(family)
    async with running(config_for(golden.folder, world_size=3, weights="sharded", **settings)) as engine:
        found = await compare(engine, golden.prompt[:300])
        assert (found.failure, found.compared_tokens) == ("", MAX_TOKENS)
        assert judge(found).passed
        assert len(await answer(engine, golden.prompt[:70])) == NEW_TOKENS


async def test_verification_notices_a_wrong_rank(goldens):
    golden = goldens("llama")

    def spoil(number, rank):
        if number == 1:
            store = rank.pool.store
            rank.pool.store = lambda *given: store(*given[:-1], 2 * given[-1])

    async with running(config_for(golden.folder, world_size=3, weights="sharded"), spoil) as engine:
        assert not judge(await compare(engine, golden.prompt[:300])).passed


def test_a_model_that_is_not_exact_is_refused_when_its_first_group_forms(goldens):
    config = config_for(goldens("llama").folder, world_size=2, weights="sharded")
    ranks = [Rank(make_spec(number, config)) for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.load(even_share(number, 2))
    plain = ranks[1].backend.attend
    ranks[1].backend.attend = lambda *inputs: Partial.identity(*plain(*inputs).out_THD.shape)
    with pytest.raises(ModelRefused, match="LlamaForCausalLM is not exact here"):
        on_groups(Topology(("here",) * 2), lambda number, groups: ranks[number].connect(groups))


async def test_a_lost_share_of_a_sum_is_noticed(goldens):
    """The tests above can fail: when one rank's addends are lost, the text changes."""
    golden = goldens("llama")

    def spoil(number, rank):
        if number == 1:
            [*_, last] = (part for name, part in rank.model.module.named_modules() if name.endswith("down_proj.local"))
            last.weight.data.zero_()

    async with running(config_for(golden.folder, world_size=2, weights="sharded"), spoil) as engine:
        assert await answer(engine, golden.prompt) != golden.tokens


NUM_LAYERS = 4
EXCHANGES = {
    "llama": 4 * 4
    + 3,  # per layer: queries, keys and values; merge; output; MLP. Beside layers: embedding, head, tokens
    "phi3": 5 * 4 + 3,  # fused projections have no plan: two for the MLP
    "gpt2": 5 * 4 + 4,  # two embeddings
    "mixtral": 4 * 4 + 3,
    "glm4_moe": 4 * 4 + 3 + 3,  # shared experts in three layers
    "gemma4": 25,  # and layers of their own for inputs of each layer
    "deepseek_v3": 5 * 4 + 3 + 3,  # queries through a latent
    "glm4_moe_lite": 29,
}
"""By family, for models of 4 layers."""


@pytest.fixture
def exchanged(monkeypatch):
    """The exchanges of rank 0: the name of the operation, and the bytes that the rank hands over."""
    found = list[tuple[str, int]]()

    def count(name):
        method = getattr(LoopbackComm, name)

        def counted(comm, tensor, *given):
            if comm.rank == 0:
                found.append((name, tensor.nbytes))
            return method(comm, tensor, *given)

        monkeypatch.setattr(LoopbackComm, name, counted)

    for name in ("all_gather", "all_to_all", "all_reduce", "broadcast"):
        count(name)
    return found


async def exchanges_of_a_step(golden, world_size, exchanged):
    """The exchanges of a decode step of one row, sorted."""
    settings = {"weights": "sharded", "merge": "gather", "max_draft_tokens": 0, "verify_model": False}
    counts = list[Counter]()
    async with running(config_for(golden.folder, world_size=world_size, **settings)) as engine:
        for num_new in (5, 5, 6):  # the first answer also reads the prompt
            exchanged.clear()
            await answer(engine, golden.prompt[:40], num_new=num_new)
            counts.append(Counter(exchanged))
    return sorted((counts[2] - counts[1]).elements())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", EXCHANGES)
async def test_exchanges_of_a_decode_step(goldens, exchanged, family):
    """The preflight counts those that the ranks begin."""
    golden = goldens(family)
    found = await exchanges_of_a_step(golden, 2, exchanged)
    plan = plan_weights(outline(str(golden.folder), "float32"), 2)
    derived = NUM_LAYERS + plan.exchanges.total + 1
    assert len(found) == derived == EXCHANGES[family]


FENCE = "all_gather", 8
"""The ranks compare whether their keys are finite at the end of a chunk."""
PREDICTED = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "phi3", "mixtral", "glm4_moe", "qwen3")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", PREDICTED)
async def test_bytes_of_a_decode_step_are_those_of_the_formulas(goldens, exchanged, family, world_size):
    """The slices of aligned shares differ by up to 2 %."""
    golden = goldens(family)
    found = await exchanges_of_a_step(golden, world_size, exchanged)
    predicted = exchanges_of(read_config(str(golden.folder)), itemsize=4)
    expected = sorted((one.kind, one.num_bytes) for one in predicted.decode(1, Cluster(1, world_size)))
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    assert [size for _, size in found] == pytest.approx([size for _, size in expected], rel=0.02)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3"])
async def test_bytes_of_a_chunk_are_those_of_the_formulas(goldens, exchanged, family, world_size):
    """The difference between two documents, one of which has another chunk. Each layer but the last also gathers
    queries, and returns their partials.
    """
    golden = goldens(family)
    settings = {"weights": "sharded", "merge": "gather", "prefill": "queries", "verify_model": False}
    counts = list[Counter]()
    config = config_for(golden.folder, world_size=world_size, chunk_size=64 * world_size, **settings)
    async with running(config) as engine:
        for num_chunks in (1, 2):
            exchanged.clear()
            await ingest(engine, f"book{num_chunks}", golden.prompt[: num_chunks * config.chunk_size])
            counts.append(Counter(exchanged))
    predicted = exchanges_of(read_config(str(golden.folder)), itemsize=4)
    expected = [(one.kind, one.num_bytes) for one in predicted.prefill(64, Cluster(1, world_size))]
    attention = replace(predicted.attention, rows=64 * world_size)
    expected += [("all_gather", attention.out_bytes // world_size)] * (NUM_LAYERS - 1)
    expected += [("all_to_all", attention.out_bytes + attention.lse_bytes)] * (NUM_LAYERS - 1)
    found = sorted(each for each in (counts[1] - counts[0]).elements() if each != FENCE)
    assert [kind for kind, _ in found] == [kind for kind, _ in sorted(expected)]
    assert [size for _, size in found] == pytest.approx([size for _, size in sorted(expected)], rel=0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("family", thinned(SINGLE, len(SINGLE)))
def test_a_rank_holds_and_reads_its_part(goldens, family, count):
    folder = goldens(family).folder
    whole = sum(parameter.nbytes for parameter in load_plain(folder).parameters())
    for index in range(count):
        found = load_share(str(folder), "float32", "cpu", Share.even(index, count))
        local_bytes = sum(parameter.nbytes for parameter in found.model.module.parameters())
        every = sum(
            parameter.nbytes for name, parameter in load_plain(folder).named_parameters() if name not in found.plan.cuts
        )
        assert local_bytes - every <= 1.02 * whole / count
        assert every < 0.02 * whole
        assert found.num_bytes_read <= 1.02 * local_bytes


def test_one_rank_holds_all_weights(goldens):
    rank = Rank(make_spec(0, config_for(goldens("llama").folder, weights="sharded")))
    rank.load()
    assert rank.model.exchange is None
    rank.close()


HEALED = (set(range(120)), set(range(120, 240))), (set(range(0, 240, 2)), set(range(1, 240, 2)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shares", HEALED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_that_holds_other_parts_has_their_bits(goldens, family, shares):
    """It reads only parts that it lacks, and after the return has the same parameters as at first."""
    folder = str(goldens(family).folder)
    found = load_share(folder, "float32", "cpu", Share.even(1, 3))
    first = {name: parameter.clone() for name, parameter in found.model.module.named_parameters()}
    present = set(even_share(1, 3))
    for parts in shares:
        lacking = load_share(folder, "float32", "cpu", Share(tuple(sorted(parts - present)), 3))
        assert found.weights.hold(sorted(parts)) == share_bytes_of(lacking)
        present = parts
        wanted = load_share(folder, "float32", "cpu", Share(tuple(sorted(parts)), 3))
        for (name, one), (_, other) in zip(
            found.model.module.named_parameters(), wanted.model.module.named_parameters(), strict=True
        ):
            assert torch.equal(one, other), name
    found.weights.hold(even_share(1, 3))
    assert all(torch.equal(one, first[name]) for name, one in found.model.module.named_parameters())


def share_bytes_of(found):
    """Bytes of the divided parameters that a rank holds."""
    return found.weights.num_bytes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parts_given_up_are_in_memory_until_the_epoch_begins(goldens, family):
    found = load_share(str(goldens(family).folder), "float32", "cpu", Share.even(0, 2))
    assert found.weights.hold(range(80)) == 0
    assert found.weights.hold(range(120)) == 0
    found.weights.hold(range(80))
    found.weights.drop_surplus()
    assert 0 < found.weights.hold(range(120)) <= 40 / 80 * share_bytes_of(found) * 1.05


def loaded_with_room(folder):
    """Rank 0 of three, with its own share."""
    rank = Rank(make_spec(0, config_for(folder, world_size=3, weights="sharded", spare_ranks=1, verify_model=False)))
    rank.load(even_share(0, 3))
    return rank


def test_weights_of_another_checkpoint_do_not_replace_lost_ones(goldens, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(goldens("llama").folder, folder)
    rank, file = loaded_with_room(folder), folder / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ModelRefused, match=f"{folder} has changed since the start"):
        rank.hold(range(120))
    rank.close()


def test_weights_of_a_new_copy_of_the_checkpoint_replace_lost_ones(goldens, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(goldens("llama").folder, folder)
    rank = loaded_with_room(folder)
    shutil.rmtree(folder)
    shutil.copytree(goldens("llama").folder, folder, copy_function=shutil.copyfile)
    assert rank.hold(range(120)) > 0
    rank.close()


def test_a_rank_without_the_files_cannot_read_lost_weights(goldens, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(goldens("llama").folder, folder)
    rank = loaded_with_room(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=str(folder)):
        rank.hold(range(120))
    rank.close()


def test_weights_are_read_again_after_an_error_of_the_storage(goldens, monkeypatch):
    """The other ranks may share the storage, and one such error would end them all."""
    monkeypatch.setattr(rank_module, "FIRST_RETRY_SECONDS", 0.0)
    rank, read, errors = loaded_with_room(goldens("llama").folder), WeightReader.read, [errno.EIO] * 3

    def fail(reader, descriptor, start, buffer):
        if errors:
            raise OSError(errors.pop(), "input/output error")
        read(reader, descriptor, start, buffer)

    monkeypatch.setattr(WeightReader, "read", fail)
    assert rank.hold(range(120)) > 0
    assert not errors
    errors += [errno.EIO] * rank_module.READ_ATTEMPTS
    with pytest.raises((OSError, ModelRefused), match="input/output error"):
        rank.hold(range(200))
    assert not errors
    rank.close()


KILLED = list(itertools.product((1, 0), (0, 1)))


@pytest.mark.timeout(240)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("lost", "spare_ranks"), KILLED)
async def test_an_answer_goes_on_after_a_loss(goldens, lost, spare_ranks):
    """With room the other ranks read a sixth each; without, the answer waits for the replacement."""
    golden = goldens("llama")
    settings = {"chunk_size": 300, "weights": "sharded", "verify_model": False, "spare_ranks": spare_ranks}
    config = config_for(golden.folder, world_size=3, **settings)
    fleet = LocalFleet(main)
    control = RankManager(config, await fleet.reserve(config), fleet.kill)
    async with running_on(fleet, control, config, max_positions=8192) as found:
        supervisor = None if spare_ranks else ReplacementSupervisor(control.registry, fleet, config, found.readies)
        await ingest(found.engine, "book", golden.prompt[:CONTEXT_LEN])
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_end_token=True)
        tokens, missing = list[int](), list[float]()
        prompt = Prompt(context="book", token_ids=golden.prompt[CONTEXT_LEN:], sampling=sampling)
        async for event in found.engine.submit(prompt):
            if isinstance(event, Tokens):
                if not tokens:
                    os.kill(control.hellos[lost].pid, signal.SIGKILL)
                tokens += event.token_ids
            if isinstance(event, Recovering):
                missing.append(event.missing_weights)
        assert tuple(tokens) == golden.tokens
        assert missing[0] == pytest.approx(1 / 3)
        assert control.num_lost == 1
        assert {ready.weight_parts for ready in found.readies} == {80}
        read = [member.num_bytes_read for member in control.registry]
        if supervisor is None:
            whole = sum(parameter.nbytes for parameter in load_plain(golden.folder).parameters())
            assert len(control.group.members) == 2
            assert 0 < max(read) <= (1 / 6 + 1 / 240) * whole
            supervisor = ReplacementSupervisor(control.registry, fleet, config, found.readies)
            await control.registry.wait_until(lambda: len(control.group.members) == 3)
        assert len(control.group.members) == 3
        assert await answer(found.engine, golden.prompt) == golden.tokens
        await supervisor.close()
