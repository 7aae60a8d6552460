"""`longleaf drain`."""

from typing import Annotated

import typer

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.formatting import human_seconds
from longleaf.types import Draining

Wait = Annotated[bool, typer.Option("--wait", help="Return when all running calls have ended.")]


@takes_server
def drain(server: ServerOptions, wait: Wait = False, as_json: AsJson = False) -> None:
    """Stop a service after its running calls.

    The service becomes unhealthy and refuses new calls. Running calls get the --drain-seconds of `longleaf serve`
    (default 2) to finish; after that they end with UNAVAILABLE, and the service exits with code 0. A larger
    --drain-seconds lets long answers finish. Without credentials, the call is allowed only from the machine or the pod
    of the service; with credentials, to admins on any machine. With --wait, the command suits a container's preStop
    hook.

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
        return f"draining: {calls} running, with {human_seconds(found.limit)} to finish"
    if not found.open_calls:
        return "drained"
    was = "was" if found.open_calls == 1 else "were"
    return f"drained: {calls} {was} cut off after {human_seconds(found.limit)} (serve --drain-seconds)"
