"""Starts the project's commands by forking a process that has imported them.

A service and its ranks start in a fraction of a second instead of five. A forked process has the arguments,
environment, folder and files of a real one, and it is the parent of its descendants. Tests of startup, the
interpreter's options and Ray use real commands.
"""

import inspect
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, process, reduction
from pathlib import Path
from typing import Any, NoReturn

from longleaf.resources import end_with_parent

CLI = [str(Path(sys.executable).with_name("longleaf"))]
COORDINATOR = [sys.executable, "-P", "-m", "coordinator"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """subprocess.Popen, forked where the command is one of the project and starts no Ray."""
    is_forked = list(command[:1]) == CLI or list(command[:4]) == COORDINATOR
    kind: Any = Forked if is_forked and not _starts_ray(command) else subprocess.Popen
    options.setdefault("text", True)
    return kind(command, **options)


def _starts_ray(command: Sequence[str]) -> bool:
    if list(command[:4]) == COORDINATOR:
        return json.loads(command[4])["launcher"] == "ray"
    words = [word for each in command for word in each.split("=", 1)]
    asks_for_ray = ("--launcher", "ray") in zip(words, words[1:], strict=False) or "--ray-address" in words
    return "serve" in command[1:2] and (asks_for_ray or "--wait-for-ranks" in words)


def run(
    command: Sequence[str], *, input: str | None = None, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    """subprocess.run with captured output, forked in the same cases."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        try:
            output, errors = started.communicate(input, timeout)
        except BaseException:
            started.kill()
            raise
    return subprocess.CompletedProcess(list(command), started.returncode, output, errors)


class _Descriptor:
    """A file descriptor that is sent to the child."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self._number),)


def _detach(duplicate: Any) -> int:
    return duplicate.detach()


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen whose process is forked by multiprocessing's fork server."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments  # type: ignore[attr-defined]
        unknown = ("preexec_fn", "pass_fds", "shell", "executable")
        assert not any(given[name] for name in unknown), f"a forked command has none of {unknown}"
        files = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        inherited = [_Descriptor(number if number >= 0 else usual) for usual, number in enumerate(files)]
        variables = dict(os.environ if given["env"] is None else given["env"])
        folder = os.fspath(given["cwd"] or Path.cwd())
        what = (list(given["args"]), variables, folder, inherited, given["start_new_session"])
        context: Any = multiprocessing.get_context("forkserver")
        self._forked = context.Process(target=_run_forked, args=what, daemon=True)
        self._forked.start()
        self.pid = self._forked.pid
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._forked.join(timeout)
        if self.poll() is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def _run_forked(
    command: list[str], variables: dict[str, str], folder: str, files: list[int], has_own_session: bool
) -> None:
    """Entry point of a forked process."""
    process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    if has_own_session:
        os.setsid()
    for usual, number in enumerate(files):
        os.dup2(number, usual)
        os.close(number)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for each in SIGNALS:
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = 1
    try:
        _run_command(command)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for each in (sys.stdout, sys.stderr):
        try:
            each.flush()
        except OSError:  # the reader has closed the pipe
            os._exit(120)  # as the interpreter does


def _run_command(command: list[str]) -> None:
    from longleaf.cli import main, serve

    if command[:1] == CLI:
        sys.argv = command
        serve.exec_command = _run_command
        main.main()
    else:
        _serve(command[4])


def _serve(argument: str) -> NoReturn:
    """Runs `python -m coordinator`, with a separate fork server for its ranks."""
    from coordinator.__main__ import main

    sys.argv = ["coordinator", argument]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    start_fork_server_here()
    sys.exit(main(argument))


def start_fork_server_here() -> None:
    """Starts the fork server of multiprocessing as a child that has imported all that this process has; else it would
    be another interpreter, which has imported nothing."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()
        if not (pid := os.fork()):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
            end_with_parent()
            os.close(ours)
            if server._forkserver_alive_fd is not None:
                os.close(server._forkserver_alive_fd)
            with suppress(SystemExit):
                forkserver.main(listener.detach(), alive, [])  # type: ignore[attr-defined]
            os._exit(0)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid
