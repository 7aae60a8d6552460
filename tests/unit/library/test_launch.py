"""The service as a subprocess: detected when ready, ended, and asked for the reason of a failure."""

import subprocess
import sys

import pytest
from msgspec.structs import replace

from longleaf.config import EngineConfig
from longleaf.errors import InvalidArgument, LongleafError, StartError, Unavailable
from longleaf.launch import ServiceProcess
from longleaf.service_settings import ServiceConfig


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_ready_service_is_detected_and_stopped() -> None:
    code = "import signal; print('noise'); print('listening on 127.0.0.1:5', flush=True); signal.pause()"
    with ServiceProcess(python(code)) as service:
        assert service.wait_ready(20) == "127.0.0.1:5"
        process = service._process
    assert process.returncode is not None


def test_child_processes_cannot_read_standard_input() -> None:
    """Neither the service nor a compiler may read standard input: the user does not see their prompts."""
    code = """
import os, sys
from longleaf import c_extension, launch
report = "import os; print('listening on', os.readlink('/proc/self/fd/0'), flush=True)"
with launch.ServiceProcess([sys.executable, "-c", report]) as service:
    print(service.wait_ready(60))
print(c_extension._run(sys.executable, "-c", report).split()[-1])
print(os.readlink("/proc/self/fd/0").split(":")[0])
"""
    found = subprocess.run(python(code), input="y\n", capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["/dev/null", "/dev/null", "pipe"]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("sys.exit('error: too few slots')", Unavailable, r"^too few slots$"),
        ("print('error: too few slots', file=sys.stderr); sys.exit(2)", StartError, r"^too few slots$"),
        ("raise KeyError('x')", Unavailable, r"exit code 1(.|\n)*KeyError"),
    ],
)
def test_failed_service_reports_the_reason(code: str, kind: type[LongleafError], message: str) -> None:
    with ServiceProcess(python(f"import sys; {code}")) as service, pytest.raises(kind, match=message):
        service.wait_ready(20)


def test_service_that_is_never_ready_times_out() -> None:
    with (
        ServiceProcess(python("import signal; signal.pause()")) as service,
        pytest.raises(StartError, match="not ready"),
    ):
        service.wait_ready(0.05)


@pytest.mark.parametrize("name", ["wait_for_ranks", "drain_seconds"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_invalid_timeout_is_refused(name: str, seconds: float) -> None:
    config = ServiceConfig(engine=EngineConfig(), wait_for_ranks=0.0, drain_seconds=0.0)
    config.check()
    with pytest.raises(InvalidArgument, match=f"^{name}: .* is not between 0 and 1,000,000"):
        replace(config, **{name: seconds}).check()
