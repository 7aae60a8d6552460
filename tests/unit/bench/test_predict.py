"""The latency model: formulas against what merges do and what the paper counts, the fit against planted constants."""

import json
import random
import threading

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.predict import __main__ as predict
from bench.predict import constants as c
from bench.predict.cluster import checks, disagreements, latencies, speed_ups, table_1
from bench.predict.fit import HELD_OUT, Point, fit, solve
from bench.predict.formulas import (
    NOTHING,
    Cluster,
    Operation,
    Shape,
    Terms,
    Work,
    merge_operations,
    query_ring_work,
    ring_work,
    sent_bytes,
    tree_work,
)
from bench.predict.libraries import gloo, nccl, shared_memory
from bench.predict.measured import AttentionRow, Machine, MergeRow, Missing, fits, load
from longleaf.attention import Partial
from longleaf.comm import Groups
from longleaf.comm.loopback import loopback_groups
from longleaf.kernels.dense import Dense
from longleaf.topology import Topology
from longleaf.tree import MERGES, Wire, make_merge

LIBRARIES = pytest.mark.parametrize("library", [nccl, gloo, shared_memory], ids=lambda library: library.__name__)
CLUSTERS = (Cluster(1, 1), Cluster(1, 3), Cluster(1, 4), Cluster(2, 2), Cluster(3, 2))
SHAPE = Shape(rows=2, heads=5, kv_heads=5, dim=4, key_width=4)


class CountingComm:
    """Notes the operations that pass through a Comm."""

    def __init__(self, comm, scope, seen):
        self.rank, self.world_size = comm.rank, comm.world_size
        self._comm, self._scope, self._seen = comm, scope, seen

    def __getattr__(self, kind):
        def call(tensor, *arguments):
            self._seen.append((kind, self._scope, tensor.numel() * tensor.element_size()))
            return getattr(self._comm, kind)(tensor, *arguments)

        return call


def counted(name, cluster, shape):
    """What rank 0 does in a real merge."""
    topology = Topology(tuple(str(rank // cluster.ranks_per_node) for rank in range(cluster.world_size)))
    seen = []

    def run(rank, groups):
        scopes = {"world": groups.world, "node": groups.node, "rail": groups.rail}
        notes = seen if rank == 0 else []
        world, node, rail = (comm and CountingComm(comm, scope, notes) for scope, comm in scopes.items())
        partial = Partial(torch.zeros(shape.rows, shape.heads, shape.dim), torch.zeros(shape.rows, shape.heads))
        make_merge(name, Groups(topology, world, node, rail), Wire(Dense())).to_all(partial)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(loopback_groups(topology))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c.num_nodes}x{c.ranks_per_node}")
def test_the_formulas_count_what_the_merges_do(name, cluster):
    wanted = [(op.kind, op.scope, pytest.approx(op.num_bytes)) for op in merge_operations(name, cluster, SHAPE)]
    if name == "butterfly":
        wanted = [("permute", "world", size) for _, _, size in wanted]
    assert counted(name, cluster, SHAPE) == wanted


def test_a_merge_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="no formula for guess"):
        merge_operations("guess", Cluster(1, 2), SHAPE)


def test_volumes_of_the_papers_example():
    """640k tokens, 8 ranks, 16 heads of 128 (section 6.3): 2.62e9 elements against 3640."""
    cluster, shape, length = Cluster(1, 8), c.PAPER_SHAPE, 640_000
    tree = sum(sent_bytes(op, cluster) for op in merge_operations("paper", cluster, shape)) / 4
    assert tree == 3640
    work = ring_work(cluster, shape, length, nccl)
    elements = work.num_hops * work.hop.near_bytes / shape.key_width
    assert elements == pytest.approx(2.62144e9 * 7 / 8)  # the paper counts p hops, p - 1 suffice


def test_rounds_by_hand():
    """NCCL's tuner on 2 x 8 H100 prints 25.2 us for a small all-reduce; 16 nodes need 4 steps up and 4 down."""
    reduce = Operation("all_reduce", "world", 16)
    assert nccl(reduce, Cluster(2, 8)).seconds(c.published("tuner")._replace(far_bytes=0)) == pytest.approx(25.2e-6)
    assert nccl(reduce, Cluster(16, 8))[1:4] == (1, 14, 8)
    assert nccl(Operation("all_gather", "world", 16), Cluster(16, 8))[1:4] == (1, 112, 15)
    assert gloo(reduce, Cluster(1, 4)) == Terms(operations=1, near_rounds=6, messages=12, near_bytes=24)
    assert gloo(Operation("all_to_all", "world", 16), Cluster(1, 4)) == Terms(
        operations=1, near_rounds=1, messages=3, near_bytes=12
    )
    scopes = [op.scope for op in merge_operations("butterfly", Cluster(2, 4), SHAPE)]
    assert scopes == ["node", "node", "world"]


def test_ranks_of_a_node_that_share_a_link_wait_for_each_other():
    private, shared = Cluster(2, 4), Cluster(2, 4, is_uplink_shared=True)
    for operation, users in (
        (Operation("all_to_all", "world", 64), 4),
        (Operation("swap", "world", 64), 4),
        (Operation("all_gather", "rail", 64), 4),
        (Operation("shift", "world", 64), 1),
        (Operation("all_reduce", "world", 64), 1),
    ):
        assert nccl(operation, shared).far_bytes == users * nccl(operation, private).far_bytes > 0


@LIBRARIES
@pytest.mark.parametrize("name", MERGES)
def test_merges_cost_more_with_more_rows_and_nothing_of_the_context(library, name):
    constants = Terms(*[1.0] * len(Terms._fields))
    for cluster in (Cluster(1, 4), Cluster(2, 2), Cluster(4, 4)):
        works = [
            tree_work(name, cluster, Shape(rows=r, heads=8, kv_heads=2, dim=8, key_width=4), 0, library) for r in (1, 2)
        ]
        assert works[0].seconds(constants) < works[1].seconds(constants)
        long = tree_work(name, cluster, SHAPE, 1e6, library).serial._replace(key_bytes=0)
        assert long == tree_work(name, cluster, SHAPE, 0, library).serial


@LIBRARIES
@given(nodes=st.integers(1, 4), ranks=st.integers(1, 4), tokens=st.integers(1_000, 100_000))
def test_ring_grows_with_the_context_and_the_ranks(library, nodes, ranks, tokens):
    constants = c.published("tuner")._replace(joins=1e-6)
    for ring in (ring_work, query_ring_work):
        one, two = (ring(Cluster(nodes, ranks), SHAPE, n, library).seconds(constants) for n in (tokens, 2 * tokens))
        assert one < two
    works = [ring_work(Cluster(n, ranks), SHAPE, tokens * n * ranks, library) for n in (nodes, nodes + 1)]
    assert works[0].seconds(constants) < works[1].seconds(constants)


@pytest.mark.parametrize("name", MERGES)
def test_one_rank_by_itself_only_attends(name):
    alone = Terms(joins=1, key_bytes=SHAPE.kv_bytes(100))
    for work in (tree_work(name, Cluster(1, 1), SHAPE, 100, nccl), query_ring_work(Cluster(1, 1), SHAPE, 100, nccl)):
        assert work == Work(alone)
    assert ring_work(Cluster(1, 1), SHAPE, 100, nccl).critical(c.published("tuner")) == alone


def test_while_keys_travel_a_rank_computes():
    work = Work(Terms(joins=1), 3, Terms(far_bytes=10), Terms(key_bytes=4))
    assert work.seconds(Terms(joins=1, far_bytes=1, key_bytes=1)) == 1 + 3 * 10
    assert work.seconds(Terms(joins=1, far_bytes=1, key_bytes=5)) == 1 + 3 * 20


PLANTED = Terms(joins=2e-5, operations=4e-5, near_rounds=3e-5, messages=6e-6, near_bytes=4e-10, key_bytes=1e-10)


def synthetic(noise=0.0):
    """Latencies that planted constants give for all merges and the ring."""
    rng = random.Random(0)
    works = [
        (f"{name} {size} {rows}", tree_work(name, Cluster(1, size), shape, tokens, gloo))
        for name in MERGES
        for size in (2, 3, 4, 8)
        for rows in (1, 64)
        for tokens in (0, 100_000)
        if (shape := Shape(rows=rows, heads=16, kv_heads=2, dim=128, key_width=4))
    ]
    works += [
        (f"ring {size} {n}", ring_work(Cluster(1, size), Shape(heads=16, kv_heads=2, dim=128, key_width=4), n, gloo))
        for size in (2, 4)
        for n in (1_000, 100_000)
    ]
    return [Point(name, work, work.seconds(PLANTED) * rng.uniform(1 - noise, 1 + noise)) for name, work in works]


def test_the_fit_finds_planted_constants():
    found = fit(synthetic(), seed=1)
    assert found.constants == pytest.approx(PLANTED, rel=1e-4)
    assert found.held_out.worst < 1e-4
    assert found.held_out.num_points == round(HELD_OUT * len(synthetic()))


def test_noise_shows_in_the_error_and_hardly_in_the_constants():
    found = fit(synthetic(noise=0.1), seed=1)
    assert 0.02 < found.held_out.median < found.held_out.worst < 0.2
    assert found.constants.near_bytes == pytest.approx(PLANTED.near_bytes, rel=0.1)
    assert min(found.constants) >= 0


def test_what_is_held_out_follows_from_the_seed():
    points = synthetic(noise=0.1)
    assert fit(points, seed=3) == fit(list(points), seed=3)
    assert fit(points, seed=3).held_out != fit(points, seed=4).held_out


def test_no_constant_is_negative():
    works = [Work(Terms(joins=1, operations=n)) for n in (1, 2, 3)]
    falling = [Point("", work, seconds) for work, seconds in zip(works, (3.0, 2.0, 1.0), strict=True)]
    found = solve(falling)
    assert found.operations == 0
    assert 1 < found.joins < 3


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="3 points are too few for 2 constants"):
        fit([Point("", Work(Terms(joins=1, operations=n)), 1.0) for n in (1, 2, 3)], seed=0)


def test_the_papers_cluster_is_modelled_beside_what_the_paper_says():
    rows = latencies()
    assert {row["kind"] for row in rows} == {"modelled"}
    assert len(rows) == 2 * len(c.CLUSTERS) * len(c.LENGTHS) * (len(MERGES) + 2)
    found = speed_ups(rows)
    assert [row["published"] for row in found if "published" in row] == [8.0, 8.0]
    last = next(row for row in found if "published" in row)
    ring, tree = (
        row["latency_us"]
        for method in ("ring", "paper")
        for row in rows
        if (row["cluster"], row["context_tokens"], row["method"]) == ("16x8", 5_120_000, method)
        and row["latencies"] == last["latencies"]
    )
    common = last["common_cost_s"] * 1e6
    assert (ring + common) / (tree + common) == pytest.approx(8, rel=0.01)
    assert len(disagreements(found, table_1())) == 4


def test_every_published_number_has_a_source():
    assert all(row["source"] for row in (*c.figures(), *checks(), *table_1()))
    tuner = checks()[0]
    assert tuner["modelled_us"] == pytest.approx(tuner["published_us"], rel=0.01)
    assert c.published("solved").seconds(NOTHING) == 0
    assert nccl(Operation("all_reduce", "world", 0), Cluster(2, 8)).seconds(c.published("solved")) == pytest.approx(
        47e-6
    )


def merge_rows(transport="gloo", *, cores=2):
    """Rows as bench.merge writes them, with latencies that planted constants give."""
    rows = [
        {"merge": name, "transport": transport, "world_size": size, "nodes": nodes, "batch": batch, "heads": 16}
        for name in MERGES
        for size, nodes in ((2, 1), (4, 1), (4, 2), (8, 2))
        for batch in (1, 16, 64)
    ]
    rows = [{**row, "head_dim": 128, "latency_us_median": 1.0, "machine": {"logical_cores": cores}} for row in rows]
    points = [msgspec.convert(row, MergeRow).point() for row in rows]
    planted = PLANTED._replace(far_rounds=2e-4, far_bytes=1e-9)
    return [
        {**row, "latency_us_median": point.work.seconds(planted) * 1e6} for row, point in zip(rows, points, strict=True)
    ]


def write(folder, name, rows):
    (folder / name).write_text(json.dumps(rows))
    return folder / name


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_rows_of_one_transport_are_fitted_by_themselves(tmp_path, transport):
    rows = load(write(tmp_path, "merge.json", {"rows": merge_rows(transport), "machine": {"logical_cores": 2}}))
    (found,) = fits(rows, seed=0)
    assert found["group"] == f"merge, {transport}"
    assert found["held_out"]["worst_relative_error"] < 0.01
    assert found["constants"]["near_bytes_per_s"] == pytest.approx(1 / PLANTED.near_bytes, rel=0.01)
    assert ("far_rounds_us" in found["constants"]) == (transport == "shared_memory")


def test_ranks_that_share_a_processor_take_turns():
    row = msgspec.convert(merge_rows()[-1], MergeRow)
    alone, shared = (msgspec.structs.replace(row, machine=Machine(cores)).point().work.serial for cores in (8, 2))
    assert shared.messages == 4 * alone.messages
    assert shared.near_rounds == alone.near_rounds > 0
    assert alone.far_bytes == shared.far_bytes == 0


def attention_rows(between_gbit):
    """Rows as bench.attention writes them on two hosts, with latencies that planted constants and the rate give."""
    rows = [
        {"method": method, "merge": merge, "world_size": size, "nodes": min(size, 2), "context_tokens": tokens}
        for method, merge in (("tree", "gather"), ("paper", None), ("ring", None), ("ring_pass_q", None))
        for size in (2, 4, 8)
        for tokens in (4_000, 64_000, 1_000_000)
    ]
    rows.append({"method": "one_device", "merge": None, "world_size": 1, "nodes": 1, "context_tokens": 64_000})
    common = {"network": f"two-tier 10/{between_gbit}", "between_gbit": between_gbit, "latency_us_median": 1.0}
    rows = [{**row, **common, "heads": 16, "kv_heads": 2, "head_dim": 128} for row in rows]
    planted = PLANTED._replace(far_rounds=2e-4, far_bytes=8e-9)
    seconds = (msgspec.convert(row, AttentionRow).point().work.seconds(planted) for row in rows)
    return [{**row, "latency_us_median": s * 1e6} for row, s in zip(rows, seconds, strict=True)]


def test_rows_of_all_rates_give_what_a_link_of_1_gbit_carries(tmp_path):
    rows = attention_rows(1) + attention_rows(10) + attention_rows(0)
    rows.append({**rows[0], "world_size": 3})
    (found,) = fits(load(write(tmp_path, "attention.json", rows)), seed=0)
    assert found["constants"]["far_bytes_per_s"] == pytest.approx(1e9 / 8, rel=0.01)
    assert found["held_out"]["worst_relative_error"] < 0.01
    assert found["fitted_on"]["points"] + found["held_out"]["points"] == len(rows) - 1


def test_a_group_of_few_rows_says_so(tmp_path):
    (found,) = fits(load(write(tmp_path, "merge.json", merge_rows()[:4])), seed=0)
    assert "too few" in found["error"]


@pytest.mark.parametrize("content", [None, "not json", '[{"merge": "paper"}]', "{}"])
@pytest.mark.parametrize("name", ["merge", "attention"])
def test_files_that_are_missing_or_strange_say_how_to_make_them(tmp_path, name, content):
    path = tmp_path / f"{name}.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Missing, match=rf"{name}\.json.*python -m bench\.{name}"):
        load(path)


def test_the_command_prints_both_halves_and_draws(tmp_path, monkeypatch, capsys):
    write(tmp_path, "merge.json", merge_rows())
    monkeypatch.setattr("sys.argv", ["predict", "--json", "--results", str(tmp_path)])
    predict.main()
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert "python -m bench.attention" in output.err
    assert [row["kind"] for row in found["measured_here"]["fits"]] == ["fitted"]
    assert {row["kind"] for row in found["papers_cluster"]["speed_ups"]} == {"modelled"}
    assert (tmp_path / "predict.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["predict", "--results", str(tmp_path)])
    predict.main()
    assert "published: 8" in capsys.readouterr().out
