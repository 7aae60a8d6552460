"""This process's membership in a Ray cluster: one that runs already, or one that is started for it."""

import logging
import socket
from contextlib import chdir
from ipaddress import ip_address
from typing import Any

from coordinator.ranks.ray_folder import RayFolder
from longleaf.config import LOOPBACK, apply_environment, check_slots_here, ray_environment
from longleaf.errors import StartError

OBJECT_STORE_BYTES = 80 * 2**20
ANSWER_SECONDS = 10.0
NEUTRAL = "/"
"""Ray puts the folder that it is joined from before all others where its workers look for modules: in any other one,
whoever can write there could run code as us."""


def _ray() -> Any:
    """The package, untyped (its annotations are partial), and imported late: it reads the environment then."""
    import ray

    return ray


class Connection:
    """Ends with `close`; `folder` is that of a Ray that was started for this process, and ends with it."""

    def __init__(self, folder: RayFolder | None = None) -> None:
        self._folder = folder

    def close(self) -> None:
        """Leaves the cluster; ends it, and removes its files, when it was started for this process."""
        _ray().shutdown()
        if self._folder is not None:
            self._folder.close()


def connect(address: str | None, world_size: int) -> Connection:
    """Joins the Ray cluster at `address`, or starts one on this machine with a slot per rank.

    Ray then has handlers of its own for signals, and while it starts it answers SIGTERM with SystemExit.
    Raises StartError when the cluster cannot be reached, or its folder cannot be made.
    """
    return _start(world_size) if address is None else _join(address)


def _join(address: str) -> Connection:
    apply_environment(ray_environment(None))
    _check_answers(address)
    connection = Connection()
    _init(connection, address)
    return connection


def _start(world_size: int) -> Connection:
    check_slots_here(world_size)
    try:
        folder = RayFolder()
    except OSError as error:
        raise StartError(f"cannot make a folder for Ray: {error}") from error
    apply_environment(ray_environment(folder.token_file))
    connection = Connection(folder)
    settings: dict[str, Any] = {"num_cpus": world_size, "include_dashboard": False, "_node_ip_address": LOOPBACK}
    settings |= {"object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": str(folder.temporary)}
    _init(connection, "local", **settings)
    host = str(_ray().util.get_node_ip_address())
    if not ip_address(host).is_loopback:  # it was imported before its environment was complete
        connection.close()
        raise StartError(f"Ray would listen on {host}, not on the loopback address alone")
    return connection


def _init(connection: Connection, address: str, **settings: Any) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        with chdir(NEUTRAL):
            _ray().init(address=address, **quiet, **settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        connection.close()
        where = "this machine" if address == "local" else address
        raise StartError(f"Ray at {where} cannot be used: {error}") from error


def _check_answers(address: str) -> None:
    """Raises StartError when nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    if not port.isdigit():
        return  # found by Ray (`auto`, `local`)
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise StartError(f"ray_address: no Ray cluster answers at {address}: {error}") from error
