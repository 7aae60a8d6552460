"""Measurements over real processes: rows of bench.merge, ranks that fail, hosts as network namespaces."""

import json
import math
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from bench.harness.hosts import FOLDER, OWN, hosts, obstacle
from bench.harness.ranks import Placement, run
from longleaf.tree import MERGES
from tests.support.tools import lacks

MEBIBYTES = 16


def module(name: str, *arguments: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", name, "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=200).stdout)


@pytest.mark.bench
def test_bench_merge_counts_what_is_sent(tmp_path):
    rows = module(
        "bench.merge", "--world-size", "2", "--nodes", "1", "--batch", "8", "--repeats", "5", "--out", str(tmp_path)
    )
    assert json.loads((tmp_path / "merge.json").read_text())["rows"] == rows
    by_name = {(row["transport"], row["merge"]): row for row in rows}
    assert {name for transport, name in by_name if transport == "gloo"} == set(MERGES)
    payload = 8 * 16 * 129 * 4
    assert [by_name["gloo", name]["collectives"] for name in ("paper", "packed", "gather")] == [3, 2, 1]
    gather = by_name["gloo", "gather"]
    assert gather["is_network_private"] is (obstacle() is None)
    most = 1.3 * payload if gather["is_network_private"] else math.inf  # what else this machine sends counts, too
    assert payload <= gather["bytes_sent_per_rank"] < most


def fail(rank):
    """Rank 1 raises while rank 0 waits for it."""
    if rank.rank == 1:
        raise RuntimeError("the second rank gave up")
    rank.barrier()


@pytest.mark.bench
def test_bench_draft_has_a_row_for_each_number_of_rows():
    size = ("--context", "300", "--world-size", "2", "--repeats", "1", "--model", "embedded")
    rows = module("bench.draft", *size)
    assert [(row["kv_dtype"], row["rows"]) for row in rows] == [
        (kind, count) for kind in ("float32", "int8") for count in (1, 2, 4, 8, 16)
    ]
    assert all(row["ratio"] == 1 for row in rows if row["rows"] == 1)


@pytest.mark.bench
def test_a_rank_that_fails_ends_the_run_with_its_traceback():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the second rank gave up"):
        run(fail, Placement(2, 1, OWN))


def send(rank):
    """Seconds in which two ranks swap a tensor, and bytes that left all hosts meanwhile."""
    tensor = torch.ones(MEBIBYTES << 18)

    def call():
        return rank.world.permute(tensor, to=(rank.rank + 1) % 2, source=(rank.rank + 1) % 2)

    assert torch.equal(call(), tensor)
    sent = rank.count_bytes(call, 1)
    rank.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin, sent


@pytest.mark.slow
@pytest.mark.parametrize(("count", "interface"), [(1, "lo"), (2, "cable")])
def test_hosts_have_the_rates_they_were_given(count, interface):
    if reason := obstacle():
        lacks(reason)
    with hosts(count, inside_gbit=0.5, between_gbit=0.5) as network:
        found = run(send, Placement(2, count, network))
    size = MEBIBYTES << 20
    for _, sent in found:
        assert 2 * size <= sent[interface] < 2.1 * size
    # both directions share a loopback's rate, and no transfer is faster than its rate
    assert max(seconds for seconds, _ in found) >= 0.9 * (3 - count) * size * 8 / 0.5e9
    prefix = network.namespaces[0].removesuffix("0")  # others may have networks, too
    assert not [path for path in FOLDER.iterdir() if path.name.startswith(prefix)]


@pytest.mark.slow
def test_hosts_are_gone_after_an_error():
    if reason := obstacle():
        lacks(reason)
    seen: list[bool] = []
    with suppress(KeyError), hosts(3) as network:
        seen += [(FOLDER / name).exists() for name in network.namespaces]
        raise KeyError
    assert seen == [True] * 3
    assert not any((FOLDER / name).exists() for name in network.namespaces)


@pytest.mark.slow
def test_bench_attention_on_both_networks(tmp_path: Path):
    arguments = ("--world-size", "2", "--length", "1000", "--repeats", "3", "--seconds", "1", "--out", str(tmp_path))
    rows = module("bench.attention", *arguments)
    networks = {"loopback"} if obstacle() else {"loopback", "two-tier 10/1"}
    assert {row["network"] for row in rows} == networks
    assert (tmp_path / "attention.png").is_file()
    for row in rows:
        if row["method"] == "ring" and row["is_network_private"]:
            assert row["bytes_sent_per_rank"] >= row["key_bytes_per_rank"]
