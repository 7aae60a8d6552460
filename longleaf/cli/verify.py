"""`longleaf verify`."""

from typing import Annotated

import typer
from rich.table import Table

from longleaf.cli.console import output_console
from longleaf.cli.flags import takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, print_json, read_input
from longleaf.formatting import human_rounded, human_seconds
from longleaf.topology import count_ranks
from longleaf.types import Verification

FAILED = 3
"""Exit code if the logits differ too much."""
NOT_CONCLUSIVE = 4
"""Exit code if the logits are close, but rounding could hide wrong ranks."""


@takes_server
def verify(
    server: ServerOptions,
    text: Annotated[
        str | None,
        typer.Option(
            help="The prompt, without chat template; - reads standard input.", show_default="random token ids"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Number of random token ids, at most 1024.", show_default="a block for every rank, at least 256"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random token ids.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(help="Number of tokens to decode, at most 64.", show_default="8")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Time limit.", show_default="no limit", metavar="SECONDS")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a running service with transformers' own attention.

    All ranks process a short prompt and decode tokens, as for any request. Then rank 0 computes the same tokens with
    the same weights and transformers' own attention, in float32. In float32, no logit may differ by more than 0.01 % of
    the largest logit. For other types, plain attention is also computed in that type, and the ranks may be twice as far
    from float32 as plain attention, or four times with --kv-dtype int8. Such types therefore reveal only large errors;
    serve with --dtype float32 --kv-dtype auto to find small ones.

    Other streams pause while rank 0 computes plain attention. Exit code 3: the comparison failed; 4: it is not
    conclusive, because rounding could hide wrong ranks. On a service with credentials, only admins may verify.

    Examples:

      longleaf verify
      longleaf verify --prompt-tokens 600
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
    """Prints the verdict and the measurements."""
    verdict = "passed" if found.passed else "FAILED" if found.failure or found.is_conclusive else "not conclusive"
    print(f"{verdict}: {found.failure or measured(found)}")
    if found.failure:
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("numeric type", f"{found.dtype}; the largest logit is {human_rounded(found.max_logit, 4)}")
    table.add_row(
        "largest difference", f"{human_rounded(found.max_difference)}, token {found.worst_index} of the answer"
    )
    table.add_row("greedy choice", f"the same for {found.equal_tokens} of {found.compared_tokens} tokens")
    resident = f"keys on {found.holding_ranks} of {count_ranks(found.world_size)}"
    table.add_row("prompt", f"{found.prompt_tokens:,} tokens; {resident}")
    table.add_row("plain attention", f"{human_seconds(found.reference_seconds)}, during which other streams paused")
    output_console().print(table)


def measured(found: Verification) -> str:
    """The measured distance, and the allowed one."""
    if not found.reference_distance:  # float32: every logit counts
        furthest, allowed = human_rounded(found.max_difference), human_rounded(found.tolerance)
        return f"the logits differ by at most {furthest}, {allowed} is allowed"
    message = (
        f"the logits differ from float32 by {found.distance:.2%} of their spread, {found.tolerance:.2%} is allowed, "
        f"because plain attention in {found.reference_dtype} differs by {found.reference_distance:.2%}"
    )
    if found.is_conclusive:
        return message
    return f"{message}: wrong ranks could pass; serve with --dtype float32 --kv-dtype auto to be sure"
