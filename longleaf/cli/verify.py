"""`longleaf verify`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json, read_input
from longleaf.formatting import human_rounded, human_seconds
from longleaf.topology import count_ranks
from longleaf.types import Verification

FAILED = 3
"""Exit code when the logits are too far apart."""
NOT_CONCLUSIVE = 4
"""Exit code when they are not, but might be so on wrong ranks."""


@takes_server
def verify(
    server: ServerOptions,
    text: Annotated[
        str | None,
        typer.Option(help="The prompt, read as it is; - reads standard input.", show_default="random token ids"),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="How many ids to draw, at most 1024.", show_default="a block for every rank, at least 256"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the ids that are drawn.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to decode, at most 64.", show_default="8")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait.", show_default="no limit")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a running service against plain attention.

    A short prompt goes through all ranks: chunks, merges and decoded tokens, as any other. Then rank 0 computes it
    once more, alone, with the same weights and transformers' own attention, in float32. In float32 the largest
    difference between two logits must be within 0.01 % of the largest logit. In a coarser type plain attention is
    computed in that type too: the ranks may be twice as far from float32 as it is, four times with --kv-dtype int8. So
    in coarse types only gross errors show; serve with --dtype float32 --kv-dtype auto to see small ones.

    Other streams go on meanwhile, but for the moment that rank 0 computes alone. Exit code 3: the check has failed; 4:
    it is not conclusive, for rounding explains so much that wrong ranks might pass. A service with credentials does
    this for those of an admin alone.

    Example: longleaf verify --prompt-tokens 600
    """
    given = None if text is None else read_input(text, "--text")
    with connect(server) as client:
        found = client.verify(given, seed=seed, num_tokens=prompt_tokens, max_tokens=max_tokens, timeout=timeout)
    if as_json:
        print_json(found)
    else:
        show(found)
    if not found.passed:
        raise typer.Exit(FAILED if found.failure or found.is_conclusive else NOT_CONCLUSIVE)


def show(found: Verification) -> None:
    """The verdict, and what it rests on."""
    verdict = "passed" if found.passed else "FAILED" if found.failure or found.is_conclusive else "not conclusive"
    print(f"{verdict}: {found.failure or measured(found)}")
    if found.failure:
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("numeric type", f"{found.dtype}; the largest logit is {human_rounded(found.max_logit, 4)}")
    table.add_row(
        "farthest apart", f"by {human_rounded(found.max_difference)}, token {found.worst_index} of the answer"
    )
    table.add_row("greedy choice", f"the same for {found.equal_tokens} of {found.compared_tokens} tokens")
    resident = f"keys on {found.holding_ranks} of {count_ranks(found.world_size)}"
    table.add_row("prompt", f"{found.prompt_tokens:,} tokens; {resident}")
    table.add_row("plain attention", f"{human_seconds(found.plain_seconds)}, in which other streams waited")
    Console(highlight=False).print(table)


def measured(found: Verification) -> str:
    """What was judged, and what is allowed."""
    if not found.plain_distance:  # nothing is rounded, and every logit counts
        furthest, allowed = human_rounded(found.max_difference), human_rounded(found.tolerance)
        return f"the logits differ by at most {furthest}, {allowed} is allowed"
    message = (
        f"the logits are {found.distance:.2%} of their spread off float32, {found.tolerance:.2%} is allowed, "
        f"as plain attention in {found.plain_dtype} is {found.plain_distance:.2%} off"
    )
    if found.is_conclusive:
        return message
    return f"{message}: wrong ranks might pass too; serve with --dtype float32 --kv-dtype auto to be sure"
