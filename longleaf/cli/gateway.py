"""`longleaf gateway`: replaces itself by `python -m gateway` with the same settings."""

import os

import msgspec

from longleaf.cli.exec_process import exec_command
from longleaf.cli.flags import takes_config
from longleaf.cli.options import AsJson
from longleaf.extras import require_extra
from longleaf.launch import gateway_command
from longleaf.service_settings import GatewayConfig


@takes_config(GatewayConfig)
def gateway(config: GatewayConfig, as_json: AsJson = False) -> None:
    """Run an HTTP gateway in front of a service.

    The gateway serves the OpenAI-compatible API, Anthropic's Messages API, an API for contexts, and a web page. It
    prints `listening on http://HOST:PORT`; with --json, {"http": "http://HOST:PORT"}. It may be restarted or replicated
    while the service runs, but the stored responses of /v1/responses are in the memory of one gateway. It forwards the
    header `Authorization: Bearer CREDENTIAL` to the service, which checks the credential. `longleaf serve --http PORT`
    starts a gateway together with the service.

    Example: longleaf gateway --server localhost:50051 --port 8000
    """
    require_extra("http", "longleaf gateway")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    exec_command(gateway_command(msgspec.structs.replace(config, as_json=as_json)))
