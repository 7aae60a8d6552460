"""Runs a service: `python -m coordinator --model DIR --world-size 4 ...`. `longleaf serve` is this with a help page.

Every field of ServiceConfig and EngineConfig is an option of the same name.

The composition root: the one place that knows both roles, and that hands the fleet its worker class.
Prints `listening on HOST:PORT`, or {"address": "HOST:PORT"}, once requests are welcome.
Exit code 2: the settings cannot work; 1: the service failed.
"""

import os
import signal
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave(*_: object) -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    for _number in SIGNALS:  # the imports below take seconds, and there is nothing to undo yet
        signal.signal(_number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # whoever became this program may have kept one waiting

import argparse
import asyncio
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec.structs import fields

from coordinator.actor import NAME, NAMESPACE, CoordinatorActor, Reply, describe
from coordinator.ranks.local_fleet import LocalFleet
from coordinator.ranks.ray_connection import connect
from coordinator.ranks.ray_fleet import RayFleet
from coordinator.service import ServiceConfig
from longleaf.config import EngineConfig, join_address
from longleaf.errors import StartError
from longleaf.launch import BAD_INPUT, ERROR, LISTENING
from workers.__main__ import main as worker_main
from workers.actor import WorkerActor

POLL_SECONDS = 0.5
STOP_SECONDS = 30


def main(arguments: list[str]) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    try:
        config = parse(arguments)
    except msgspec.ValidationError as error:
        return report(Reply(error=_of_option(error), exit_code=BAD_INPUT))
    run = serve_on_ray if config.launcher == "ray" else serve_locally
    try:
        return report(run(config))
    except StartError as error:
        return report(describe(error))


def parse(arguments: list[str]) -> ServiceConfig:
    """Raises msgspec.ValidationError for a value that does not fit, and SystemExit for an unknown option or choice."""
    parser = argparse.ArgumentParser(prog="python -m coordinator", argument_default=argparse.SUPPRESS)
    for field in (*fields(ServiceConfig)[1:], *fields(EngineConfig)):
        choices = get_args(field.type) if get_origin(field.type) is Literal else None
        parser.add_argument(f"--{field.name.replace('_', '-')}", choices=choices, required=field.required)
    given = vars(parser.parse_args(arguments))
    engine = {name: given.pop(name) for name in EngineConfig.__struct_fields__ if name in given}
    engine["model"] = os.path.abspath(engine["model"])  # ranks may be in another folder
    return msgspec.convert(given | {"engine": engine}, ServiceConfig, strict=False)


def _of_option(error: msgspec.ValidationError) -> str:
    """What does not fit, after the option instead of with the path."""
    told, _, path = str(error).rpartition(" - at ")
    return f"--{path.strip('`').rpartition('.')[2].replace('_', '-')}: {told}"


def announce(config: ServiceConfig, reply: Reply) -> None:
    for note in reply.notes:
        print(note, file=sys.stderr, flush=True)
    address = join_address(config.host, reply.port)
    told = msgspec.json.encode({"address": address}).decode() if config.as_json else f"{LISTENING}{address}"
    print(told, flush=True)


def report(reply: Reply) -> int:
    if reply.error:
        print(f"{ERROR}{reply.error}", file=sys.stderr, flush=True)
    return reply.exit_code


def serve_locally(config: ServiceConfig) -> Reply:
    """The coordinator in this process, ranks as its children."""
    return asyncio.run(_serve_here(config))


async def _serve_here(config: ServiceConfig) -> Reply:
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    actor = CoordinatorActor(config, partial(LocalFleet, worker_main))
    starting, stopping = asyncio.create_task(actor.start()), asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await actor.stop()
        return Reply()
    reply = starting.result()
    if reply.error:
        return reply
    announce(config, reply)
    ending = asyncio.create_task(actor.wait())
    await asyncio.wait([ending, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done() and not ending.done():
        await actor.stop()
    return await ending


def _ray() -> Any:
    """The package, untyped (its annotations are partial), and imported late: it reads the environment then."""
    import ray

    return ray


def serve_on_ray(config: ServiceConfig) -> Reply:
    """The coordinator as a named actor on this machine, ranks as actors wherever Ray has slots."""
    try:
        connection = connect(config.ray_address, config.engine.world_size)
    except SystemExit:  # how Ray answers SIGTERM while it starts; what it started ends with this process
        leave()
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        stop.set()

    for number in SIGNALS:  # only now: Ray put its own handlers in the place of earlier ones
        signal.signal(number, on_signal)
    try:
        return _serve_actor(config, stop)
    finally:
        connection.close()


def _serve_actor(config: ServiceConfig, stop: threading.Event) -> Reply:
    ray = _ray()
    actor = _place(config)
    try:
        reply = _await(actor.start.remote(), stop)
        if reply.error or stop.is_set():
            return reply
        announce(config, reply)
        reply = _await(actor.wait.remote(), stop)
    except ray.exceptions.RayError as error:
        return Reply(error=f"the coordinator died: {type(error).__name__}", exit_code=1)
    finally:
        with suppress(ray.exceptions.RayError):
            if stop.is_set():
                ray.get(actor.stop.remote(), timeout=STOP_SECONDS)
            ray.kill(actor)
    return reply


def _place(config: ServiceConfig) -> Any:
    """The coordinator's actor, on the node of this command; it takes no slot."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = _ray()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(CoordinatorActor)
    options: dict[str, Any] = {"name": NAME, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": 0}
    try:
        return actor_class.options(scheduling_strategy=here, **options).remote(config, partial(RayFleet, WorkerActor))
    except ValueError as error:
        raise StartError(f"this Ray cluster runs a coordinator already: {error}") from error


def _await(reference: Any, stop: threading.Event) -> Reply:
    """The call's reply, or an empty one when a signal comes first."""
    ray = _ray()
    while not stop.is_set():
        done, _ = ray.wait([reference], timeout=POLL_SECONDS)
        if done:
            return ray.get(reference)
    return Reply()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
