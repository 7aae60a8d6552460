"""`longleaf drain`."""

from typing import Annotated

import typer

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.formatting import human_seconds
from longleaf.service_settings import UNLIMITED_DRAIN_SECONDS
from longleaf.types import Draining

Wait = Annotated[bool, typer.Option("--wait", help="Return when all running calls have ended.")]


@takes_server
def drain(server: ServerOptions, wait: Wait = False, as_json: AsJson = False) -> None:
    """Stop a service without breaking off its answers.

    The service becomes unhealthy and refuses new calls. It exits with code 0 when its running calls have ended. If it
    was started with --drain-seconds, or gets a signal meanwhile, calls that take longer end with UNAVAILABLE. Without
    credentials, the call is allowed only from the machine or the pod of the service; with credentials, to admins on any
    machine. With --wait, the command suits a container's preStop hook.

    Example: longleaf drain --wait
    """
    with connect(server, retries=0) as client:
        found = client.drain(wait=wait)
    if as_json:
        print_json(found)
    else:
        print(described(found, wait))


def described(found: Draining, has_waited: bool) -> str:
    """The number of calls that are running, or that were ended."""
    calls = "1 call" if found.open_calls == 1 else f"{found.open_calls:,} calls"
    if not has_waited:
        limit = "" if found.limit >= UNLIMITED_DRAIN_SECONDS else f", with {human_seconds(found.limit)} to finish"
        return f"draining: {calls} running{limit}"
    if not found.open_calls:
        return "drained"
    was = "was" if found.open_calls == 1 else "were"
    return f"drained: {calls} {was} cut off after {human_seconds(found.limit)} (serve --drain-seconds)"
