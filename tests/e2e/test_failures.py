"""Failed starts and shutdowns: clear messages, the right exit code, no remaining processes."""

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from longleaf.resources import has_gpu_driver
from tests.support import forked
from tests.support.command_line import CLI, Left, Served, end
from zoo.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(180)


def start(command: list[str], started: ExitStack) -> subprocess.Popen:
    """A process in a new session."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    started.callback(end, process)
    return process


def start_stream(service: Served, started: ExitStack, beside: tuple[str, ...] = ()) -> subprocess.Popen:
    """Starts a long generation and waits for the first output. `beside` is a command that executes the client."""
    options = ["generate", "--prompt", "x", "--max-tokens", "8000", "--ignore-end-token", "--json"]
    command = [*beside, *CLI, *options, "--server", service.address]
    stream = forked.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    started.callback(end, stream)
    assert stream.stdout is not None
    assert stream.stdout.readline()
    return stream


def serve_fails(*options: str) -> str:
    found = forked.run([*CLI, "serve", "--port", "0", *options])
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    return found.stderr


def test_unsupported_models_are_refused_with_the_reason(tmp_path: Path):
    assert "is not a folder" in serve_fails("--model", str(tmp_path / "missing"), "--launcher", "local")
    assert "config.json" in serve_fails("--model", str(tmp_path), "--launcher", "local")


@pytest.mark.skipif(has_gpu_driver(), reason="this machine has a GPU")
def test_missing_gpu_is_one_sentence():
    lines = serve_fails("--device", "cuda", "--launcher", "local").splitlines()
    assert lines == [
        "starting 1 rank (local) …",
        "error: device: cuda is not available: this machine has no GPU driver",
    ]


@pytest.mark.extended
def test_model_that_is_not_a_causal_lm_is_refused(tmp_path: Path):
    from transformers import ViTConfig, ViTModel

    make_checkpoint(tmp_path, "llama")
    ViTModel(
        ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ).save_pretrained(tmp_path)
    assert "error: transformers has no causal language model of type vit\n" in serve_fails(
        "--model", str(tmp_path), "--launcher", "local"
    )


REASONS = {
    "encoder": " lacks weights of a causal language model: ['cls.predictions.bias',",
    "headless": " lacks weights of a causal language model: ['lm_head.weight']",
    "broken": "/model.safetensors cannot be read: its header is too long",
}


@pytest.mark.parametrize(
    "kind", ["headless", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("encoder", "broken"))]
)
def test_models_with_wrong_results_are_refused(tmp_path: Path, kind: str):
    """The same checks at model load: unit/workers/test_model."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    make_checkpoint(tmp_path, "llama")
    if kind == "encoder":
        BertModel(BertConfig(vocab_size=512, **small)).save_pretrained(tmp_path)
    elif kind == "headless":
        LlamaModel(LlamaConfig(vocab_size=512, **small)).save_pretrained(tmp_path)
    else:
        (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    errors = serve_fails("--model", str(tmp_path), "--launcher", "local")
    assert f"{tmp_path}{REASONS[kind]}" in errors


def test_taken_port_is_reported(served: Served, checkpoint: Path):
    port = served.address.rsplit(":", 1)[1]
    command = [
        *CLI,
        "serve",
        "--model",
        str(checkpoint),
        "--launcher",
        "local",
        "--kv-bytes",
        "8000000",
        "--port",
        port,
    ]
    found = forked.run(command)
    assert found.returncode == 2
    assert port in found.stderr
    assert served.run("cluster").returncode == 0


@pytest.mark.extended
@pytest.mark.ray
def test_world_size_larger_than_the_cluster_is_refused(checkpoint: Path, ray_cluster: int):
    import ray

    address = ray.get_runtime_context().gcs_address
    errors = serve_fails("--model", str(checkpoint), "--world-size", "8", "--ray-address", address)
    assert f"world size 8 needs 8 slots, the cluster has {ray_cluster}" in errors


def test_unreachable_ray_is_reported_immediately(checkpoint: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    errors = serve_fails("--model", str(checkpoint), "--ray-address", f"127.0.0.1:{port}")
    assert f"error: --ray-address: no Ray cluster answers at 127.0.0.1:{port}" in errors
    assert "requires the launcher ray" in serve_fails("--launcher", "local", "--ray-address", "auto")


@pytest.mark.parametrize(
    ("seconds", "launcher"),
    [
        (0.5, "local"),
        pytest.param(4.0, "ray", marks=[pytest.mark.ray, pytest.mark.extended]),
        pytest.param(4.0, "local", marks=pytest.mark.extended),
        pytest.param(0.5, "ray", marks=[pytest.mark.ray, pytest.mark.extended]),
    ],
)
def test_interrupt_during_start_prints_no_traceback(
    checkpoint: Path, started: ExitStack, launcher: str, seconds: float
):
    command = [*CLI, "serve", "--port", "0", "--model", str(checkpoint), "--world-size", "2", "--launcher", launcher]
    process = start([*command, "--kv-bytes", "8000000"], started)
    try:
        process.wait(timeout=seconds)  # at an arbitrary point of the start
    except subprocess.TimeoutExpired:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 130, -signal.SIGINT)
    first, *notes = errors.splitlines() or [""]
    assert first in ("", f"starting 2 ranks ({launcher}) …")
    known = ("model ", "ranks ", "document ", "room ", "contexts are only in memory ")
    assert all(note.startswith(known) for note in notes), "it may have progressed this far"
    assert psutil.wait_procs(family, timeout=20)[1] == []


@pytest.mark.extended
def test_without_a_compiler_ranks_fall_back_to_gloo_with_a_warning(
    checkpoint: Path, started: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ("--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000", "--merge", "gather")
    service = started.enter_context(Served("--model", str(checkpoint), *options))
    cluster = service.run("cluster")
    generated = service.run("generate", "--prompt", "x", "--max-tokens", "3")
    assert service.stop() == 0
    assert service.output.count("use gloo instead of shared memory (slower): rank 0: ") == 1
    assert service.output.count("kernels: compiled is not available on cpu: ") == 1
    assert service.output.count("using torch instead (slower)") == 1
    assert "merge gather over gloo" in cluster.stdout
    assert cluster.stdout.count("torch") == 2
    assert generated.returncode == 0


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])])
def test_stopped_service_ends_open_answers_with_the_reason(checkpoint: Path, started: ExitStack, launcher: str):
    options = ("--model", str(checkpoint), "--launcher", launcher, "--kv-bytes", "80000000")
    service = started.enter_context(Served(*options))
    stream = start_stream(service, started)
    assert service.stop() == 0
    check_ended_with_reason(service, stream)


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP))]
)
def test_service_on_an_existing_ray_cluster_stops_on_any_signal(
    checkpoint: Path, started: ExitStack, ray_cluster: int, number: int
):
    import ray

    address = ray.get_runtime_context().gcs_address
    options = ("--model", str(checkpoint), "--ray-address", address, "--kv-bytes", "80000000")
    service = started.enter_context(Served(*options))
    ranks = [psutil.Process(pid) for pid in service.rank_pids()]
    stream = start_stream(service, started)
    assert service.stop(number) == 0
    check_ended_with_reason(service, stream)
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    assert ray.is_initialized(), "the service must not stop an existing cluster"


def without_tracebacks(lines: list[str], warnings: tuple[str, ...]) -> list[str]:
    """Removes tracebacks, which follow lines that start like one of `warnings`."""
    found, is_after = list[str](), False
    for line in lines:
        is_warning = bool(warnings) and line.startswith(warnings)
        is_of_traceback = is_after and not line.startswith(
            ("lost member ", "started member ", "member ", "epoch ", "recover")
        )
        if is_warning or not is_of_traceback:
            found.append(line)
            is_after = is_warning
    return found


def check_ended_with_reason(
    service: Served, stream: subprocess.Popen, updates: tuple[str, ...] = (), warnings: tuple[str, ...] = ()
) -> None:
    """The open answer ended with the reason. The service logged only lines that start like `news`, and possibly like
    `warnings`."""
    _, errors = stream.communicate(timeout=60)
    assert stream.returncode == 1
    message = "the service is stopping; waited 2 s for calls to end\n"
    assert errors == f"error: {message}"
    assert service.process.stdout is not None
    others = [line for line in service.process.stdout if not line.endswith(message)]
    assert [line for line in without_tracebacks(others, warnings) if not line.startswith(updates + warnings)] == []
    assert all(any(line.startswith(one) for line in others) for one in updates)


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.extended])])
def test_killed_service_leaves_no_processes(checkpoint: Path, started: ExitStack, launcher: str):
    options = ("--model", str(checkpoint), "--launcher", launcher, "--kv-bytes", "8000000")
    service = started.enter_context(Served(*options))
    assert service.stop(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.extended
@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gcs_server", signal.SIGTERM),
        pytest.param("raylet", signal.SIGHUP, marks=pytest.mark.slow),
        ("ray::WorkerActor", signal.SIGTERM),
    ],
)
def test_signal_during_ray_start_leaves_no_processes(checkpoint: Path, started: ExitStack, name: str, number: int):
    command = [*CLI, "serve", "--port", "0", "--model", str(checkpoint), "--world-size", "2", "--launcher", "ray"]
    process = start([*command, "--kv-bytes", "8000000"], started)
    while not runs(process, name):
        time.sleep(0.01)
    left = Left(process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    left.audit()
    assert process.returncode == 0
    assert errors.splitlines() == ["starting 2 ranks (ray) …"]


def runs(process: subprocess.Popen, name: str) -> bool:
    """Whether a descendant has a name with this prefix. Other descendants may end meanwhile."""
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if one.name().startswith(name):
                return True
    return False


def test_unreachable_service_is_one_clear_line():
    found = forked.run([*CLI, "cluster", "--server", "127.0.0.1:1"])
    assert found.returncode == 1
    assert "127.0.0.1:1" in found.stderr


@pytest.mark.extended
def test_service_keeps_running_when_its_fork_server_is_killed(checkpoint: Path, started: ExitStack):
    """With the real command, whose fork server has the ranks' environment and ignores terminal signals."""
    options = ["--model", str(checkpoint), "--world-size", "2", "--launcher", "local", "--kv-bytes", "8000000"]
    process = start([*CLI, "serve", "--port", "0", *options], started)
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("listening on ")
    service = psutil.Process(process.pid)
    (server,) = [one for one in service.children() if "multiprocessing.forkserver" in " ".join(one.cmdline())]
    ranks = server.children()
    assert len(ranks) == 2
    assert server.environ()["THP_MEM_ALLOC_ENABLE"] == "1" and "THP_MEM_ALLOC_ENABLE" not in service.environ()
    for one in (server, *ranks):
        status = Path(f"/proc/{one.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert all(blocked & 1 << number - 1 for number in (signal.SIGINT, signal.SIGHUP))
    ranks[1].suspend()
    server.kill()
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    requested = forked.run([*CLI, "generate", "--prompt", "x", "--max-tokens", "3", "--server", address])
    assert requested.returncode == 0, requested.stderr
    left = Left(process)
    process.kill()
    left.audit()
