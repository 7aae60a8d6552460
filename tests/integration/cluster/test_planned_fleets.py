"""The plans of `longleaf models check` equal the layouts that a fleet reports."""

from pathlib import Path

import pytest

from longleaf.cli.models import report
from longleaf.client import Client
from longleaf.config import EngineConfig, WindowKeys
from longleaf.launch import ServiceProcess, coordinator_command
from longleaf.model_report import CapacityPlan
from longleaf.positions import AttentionSpan, WindowSpec
from longleaf.service_settings import ServiceConfig
from longleaf.types import Cluster
from tests.support import forked
from tests.support.golden.states import running
from tests.support.scheduling import Bench
from workers.compat_check import check, num_ends
from zoo.checkpoints import make_checkpoint
from zoo.families import Family

KV_BYTES = 3 << 20


def plan_of(config: EngineConfig, plans: tuple[CapacityPlan, ...]) -> CapacityPlan:
    """The plan of the config's own mode; models without windows only have the first one."""
    assert [plan.window_keys for plan in plans] == ["sharded", "replicated"][: len(plans)]
    return plans[-1] if config.window_keys == "replicated" else plans[0]


def reported_layout(fleet: Cluster) -> tuple[list[int], int]:
    return [worker.max_tokens for worker in fleet.workers], fleet.max_window_tokens


def planned(plan: CapacityPlan) -> tuple[list[int], int]:
    return [room.tokens for room in plan.rooms], plan.window_tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window_keys", ["sharded", "replicated"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {}),
        ("gemma3", {"kv_dtype": "int8", "block_size": 60}),
        ("gemma3", {"window_bytes": 1 << 20, "dtype": "bfloat16"}),
        ("llama4", {"max_sequences": 2}),
        ("mistral", {}),
        ("llama", {}),
    ],
    ids=["gemma3", "int8", "window bytes", "llama4", "windows alone", "no windows"],
)
async def test_plan_equals_the_layout_of_the_ranks(
    tmp_path: Path, family: Family, settings: dict[str, object], window_keys: WindowKeys
) -> None:
    given = {"world_size": 2, "kv_bytes": KV_BYTES, "window_keys": window_keys, **settings}
    if window_keys == "sharded":
        given.pop("window_bytes", None)
    config = EngineConfig(model=str(make_checkpoint(tmp_path, family)), **given)
    plan = plan_of(config, check(config, has_weights=False).plans)
    async with running(config) as engine:
        assert planned(plan) == reported_layout(engine.cluster())


@pytest.mark.extended
def test_plan_equals_the_report_of_a_service(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3")
    config = EngineConfig(model=str(folder), world_size=2, kv_bytes=KV_BYTES, window_keys="replicated")
    command = coordinator_command(ServiceConfig(engine=config, port=0, launcher="local"))
    with ServiceProcess(command, forked.popen) as service, Client(service.wait_ready(240)) as client:
        fleet = client.cluster()
    plan = plan_of(config, report(config, None, has_weights=False).plans)
    assert planned(plan) == reported_layout(fleet)
    assert plan.window_tokens > 0


@pytest.mark.parametrize(
    ("span", "block_size", "num_blocks"), [(32, 4, 100), (16, 4, 60), (512, 16, 1200), (30, 8, 60)]
)
@pytest.mark.parametrize("rest", [0, 3])
def test_service_admits_the_planned_number_of_contexts(span: int, block_size: int, num_blocks: int, rest: int) -> None:
    windows = WindowSpec(reaches=(AttentionSpan(span),), num_blocks=num_blocks)
    sizes = {"block_size": block_size, "chunk_size": span, "max_positions": 10**6, "check_every": 1000}
    bench = Bench(windows=windows, blocks=(10**5, 10**5), **sizes)
    for number in range(num_ends(windows, block_size)):
        bench.ingest(f"doc-{number}", 5 * span + rest)
        bench.run()


def test_infeasible_plan_is_refused_with_the_reason(tmp_path: Path) -> None:
    """The pool has blocks, but not enough for the windows of a context and a generation."""
    config = EngineConfig(model=str(make_checkpoint(tmp_path, "gemma3")), kv_bytes=1 << 18)
    sharded, replicated = check(config, has_weights=False).plans
    assert (sharded.reason, sharded.tokens) == ("", 256)
    assert replicated.reason.startswith("kv_bytes: a context and a generation need")
    assert replicated.rooms == ()
