"""Runs a service: `python -m coordinator CONFIG`, where CONFIG is a valid ServiceConfig as JSON. `longleaf serve` makes
it from its flags.

This is the composition root, the only module that imports both coordinator and workers: it passes the worker class to
the fleet. Prints `listening on HOST:PORT`, or {"address": "HOST:PORT"}, once requests are accepted, followed by the
address of --http if that is set, or {"http": ...}. Lost ranks and their recovery are reported on standard error. A
signal drains the service; a second one ends it immediately. Exit code 0: a signal ended it; 2: the settings do not suit
this machine or this cluster; 1: the service failed.
"""

import os
import signal
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_immediately(*_: object) -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # unauthenticated peers must not be able to fill the log
    for _number in SIGNALS:  # the imports below take seconds, and there is nothing to undo yet
        signal.signal(_number, exit_immediately)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the parent process may have left a blocked signal pending

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from coordinator.actor import NAME, NAMESPACE, CoordinatorActor, StartResult, describe
from coordinator.cluster import fork_server
from coordinator.cluster.fork_server import StartMethod
from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.ray_connection import connect, ray_package
from coordinator.cluster.ray_fleet import RayFleet
from coordinator.task_set import TaskSet
from coordinator.telemetry import logs
from longleaf.config import join_address
from longleaf.errors import InvalidArgument, StartError
from longleaf.formatting import human_seconds
from longleaf.launch import LISTENING, labeled
from longleaf.options import config_from_argument
from longleaf.service_settings import ServiceConfig, TelemetryConfig
from workers.__main__ import main as worker_main
from workers.actor import WorkerActor

POLL_SECONDS = 0.5
STOP_SECONDS = 30
LOG_INTERVAL_SECONDS = 10.0


def main(argument: str) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    config = config_from_argument(ServiceConfig, argument)
    run = serve_on_ray if config.launcher == "ray" else serve_locally
    try:
        return report(run(config), config.telemetry)
    except (InvalidArgument, StartError) as error:
        return report(describe(error), config.telemetry)


def print_notices(reply: StartResult) -> None:
    for note in reply.notes:
        print(note, file=sys.stderr, flush=True)


def announce(config: ServiceConfig, reply: StartResult) -> None:
    print_notices(reply)
    address = join_address(config.host, reply.port)
    message = msgspec.json.encode({"address": address}).decode() if config.as_json else f"{LISTENING}{address}"
    print(message, flush=True)
    if reply.http:
        message = labeled("HTTP", f"{reply.http} (page), {reply.http}/v1 (base_url of OpenAI clients)")
        print(msgspec.json.encode({"http": reply.http}).decode() if config.as_json else message, flush=True)


def report(reply: StartResult, telemetry: TelemetryConfig) -> int:
    if reply.error:
        print(logs.failed(telemetry, reply.error), file=sys.stderr, flush=True)
    return reply.exit_code


def serve_locally(config: ServiceConfig) -> StartResult:
    """Runs the coordinator in this process and the ranks as its descendants."""
    method = fork_server.start(config.engine, ["workers.preload"])
    try:
        return asyncio.run(_serve_here(config, method))
    finally:
        fork_server.kill()


async def _serve_here(config: ServiceConfig, method: StartMethod) -> StartResult:
    rank_main = partial(worker_main, telemetry=config.telemetry)
    actor = CoordinatorActor(config, partial(LocalFleet, rank_main, method, fork_server.kill))
    loop = asyncio.get_running_loop()
    ends = TaskSet()

    def end(*_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the service has ended
            loop.call_soon_threadsafe(lambda: ends.start(actor.end()))

    for number in SIGNALS:  # not through the loop, which removes its handlers before signals can be ignored
        signal.signal(number, end)
    reply = await actor.start()
    if reply.port:
        announce(config, reply)
        reply = await actor.wait()  # these lines are already in the log of this process
    if not reply.error:
        await actor.stop()
    return reply


class ShutdownSignals:
    """Shutdown signals received so far."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0.0
        """Time of the first signal, on the monotonic clock."""

    def on_signal(self, *_: object) -> None:
        self.first = self.first or time.monotonic()
        self.count += 1


class WaitReporter:
    """Prints the missing components to standard error, immediately and then every ten seconds."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._began = time.monotonic()
        self._next = self._began

    @property
    def seconds_left(self) -> float:
        """Seconds left to wait. Unless the limit is 0, the result allows at least one check, however long it took to
        join the cluster."""
        limit = self._config.wait_for_ranks
        return max(min(limit, POLL_SECONDS), self._began + limit - time.monotonic())

    def report(self, what: str, **facts: object) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOG_INTERVAL_SECONDS
        seconds, limit = round(now - self._began), self._config.wait_for_ranks
        progress = {"waiting_for": what, **facts, "seconds": seconds, "limit_seconds": limit}
        line = f"waiting for {what} for {human_seconds(seconds)}"
        is_json = self._config.as_json or self._config.telemetry.log_format == "json"
        print(msgspec.json.encode(progress).decode() if is_json else line, file=sys.stderr, flush=True)


def serve_on_ray(config: ServiceConfig) -> StartResult:
    """Runs the coordinator as a named actor on this machine, and the ranks as actors wherever Ray has slots."""
    waiting = WaitReporter(config)
    say = partial(waiting.report, f"the Ray cluster at {config.ray_address}")
    try:
        connection = connect(config.ray_address, config.engine.world_size, config.wait_for_ranks, say)
    except SystemExit:  # Ray's reaction to SIGTERM during its start; processes it started end with this one
        exit_immediately()
    signals = ShutdownSignals()
    for number in SIGNALS:  # not earlier, because Ray replaces handlers with its own
        signal.signal(number, signals.on_signal)
    try:
        return _serve_actor(msgspec.structs.replace(config, wait_for_ranks=waiting.seconds_left), signals, waiting)
    finally:
        connection.close()


def _serve_actor(config: ServiceConfig, signals: ShutdownSignals, waiting: WaitReporter) -> StartResult:
    ray = ray_package()
    actor = _place(config)
    follow = partial(_wait_for_reply, actor, signals, config.signal_drain_seconds + STOP_SECONDS)
    reply = StartResult()
    try:
        reply = follow(actor.start.remote(), partial(_report_missing, actor, waiting))
        if reply.port:
            announce(config, reply)
            while not reply.error and (reply := follow(actor.wait.remote(until_logs=True))).notes:
                print_notices(reply)
    except ray.exceptions.RayError as error:
        if not signals.count:  # otherwise Ray may have ended with this process
            reply = StartResult(error=f"the coordinator died: {type(error).__name__}; {_remedy(config)}", exit_code=1)
    finally:
        with suppress(ray.exceptions.RayError):
            if not reply.error:
                print_notices(ray.get(actor.stop.remote(), timeout=STOP_SECONDS))
            ray.kill(actor)
    return reply


def _remedy(config: ServiceConfig) -> str:
    """Advice for a service whose coordinator is dead."""
    if config.data.data_dir is None:
        return "start the service again and ingest the documents again: nothing was saved"
    return f"start the service again with --data-dir {config.data.data_dir}, where all acknowledged changes are saved"


def _report_missing(actor: Any, waiting: WaitReporter) -> None:
    """Reports missing slots, if any."""
    ray = ray_package()
    with suppress(ray.exceptions.GetTimeoutError):  # the actor does not exist yet
        loading = ray.get(actor.loading.remote(), timeout=POLL_SECONDS)
        if missing := loading.num_missing:
            facts = {"num_missing": missing, "world_size": loading.world_size}
            waiting.report(f"{missing} of {loading.world_size} slots", **facts)


def _place(config: ServiceConfig) -> Any:
    """Creates the coordinator's actor on the node of this process. The actor occupies no slot."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = ray_package()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(CoordinatorActor)
    options: dict[str, Any] = {"name": NAME, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": 0}
    try:
        return actor_class.options(scheduling_strategy=here, **options).remote(config, partial(RayFleet, WorkerActor))
    except ValueError as error:
        raise StartError("ray_address: this Ray cluster already runs a coordinator; it can run only one") from error


def _wait_for_reply(
    actor: Any,
    signals: ShutdownSignals,
    most_seconds: float,
    reference: Any,
    meanwhile: Callable[[], None] = lambda: None,
) -> StartResult:
    """Returns the reply of a call to the actor. Forwards every signal to the actor. Stops waiting if the actor has not
    ended `most_seconds` after the first signal."""
    ray, num_reported = ray_package(), 0
    while True:
        while num_reported < signals.count:
            actor.end.remote()
            num_reported += 1
        done, _ = ray.wait([reference], timeout=POLL_SECONDS)
        if done:
            return ray.get(reference)
        if signals.count and time.monotonic() > signals.first + most_seconds:
            return StartResult()
        meanwhile()


if __name__ == "__main__":
    _code = main(sys.argv[1])
    # Python restores the default handlers before the process ends, so a late signal would kill it.
    for _number in SIGNALS:
        signal.signal(_number, signal.SIG_IGN)
    sys.exit(_code)
