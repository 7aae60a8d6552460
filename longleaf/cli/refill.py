"""`longleaf refill`."""

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json
from longleaf.formatting import human_count


@takes_server
def refill(server: ServerOptions, as_json: AsJson = False) -> None:
    """Start ranks in slots whose replacements failed.

    A lost rank is replaced automatically. After three replacements in a row that were lost before they had loaded the
    model, the slot stays empty, and the other ranks take over its work: see `longleaf cluster`. Run this command once
    the cause is fixed. Without credentials, the call is allowed only from the machine or the pod of the service; with
    credentials, to admins on any machine.

    Example: longleaf refill
    """
    with connect(server, retries=0) as client:
        num_slots = client.refill()
    if as_json:
        print_json({"slots": num_slots})
    else:
        print(summary(num_slots))


def summary(num_slots: int) -> str:
    """The number of slots in which ranks are started."""
    if not num_slots:
        return "the service has given up no slot"
    return f"starting ranks in {human_count(num_slots, 'slot')}"
