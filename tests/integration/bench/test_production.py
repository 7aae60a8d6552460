"""The measurement of production's settings: its callers, what a row says, and a run against real services."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.harness.parts import joined
from bench.production.__main__ import PARTS, parse
from bench.production.callers import Asked, Called, call
from bench.production.cost import Measured
from bench.production.cost import summary as cost_summary
from bench.production.flood import CASES, PATH, Turns
from bench.production.flood import summary as flood_summary
from bench.production.frames import ACK, DATA, END_STREAM, HEADERS, PING, Answers, frame
from bench.production.options import Options
from bench.production.others import own_seconds
from bench.production.services import Secret, production
from bench.production.streams import Pace
from bench.report import page
from coordinator.access.credentials import Credentials
from coordinator.serving.certificates import Certificates
from longleaf.credentials import new_credential
from tests.support.authority import Authority
from tests.support.service import FakeEngine, serving

OPTIONS = Options(repeats=2, seconds=1.0, world_size=1)


def pace(tokens_per_s: float, cpu: float = 0.01) -> Pace:
    return Pace(tokens_per_s, cpu, 2 * cpu, 1.0)


@pytest.mark.parametrize("cut", [1, 7, 9, 20])
def test_answers_are_counted_however_they_are_cut(cut: int) -> None:
    data = frame(HEADERS, END_STREAM, 1, b"x" * 300) + frame(DATA, 0, 3, b"y" * 5) + frame(PING, 0, 0, b"12345678")
    data += frame(HEADERS, END_STREAM, 3, b"z") + frame(PING, ACK, 0, b"12345678")
    answers = Answers()
    replies = [answers.take(data[at : at + cut]) for at in range(0, len(data), cut)]
    assert answers.num_ended == 2
    assert b"".join(replies) == frame(PING, ACK, 0, b"12345678"), "what is an answer itself is not answered"


async def test_callers_are_refused_and_answered_by_a_server(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    settings = production(authority, tmp_path)
    certificates = Certificates.of(settings.security)
    authenticator = Credentials.of(str(settings.security.credentials))
    engine = FakeEngine()

    async def called(address: str, credential: str, rate: float) -> Called:
        asked = Asked(address, str(authority.file), "127.0.0.2", PATH, credential, rate, 0.5)
        return await asyncio.to_thread(call, asked)

    own = str(settings.access.get("credential"))
    async with serving(engine, tmp_path / "model", certificates=certificates, authenticator=authenticator) as (_, at):
        good = await called(at, own, 60.0)
        assert authenticator.num_refused == 0
        assert 0 < good.ended <= good.sent <= 30
        wrong = await called(at, new_credential(), 60.0)
        assert 0 < wrong.ended <= authenticator.num_refused <= wrong.sent <= 30


def test_a_certificate_and_its_key_change_at_once(tmp_path: Path) -> None:
    authority, secret = Authority(tmp_path / "ca"), Secret(tmp_path / "tls")
    for _ in range(2):
        pair = authority.make()
        secret.write(pair)
        assert (secret.cert.read_bytes(), secret.key.read_bytes()) == pair


def test_a_row_tells_the_ratio_and_how_much_equal_services_differ() -> None:
    off, on, again = (
        Measured([pace(rate, cpu), pace(rate, cpu)], [first], [3 * first])
        for rate, cpu, first in ((100.0, 0.01, 0.010), (90.0, 0.018, 0.0125), (110.0, 0.011, 0.010))
    )
    row = cost_summary(OPTIONS, [(off, on, again)] * 2)
    assert (row["off_tokens_per_s"], row["on_tokens_per_s"], row["ratio"]) == (105.0, 90.0, 0.8571)
    assert row["off_by_off_min"] == row["turn_off_by_off"] == 1.1
    assert (row["off_cpu_us_per_token"], row["on_cpu_us_per_token"]) == (100.0, 200.0)
    assert (row["off_client_us_per_token"], row["on_client_us_per_token"]) == (200.0, 400.0)
    assert (row["on_first_token_ms_p50"], row["on_connected_ms_p50"]) == (12.5, 37.5)
    assert [(goal["name"], goal["value"], goal["is_met"]) for goal in row["goals"]] == [
        ("ratio", 0.8571, False),
        ("first_token_more_ms", 2.5, False),
    ]


def test_a_row_tells_what_streams_keep_beside_wrong_credentials() -> None:
    def turns(code: str, kept: float) -> Turns:
        return Turns(code, [900.0], [300.0], [kept], [0.1], Counter({code: 900, "CANCELLED": 3}))

    quiet = {"wrong": turns("UNAUTHENTICATED", 0.0), "good": turns("OK", 0.0)}
    beside = {name: turns("OK" if name.startswith("good") else "UNAUTHENTICATED", 0.8) for name in CASES}
    beside["wrong_fewer"].kept = [0.95]
    row = flood_summary(OPTIONS, quiet, beside, Counter())
    assert (row["wrong_alone_cpu_us_per_call"], row["wrong_per_s"], row["wrong_kept"]) == (300.0, 900.0, 0.8)
    assert row["other_codes"] == {"CANCELLED": 3 * (len(CASES) + 2)}
    met = {goal["name"]: goal["is_met"] for goal in row["goals"]}
    assert met == {"wrong_kept": False, "wrong_limited_kept": False, "wrong_fewer_kept": True}


def test_a_part_that_is_measured_again_takes_its_own_place() -> None:
    before = [{"part": "cost", "at": 1}, {"part": "flood", "at": 1}]
    assert joined(PARTS, before, {"part": "rotation", "at": 2}) == [before[0], {"part": "rotation", "at": 2}, before[1]]
    assert joined(PARTS, before, {"part": "cost", "at": 2}) == [{"part": "cost", "at": 2}, before[1]]


def test_what_a_child_computed_is_own_work() -> None:
    before = own_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert own_seconds() - before >= 0.45, "the kernel counts in hundredths of a second"


@pytest.mark.parametrize(
    "arguments", [["--repeats", "0"], ["--seconds", "0"], ["--only", "none"], ["--world-size", "0"]]
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error" in capsys.readouterr().err


@pytest.mark.bench
def test_real_services_are_measured() -> None:
    command = [sys.executable, "-m", "bench.production", "--json", "--repeats", "1", "--seconds", "0.3"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout
    found = json.loads(output)
    cost, rotation, flood = found["rows"]
    assert cost["ratio"] > 0 and cost["first_tokens"] == 60 and cost["on_cpu_us_per_token"] > 0
    assert 0 < rotation["shown_s_max"] < 30 and not rotation["streams_broken"]
    assert flood["wrong_alone_per_s"] > 100 and flood["wrong_alone_cpu_us_per_call"] > 0
    assert set(flood["other_codes"]) <= {"CANCELLED"} and not flood["streams_broken"]
    assert page({"production": found}).count("| rotation |") == 2
