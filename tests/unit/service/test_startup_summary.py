"""The summary of a started service."""

import pytest
from msgspec.structs import replace

from coordinator.kv_cache.positions import UNLIMITED
from coordinator.startup_summary import summarize
from coordinator.telemetry.logs import summarized
from longleaf.positions import UNLIMITED_TOKENS
from longleaf.service_settings import TelemetryConfig
from longleaf.types import Cluster, ModelInfo, Worker


def cluster(max_tokens: int, *devices: str) -> Cluster:
    workers = tuple(
        Worker(rank=rank, node="n", pid=1, device=device, tokens=0, max_tokens=max_tokens, kv_bytes=0)
        for rank, device in enumerate(devices)
    )
    model = ModelInfo(name="m", architecture="LlamaForCausalLM", dtype="float32", kv_dtype="int8")
    return Cluster(model=model, workers=workers, world_size=len(devices), epoch=1, launcher="ray", merge="auto")


def test_the_model_the_ranks_and_the_limits_are_named() -> None:
    assert summarize(cluster(8192, "cuda:0", "cuda:1"), 4096, 1) == (
        ("model", "m (LlamaForCausalLM, float32, keys in int8)"),
        ("ranks", "2 on cuda, launcher ray"),
        ("document", "up to 4,096 tokens, with its questions and answers"),
        ("capacity", "16,384 tokens in all contexts and answers"),
    )


@pytest.mark.parametrize(
    ("devices", "threads", "text"),
    [
        (["cpu"], 1, "1 on cpu with 1 thread"),
        (["cpu"], 16, "1 on cpu with 16 threads"),
        (["cpu", "cpu"], 1, "2 on cpu with 1 thread each"),
        (["cpu", "cuda:0"], 4, "2 on cpu and cuda with 4 threads each"),
        (["cuda:0"], 4, "1 on cuda"),
    ],
)
def test_threads_of_ranks_on_processors_are_named(devices: list[str], threads: int, text: str) -> None:
    found = dict(summarize(cluster(64, *devices), 4096, threads))
    assert found["ranks"] == f"{text}, launcher ray"


@pytest.mark.parametrize(
    ("max_tokens", "max_positions", "longest", "capacity"),
    [
        (64, 4096, "up to 64 tokens, with its questions and answers; the model supports 4,096", "64 tokens"),
        (64, UNLIMITED, "up to 64 tokens, with its questions and answers", "64 tokens"),
        (UNLIMITED_TOKENS, UNLIMITED, "of any length", "any number of tokens"),
    ],
)
def test_the_smaller_of_the_limits_is_that_of_a_document(
    max_tokens: int, max_positions: int, longest: str, capacity: str
) -> None:
    found = dict(summarize(cluster(max_tokens, "cpu"), max_positions, 1))
    assert (found["document"], found["capacity"]) == (longest, f"{capacity} in all contexts and answers")


def test_lines_for_people_are_aligned_with_the_address() -> None:
    rows = (("model", "m"), ("ranks", "2"))
    assert summarized(TelemetryConfig(), rows) == ("model        m", "ranks        2")
    assert '"message": "ranks: 2"' in summarized(TelemetryConfig(log_format="json"), rows)[1]


def test_quantized_weights_are_named() -> None:
    model = ModelInfo(name="m", architecture="L", dtype="bfloat16", kv_dtype="bfloat16", quantization="fp8")
    assert model.dtypes == "fp8 weights computed in bfloat16"
    assert replace(model, kv_dtype="int8").dtypes == "fp8 weights computed in bfloat16, keys in int8"
