"""The measurement of attacks: what is sent, what is measured, what a row says, and a run against a real service."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from bench.hostile import payloads
from bench.hostile.__main__ import Turns, line, parse, row
from bench.hostile.attacks import ATTACKS, OPEN, attack
from bench.hostile.heartbeat import longest_gap
from bench.report import page
from coordinator.serving.gate import MAX_PIECE_BYTES
from longleaf.config import MAX_REQUEST_BYTES
from longleaf.errors import ResourceExhausted
from longleaf.v1.context_service_pb2 import IngestContextRequest, UpdateContextRequest
from longleaf.v1.generation_service_pb2 import GenerateRequest
from longleaf.v1.tokenizer_service_pb2 import DetokenizeRequest
from tests.support.service import Served

SIZE = 12_000


def test_large_requests_are_what_they_pretend_to_be():
    assert GenerateRequest.FromString(payloads.generate_ids(SIZE)).token_ids.ids == [65] * SIZE
    assert DetokenizeRequest.FromString(payloads.detokenize(SIZE)).token_ids.ids == [65] * SIZE
    assert IngestContextRequest.FromString(payloads.ingest_ids(SIZE)).token_ids.ids == [65] * SIZE
    assert len(GenerateRequest.FromString(payloads.generate_text(SIZE)).text) == SIZE
    stopped = GenerateRequest.FromString(payloads.generate_stops(SIZE))
    assert list(stopped.token_ids.ids) == [65] * 8 and stopped.sampling.stop == ["x"] * (SIZE // 3)
    biases = GenerateRequest.FromString(payloads.generate_biases(SIZE)).sampling.logit_bias
    assert dict(biases) == dict.fromkeys(range(1 << 21, (1 << 21) + SIZE // 12), 0.0)
    mask = UpdateContextRequest.FromString(payloads.update_mask(SIZE))
    assert mask.context.name and mask.update_mask.paths == ["x"] * (SIZE // 3)
    assert IngestContextRequest.FromString(payloads.ingest_config("a")).config.name == "contexts/a"


def test_requests_are_nearly_as_large_as_a_message_may_be():
    for make in (payloads.generate_ids, payloads.generate_biases, payloads.update_mask):
        assert 0.999 * (64 << 20) < len(make(payloads.LARGEST)) <= 64 << 20
        assert 0.998 * MAX_REQUEST_BYTES < len(make(payloads.TAKEN)) <= MAX_REQUEST_BYTES
    assert 0.99 * MAX_PIECE_BYTES < len(payloads.ingest_ids(payloads.PIECE)) <= MAX_PIECE_BYTES


@pytest.mark.parametrize(
    ("times", "gap"),
    [
        ([0, 1, 2, 3, 4], 1),
        ([0, 1, 6, 7], 5),  # began before the end, and lasted beyond it
        ([0, 2.5, 4], 2.5),  # lasted into the beginning
        ([0, 1, 2], 2),  # nothing came any more
        ([], 3),
        ([9, 10], 8),
    ],
)
def test_a_gap_counts_when_a_part_of_it_lies_inside(times, gap):
    assert longest_gap(times, 1, 4) == gap


def turns(more_ms: float = 20.0, remaining: float = 3.0, **statuses: int) -> Turns:
    alone = {"stream_ms": 9.0, "heartbeat_ms": 7.0, "answer_ms": 30.0, "peak_mib": 0.0}
    attacked = {**alone, "heartbeat_ms": 7.0 + more_ms, "remaining_mib": remaining, "attacker_cpu_s": 1.0}
    calm = {**attacked, "heartbeat_ms": 7.0, "remaining_mib": 0.0}
    return Turns([alone] * 3, [attacked, calm, attacked], Counter(statuses))


@pytest.mark.parametrize(
    ("measured", "missed"),
    [
        (turns(), set()),
        (turns(99.9, 64.0, OK=3, RESOURCE_EXHAUSTED=9), set()),
        (turns(100.5), {"heartbeat"}),
        (turns(remaining=64.5), {"memory"}),
        (turns(INTERNAL=1), {"statuses"}),
        (turns(**{"CANCELLED without details": 1}), {"statuses"}),
        (Turns(num_died=3), {"heartbeat", "memory"}),
    ],
)
def test_a_row_says_what_was_missed(measured, missed):
    found = row("watchers", parse(["--repeats", "3"]), measured)
    assert {name for name, is_met in found["met"].items() if not is_met} == missed
    assert ("MISSED" in line(found)) == bool(missed)
    assert page({"hostile": [found]}).count("| watchers |") == 1
    json.dumps(found)


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--seconds", "0"], ["--attacks", "none"]])
def test_what_cannot_be_measured_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error" in capsys.readouterr().err


async def test_attacks_that_are_refused_end_as_well(service: Served) -> None:
    service.engine.error = ResourceExhausted("queue", "is full", 9.0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as attackers:
        for name in ("many_sampling_settings", "unread_streams", "head_of_line"):
            attacking = asyncio.get_running_loop().run_in_executor(attackers, attack, name, service.address, 0.3)
            statuses = (await attacking).statuses
            assert set(statuses) <= {"RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", OPEN}, name
    assert len(service.engine.prompts) >= 320


@pytest.mark.bench
def test_a_real_service_is_left_alone_and_attacked():
    command = [sys.executable, "-m", "bench.hostile", "--json", "--attacks", "watchers", "--repeats", "1"]
    output = subprocess.run([*command, "--seconds", "0.3"], check=True, stdout=subprocess.PIPE, timeout=250).stdout
    [found] = json.loads(output)
    assert found["attack"] == "watchers" and found["attack"] in ATTACKS
    assert found["statuses"] == {OPEN: 100} and found["met"]["statuses"]
    assert (found["died"], found["unanswered"], found["honest_errors"]) == (0, 0, {})
    for turn in (found["alone"], found["attacked"]):
        assert turn["heartbeat_ms"] >= 5 and turn["stream_ms"] > 0 and turn["answer_ms"] > 0
    assert {"remaining_mib", "attacker_cpu_s"} <= set(found["attacked"])
