"""Runs a gateway: `python -m gateway CONFIG`, where CONFIG is a GatewayConfig as JSON. `longleaf gateway` makes it from
its flags.

Prints `listening on http://HOST:PORT`, or {"http": "..."}, once it listens. A signal ends the process. Exit code 0: a
signal ended it; 2: the settings are invalid; 1: it failed.
"""

import logging
import os
import signal
import sys
from typing import NoReturn

import msgspec
import uvloop

from longleaf.errors import InvalidArgument, StartError
from longleaf.logs import Logs, RepeatSuppressor, formatter_of
from longleaf.options import config_from_argument
from longleaf.resources import allow_files
from longleaf.service_settings import GatewayConfig, TelemetryConfig

LISTENING = "listening on "
BAD_INPUT = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argument: str) -> int:
    """Serves until a signal; returns the exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read by gRPC at import
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")  # its threads cost 0.05 s per 1,000 deltas
    from gateway.server import serve

    for number in SIGNALS:  # uvicorn replaces the handlers, and restores them at the end
        signal.signal(number, exit_immediately)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the parent process may have blocked them
    config = config_from_argument(GatewayConfig, argument)
    telemetry = TelemetryConfig(log_format=config.log_format, log_level=config.log_level)
    logs = Logs(telemetry, ("gateway", "longleaf"))
    for logger in ("gateway", "uvicorn.error", "asyncio"):
        logging.getLogger(logger).addFilter(RepeatSuppressor())
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of invalid forms, which get 400
    allow_files()
    try:
        config.check()
        uvloop.run(serve(config, lambda url, metrics: announce(config, url, metrics)))
    except (InvalidArgument, StartError) as error:
        if config.with_parent:  # the parent process reports it
            print(msgspec.json.encode({"error": str(error)}).decode(), flush=True)
            return BAD_INPUT
        record = logging.LogRecord("gateway", logging.ERROR, "", 0, f"error: {error}", None, None)
        print(formatter_of(telemetry).format(record), file=sys.stderr, flush=True)
        return BAD_INPUT
    finally:
        logs.take_down()
    return 0


def exit_immediately(*_: object) -> NoReturn:
    """Exits immediately, since there is nothing to clean up."""
    os._exit(0)


def announce(config: GatewayConfig, url: str, metrics: str | None) -> None:
    """Prints the address, and that of the metrics if enabled."""
    if config.as_json:
        found = {"http": url} | ({} if metrics is None else {"metrics": metrics})
        print(msgspec.json.encode(found).decode(), flush=True)
        return
    if metrics is not None:
        print(f"metrics are at {metrics}", flush=True)
    print(f"{LISTENING}{url}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
