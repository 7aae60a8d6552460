"""`longleaf serve`: replaces itself by `python -m coordinator` with the same settings."""

import sys

import msgspec

from longleaf.cli.exec_process import exec_command
from longleaf.cli.flags import takes_config
from longleaf.cli.model_option import Yes, with_local_model
from longleaf.cli.options import AsJson
from longleaf.extras import require_extra
from longleaf.launch import ready_command, ready_config
from longleaf.service_settings import ServiceConfig
from longleaf.topology import count_ranks


@takes_config(ServiceConfig)
def serve(config: ServiceConfig, yes: Yes = False, as_json: AsJson = False) -> None:
    """Serve a model until interrupted.

    Once it is ready, the service prints a summary and `listening on HOST:PORT`; with --json, {"address": "HOST:PORT"}.
    The port opens earlier: while the model is loading, calls are refused with an error that has the progress. After an
    interrupt or SIGTERM, new calls are refused, and running calls get --drain-seconds to finish. A second interrupt
    ends them immediately.

    With --http PORT, an HTTP gateway listens on the same host, with the same certificate and credentials. Its address
    is printed on the next line; with --json, as {"http": "http://HOST:PORT"}.

    Examples:

      longleaf serve --http 8000
      longleaf serve --model smollm2
      longleaf serve --model Qwen/Qwen3-0.6B --world-size 4 --data-dir ~/.longleaf
    """
    require_extra("server", "longleaf serve")
    config = with_local_model(config, yes=yes, is_quiet=as_json or config.telemetry.log_format == "json")
    is_text = config.telemetry.log_format == "text"
    notify = _print if is_text else _ignore  # lines between JSON objects could not be parsed
    config = ready_config(msgspec.structs.replace(config, as_json=as_json), notify)
    notify(f"starting {count_ranks(config.engine.world_size)} ({config.launcher}) …")
    exec_command(ready_command(config))


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ignore(line: str) -> None:
    del line
