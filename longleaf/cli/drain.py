"""`longleaf drain`."""

from typing import Annotated

import typer

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.formatting import human_seconds
from longleaf.types import Draining

Wait = Annotated[bool, typer.Option("--wait", help="Return when all that ran has ended, or was told why it could not.")]


@takes_server
def drain(server: ServerOptions, wait: Wait = False, as_json: AsJson = False) -> None:
    """End a running service. Answers that run get the --drain-seconds of its start (2 by default).

    From now on it is not healthy and takes no new calls. Calls that run for longer than that end with UNAVAILABLE, and
    the service leaves with exit code 0: give serve a larger --drain-seconds to let long answers end. It listens to this
    on its own machine only, or in its pod; one with credentials listens to those of an admin, from any machine. With
    --wait this is the hook to run before a container is stopped.

    Example: longleaf drain --wait
    """
    with connect(server, retries=0) as client:
        found = client.drain(wait=wait)
    if as_json:
        print_json(found)
    else:
        print(described(found, wait))


def described(found: Draining, has_waited: bool) -> str:
    """How far the end is."""
    calls = "1 call" if found.open_calls == 1 else f"{found.open_calls:,} calls"
    if not has_waited:
        return f"draining: {calls} may run for {human_seconds(found.limit)}, and are ended then"
    if not found.open_calls:
        return "drained"
    was = "was" if found.open_calls == 1 else "were"
    return f"drained: {calls} ran for longer than {human_seconds(found.limit)} and {was} ended (serve --drain-seconds)"
