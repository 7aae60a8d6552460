"""`longleaf refill`."""

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json


@takes_server
def refill(server: ServerOptions, as_json: AsJson = False) -> None:
    """Start ranks again in the places that a service has given up.

    A lost rank is replaced without being asked. When three replacements in a row were lost before they had loaded the
    model, its place stays empty, and the others do its work: see `longleaf cluster`. Ask for it here once the reason is
    mended. The service listens to this on its own machine only, or in its pod; one with credentials listens to those of
    an admin, from any machine.

    Example: longleaf refill
    """
    with connect(server, retries=0) as client:
        num_slots = client.refill()
    if as_json:
        print_json({"slots": num_slots})
    else:
        print(told(num_slots))


def told(num_slots: int) -> str:
    """What is done now."""
    if not num_slots:
        return "no place was given up"
    return "a rank is started in 1 place" if num_slots == 1 else f"ranks are started in {num_slots:,} places"
