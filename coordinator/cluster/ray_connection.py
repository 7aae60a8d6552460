"""Connection of this process to a Ray cluster: an existing one, or one started for it."""

import logging
import socket
import time
from collections.abc import Callable
from contextlib import chdir
from ipaddress import ip_address
from typing import Any

from coordinator.cluster.ray_auth_check import UNKNOWN, check_ray_auth
from coordinator.cluster.ray_temp_dir import RayFolder
from longleaf.config import LOOPBACK, apply_environment, check_slots_here, join_address, ray_environment
from longleaf.errors import StartError
from longleaf.network_interfaces import interface_of

OBJECT_STORE_BYTES = 80 * 2**20
ANSWER_SECONDS = 10.0
AGAIN_SECONDS = 0.5
NEUTRAL = "/"
"""Current folder during `ray.init`. Ray puts the current folder first in the module search path of its workers: in a
shared folder, another user could place code that runs with the rights of this service."""


def ray_package() -> Any:
    """Ray, untyped (its annotations are partial), and imported late, because it reads the environment at import."""
    import ray

    return ray


class Connection:
    """A connection, which must be closed. `folder` belongs to a Ray that was started for this process."""

    def __init__(self, folder: RayFolder | None = None) -> None:
        self._folder = folder

    def close(self) -> None:
        """Disconnects from the cluster. Stops a Ray that was started for this process, and removes its files."""
        ray_package().shutdown()
        if self._folder is not None:
            self._folder.close()


def connect(
    address: str | None, world_size: int, patience: float = 0.0, on_wait: Callable[[], None] = lambda: None
) -> Connection:
    """Joins the Ray cluster at `address`, or starts one on this machine with a slot per rank. Waits at most `patience`
    seconds for a cluster that does not answer yet, and calls `on_wait` repeatedly meanwhile.

    Ray then installs its own signal handlers; while it starts, it answers SIGTERM with SystemExit. Raises StartError
    when the cluster cannot be reached or its folder cannot be created.
    """
    if address is None:
        return _start(world_size)
    _wait_for_answer(address, patience, on_wait)
    return _join(address)


def _wait_for_answer(address: str, patience: float, on_wait: Callable[[], None]) -> None:
    """Waits until a process listens at the address. Raises StartError after `patience` seconds, or immediately if
    waiting cannot help."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return _check_answers(address)
        except StartError:
            _check_is_open(address)
            if time.monotonic() >= deadline:
                raise
        on_wait()
        time.sleep(AGAIN_SECONDS)


def _join(address: str) -> Connection:
    apply_environment(ray_environment(None))
    if _parts(address)[1].isdigit():
        check_ray_auth(address.removeprefix("ray://"))
    connection = Connection()
    _init(connection, address)
    return connection


def _start(world_size: int) -> Connection:
    check_slots_here(world_size)
    try:
        folder = RayFolder()
    except OSError as error:
        raise StartError(f"cannot create a folder for Ray: {error}") from error
    apply_environment(ray_environment(folder.token_file))
    connection = Connection(folder)
    settings: dict[str, Any] = {"num_cpus": world_size, "include_dashboard": False, "_node_ip_address": LOOPBACK}
    settings |= {"object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": str(folder.temporary)}
    _init(connection, "local", **settings)
    host = str(ray_package().util.get_node_ip_address())
    if not ip_address(host).is_loopback:  # Ray was imported before its environment was complete
        connection.close()
        raise StartError(f"Ray would listen on {host} instead of the loopback address")
    return connection


def _init(connection: Connection, address: str, **settings: Any) -> None:
    ray = ray_package()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        with chdir(NEUTRAL):
            ray.init(address=address, **quiet, **settings)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        connection.close()  # it answers but cannot be joined: the token may be rejected, which Ray does not report
        raise StartError(f"ray_address: the Ray cluster at {address} cannot be joined: {UNKNOWN}") from error
    except Exception as error:  # Exception itself if a busy machine does not start Ray within 30 s
        connection.close()
        where = "this machine" if address == "local" else address
        raise StartError(f"cannot use Ray at {where}: {error}") from error


def _check_is_open(address: str) -> None:
    """Raises StartError when a Ray of this machine listens only on the loopback address, as it does without a route to
    the internet."""
    host, port = _parts(address)
    if host == LOOPBACK or interface_of(host) is None:
        return
    try:
        socket.create_connection((LOOPBACK, int(port)), timeout=ANSWER_SECONDS).close()
    except OSError:
        return
    found = join_address(LOOPBACK, int(port))
    message = f"no Ray cluster answers at {address}, but one answers at {found}, which other machines cannot reach"
    raise StartError(f"ray_address: {message}: start Ray's head with --node-ip-address={host}")


def _parts(address: str) -> tuple[str, str]:
    """Host and port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return host.strip("[]"), port  # brackets of an IPv6 address


def _check_answers(address: str) -> None:
    """Raises StartError when no process listens at HOST:PORT. Ray itself would retry for minutes."""
    host, port = _parts(address)
    if not port.isdigit():
        return  # an address that Ray resolves (`auto`, `local`)
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise StartError(f"ray_address: no Ray cluster answers at {address}: {error}") from error
