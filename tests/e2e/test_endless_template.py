"""A checkpoint whose chat template never ends is refused or interrupted, and leaves nothing."""

import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from time import sleep

import psutil
import pytest

from tests.support import forked
from tests.support.command_line import CLI, end

pytestmark = pytest.mark.timeout(180)
LOOP = "{% for i in range(9999) %}"
ENDLESS = f"{4 * LOOP}{4 * '{% endfor %}'}{{{{ messages[0].content }}}}"


@pytest.fixture
def endless(checkpoint: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(ENDLESS)
    return folder


def until_rendering(process: subprocess.Popen) -> list[psutil.Process]:
    """All processes of the service once it renders the template."""
    while process.poll() is None:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            try:
                if "coordinator.text.template" in member.cmdline():
                    return family
            except psutil.NoSuchProcess:
                pass
        sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGINT, "local"),
        pytest.param(signal.SIGTERM, "ray", marks=[pytest.mark.ray, pytest.mark.extended]),
        pytest.param(signal.SIGTERM, "local", marks=pytest.mark.extended),
        pytest.param(signal.SIGINT, "ray", marks=[pytest.mark.ray, pytest.mark.extended]),
    ],
)
def test_signal_stops_a_service_whose_template_never_ends(
    endless: Path, started: ExitStack, launcher: str, number: signal.Signals
) -> None:
    command = [*CLI, "serve", "--port", "0", "--model", str(endless), "--launcher", launcher, "--kv-bytes", "8000000"]
    process = forked.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    started.callback(end, process)
    family = until_rendering(process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (0, False), errors
    assert psutil.wait_procs(family, timeout=20)[1] == []


@pytest.mark.extended
def test_template_that_never_ends_is_refused(endless: Path) -> None:
    for command in (("serve", "--port", "0", "--launcher", "local", "--model"), ("models", "check")):
        found = forked.run([*CLI, *command, str(endless)])
        assert found.returncode == 2
        message = "the chat template did not finish within 5 s of processor time"
        assert message in " ".join((found.stdout + found.stderr).split())
