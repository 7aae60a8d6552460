"""The measurements of merges and rings: counters, rates, statistics, command lines, tables and the page."""

import json
import os

import pytest

from bench import choose, merge, tree_page
from bench.attention import __main__ as attention
from bench.attention.steps import ONE_DEVICE, PAPER, QUERY_RING, RING, TREE, Size
from bench.harness.hosts import LARGEST_PACKET, LOOPBACK, OWN, TWO_TIER, Network, burst_bytes, rate
from bench.harness.interfaces import parse
from bench.harness.machine import describe
from bench.harness.memory import parse as parse_status
from bench.harness.memory import peak_bytes
from bench.harness.ranks import Placement
from bench.harness.ray_ranks import NETWORK
from bench.harness.timing import latency, slowest
from bench.overhead.step_times import Gap, StepTime, gaps
from bench.predict import __main__ as predict
from bench.scaling import ceiling

COUNTERS = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:     100       1    2    3    4     5          6         7      800       9   10   11   12    13   14   15
 cable:1234567        1    0    0    0     0          0         0 89012345       1    0    0    0     0    0    0
"""


class Deadly(ceiling.Load):
    """Ends the process that computes it."""

    __slots__ = ()

    def speed(self) -> float:
        os._exit(7)


@pytest.mark.slow
def test_a_process_that_dies_is_told():
    with pytest.raises(RuntimeError, match="process 0 ended with exit code 7"):
        ceiling.gain(Deadly(1, 1), 2)


def test_counters_of_interfaces():
    assert parse(COUNTERS) == {"lo": 800, "cable": 89012345}


@pytest.mark.parametrize("text", ["-1", "0.0001", "inf", "nan", "fast"])
def test_rates_that_make_no_sense(text):
    with pytest.raises(ValueError, match=text):
        rate(text)


def test_rates_and_what_may_pass_at_once():
    assert [rate(text) for text in ("0", "0.5", "10")] == [0, 0.5, 10]
    assert burst_bytes(10) == 125_000 > LARGEST_PACKET
    assert 9_000 < burst_bytes(0.001) == burst_bytes(1)


def test_a_turn_lasts_as_long_as_its_slowest_rank():
    assert slowest([{"a": [1, 5], "b": [2]}, {"a": [3, 4], "b": [1]}]) == {"a": [3, 5], "b": [2]}


def test_a_gap_is_that_of_the_rank_that_was_last():
    first = {1: StepTime(0.0, 1.0), 2: StepTime(3.0, 4.0), 3: StepTime(4.25, 6.0), 5: StepTime(8.0, 9.0)}
    second = {1: StepTime(0.0, 2.0), 2: StepTime(2.5, 3.0), 3: StepTime(4.5, 7.0), 5: StepTime(7.5, 8.0)}
    assert gaps([first, second], [1, 2, 3, 5]) == [Gap(0.5, 2.0), Gap(0.25, 3.0)]
    assert gaps([first], [2, 1]) == [Gap(2.0, 3.0)]
    assert gaps([second, first], [1, 3, 5]) == []


def test_latency_is_in_microseconds():
    assert latency([2e-6]) == {"latency_us_median": 2.0, "latency_us_p95": 2.0}
    assert latency([i * 1e-6 for i in range(101)]) == {"latency_us_median": 50.0, "latency_us_p95": 95.0}


def test_the_peak_of_a_call_is_seen_again_after_it_was_freed():
    size = 40 << 20
    found = [peak_bytes(lambda: bytearray(b"x") * size) for _ in range(2)]
    assert all(peak is None or size <= peak < 1.2 * size for peak in found)
    assert peak_bytes(lambda: None) in (None, *range(1 << 20))
    assert parse_status("VmHWM:\t    1900 kB\nVmRSS:\t 12 kB\n", "VmRSS") == 12 * 1024


def test_ranks_are_dealt_over_nodes_and_hosts():
    network = Network(TWO_TIER, "cable", ("a", "b", "c"), 10, 1)
    placement = Placement(8, 3, network)
    assert [placement.namespace(rank) for rank in range(8)] == list("aaabbbcc")
    placement.topology.check(8)
    assert {Placement(4, 2, OWN).namespace(rank) for rank in range(4)} == {None}
    assert len(Placement(4, 2, OWN).topology.node_groups) == 2
    assert [Placement(4, 2, where).counting_ranks for where in (network, OWN)] == [(0, 2), (0,)]


def test_ranks_that_ray_placed_are_where_it_says():
    placement = Placement(3, 0, NETWORK, nodes=("a", "a", "b"))
    assert (str(placement.topology), placement.num_nodes) == ("2 nodes: 2 + 1 ranks = 3", 2)
    assert placement.counting_ranks == (0, 2)


@pytest.mark.parametrize("module", [merge, attention])
def test_what_contradicts_a_cluster_is_refused(module, capsys, tmp_path):
    where = ("--ray-address", "10.0.0.1:6379")
    assert module.parse([*where, "--out", str(tmp_path)]).ray_address == where[1]
    simulated = ("--nodes", "2") if module is merge else ("--network", "two-tier")
    for wrong, told in (((), "--out: name a folder"), ((*simulated, "--out", str(tmp_path)), simulated[0])):
        with pytest.raises(SystemExit):
            module.parse([*where, *wrong])
        assert told in capsys.readouterr().err


def test_keys_are_shared_out_evenly():
    assert Size(10, 16, 2, 128).lengths(4) == [2, 3, 2, 3]
    assert Size(262_144, 16, 2, 128).key_bytes(262_144) == 512 << 20


@pytest.mark.parametrize("parse", [merge.parse, choose.parse])
def test_one_rank_needs_no_second_node(parse):
    assert parse(["--world-size", "1"]).nodes == [1]
    assert parse(["--world-size", "4", "2"]).nodes == parse([]).nodes == [1, 2]
    assert parse(["--world-size", "4", "--nodes", "3"]).nodes == [3]


@pytest.mark.parametrize(
    "arguments", [["--nodes", "3", "--world-size", "2"], ["--batch", "0"], ["--repeats", "0"], ["--nodes", "0"]]
)
def test_bench_merge_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        merge.parse(arguments)
    assert "--nodes: 3 is above 2" in (text := capsys.readouterr().err) or "at least 1" in text


@pytest.mark.parametrize("arguments", [["--heads", "5"], ["--length", "0"], ["--between", "-1"], ["--hosts", "9"]])
def test_bench_attention_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        attention.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def merge_row(name, transport, median):
    shape = {"world_size": 2, "nodes": 1, "batch": 1, "heads": 16, "head_dim": 128}
    times = {"latency_us_median": median, "latency_us_p95": 2 * median}
    return {"merge": name, "transport": transport, **shape, **times, "collectives": 3, "bytes_sent_per_rank": 8256}


MERGE_ROWS = [merge_row("paper", "gloo", 900.0), merge_row("gather", "shared_memory", 30.0)]


RACED = [
    {"transport": "gloo", "seconds": seconds, "choices": {8: name}, "turns": {8: {"gather": [1e-3], "packed": [2e-3]}}}
    for name, seconds in (("gather", 0.125), ("packed", 0.25))
]
CHOICES = list(choose.judge(Placement(2, 1, OWN), [[ranks] * 2 for ranks in RACED]))
ERRORS = {"points": 3, "median_relative_error": 0.1, "worst_relative_error": 0.3, "worst_point": "paper, 1x2"}
MODEL = {
    "fits": [
        {"group": "merge, gloo", "fitted_on": {"points": 7}, "held_out": ERRORS},
        {"group": "merge, nccl", "error": "too few"},
    ]
}


def attention_rows(network=TWO_TIER):
    """What the ranks would have found for one size, as rows."""
    placement = Placement(4, 2, Network(network, "cable", ("a", "b"), 10, 1))
    seconds = {ONE_DEVICE: 0.08, TREE: 0.02, PAPER: 0.04, RING: 1.0, QUERY_RING: 0.05}
    keys = [(method, "gloo") for method in seconds]
    one = {
        "seconds": {key: [seconds[key[0]]] * 3 for key in keys},
        "peaks": dict.fromkeys(keys, 1 << 20),
        "sent": {key: {"lo": 4000.0, "cable": 400.0} for key in keys},
        "merges": {"gloo": "exchange"},
    }
    return list(attention.rows_of(placement, Size(4096, 16, 2, 128), [one] * 4))


def test_rows_of_attention():
    rows = {row["method"]: row for row in attention_rows()}
    tree, ring, alone = rows[TREE], rows[RING], rows[ONE_DEVICE]
    assert (tree["merge"], ring["merge"]) == ("exchange", None)
    assert (tree["ring_ratio"], ring["ring_ratio"]) == (50, 1)
    assert (tree["bytes_sent_per_rank"], tree["bytes_between_hosts"]) == (1100, 400)
    assert tree["key_bytes_per_rank"] == 2 << 20 and tree["peak_bytes_per_rank"] == 3 << 20
    assert (alone["world_size"], alone["beside_world_size"], alone["key_bytes_per_rank"]) == (1, 4, 8 << 20)
    assert tree["network"] == "two-tier 10/1"


def test_the_page_has_all_rows(tmp_path):
    assert merge.against_baseline(MERGE_ROWS) == [1, 30]
    assert len(list(merge.lines(MERGE_ROWS))) == 3
    swept = [{**row, "is_sweep": True, "network": "two-tier unlimited/unlimited"} for row in attention_rows()]
    rows = attention_rows() + attention_rows(LOOPBACK) + swept
    assert len(list(attention.lines(rows))) == 1 + len(rows)
    (tmp_path / "merge.json").write_text(json.dumps({"machine": describe(), "rows": MERGE_ROWS}))
    attention.write(rows, tmp_path)
    (tmp_path / "choose.json").write_text(json.dumps({"machine": describe(), "rows": CHOICES}))
    (tmp_path / "predict.json").write_text(json.dumps({"measured_here": MODEL, "papers_cluster": predict.elsewhere()}))
    (tmp_path / "tree_surprises.md").write_text("Nothing.")
    page = tree_page.page(tmp_path)
    assert "| shared_memory | gather | 30 (60), x 30.0, 3, 8,256 B |" in page
    assert "| 1 | 2 | 8 | gloo | gather, packed | gather | 1.50 | 2.00 | 0.25 |" in page
    assert "| merge, gloo | 7 | 3 | 10% | 30% | paper, 1x2 |" in page and "| merge, nccl | too few |" in page
    assert page.count("| about 8 |") == 1
    assert "### loopback" in page and "### two-tier 10/1" in page and "| two-tier unlimited/unlimited |" in page
    assert "| 4 | 4,096 | 80.00 | 20.00 |  | 40.00 | 1,000.00 | 50.00 | exchange | 50.0 |" in page
    assert page.endswith("## What surprised\n\nNothing.")
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_a_page_of_nothing(tmp_path):
    assert tree_page.page(tmp_path).startswith("# ")
