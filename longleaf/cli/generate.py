"""`longleaf ask` and `longleaf generate`."""

import shutil
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Annotated, TextIO

import typer

from longleaf.cli.flags import Flags, takes_flags, takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, exactness_told, print_json, read_input
from longleaf.cli.provenance_output import SourceFlags, SourceList
from longleaf.errors import Unavailable
from longleaf.formatting import human_seconds
from longleaf.types import Delta, Event, Finished, Recovering, Started

Under = Callable[[Finished], None]
"""Prints what comes under an answer."""
MAKE_ROOM = "\x1bD\x1bM"
"""For terminals: there is a line below the cursor, which stays where it is."""
SAVE, RESTORE = "\x1b7", "\x1b8"
"""For terminals: the cursor goes back to where it was saved."""
BELOW = "\r\n\x1b[K"
"""For terminals: to the line below, which is erased."""


@takes_flags(SourceFlags, "traced")
@takes_flags(Flags)
@takes_server
def ask(
    context: Annotated[str, typer.Argument(help="Name of the context.")],
    question: Annotated[str, typer.Argument(help="The question; - reads standard input.")],
    server: ServerOptions,
    flags: Flags,
    traced: SourceFlags,
    as_json: AsJson = False,
) -> None:
    """Ask about a context. The context stays as it is, so any number may ask at the same time.

    Example: longleaf ask book "Who did it?" --max-tokens 200
    """
    options = flags.options(as_json) | traced.options()
    with connect(server) as client:
        answer = client.ask(context, read_input(question, "question"), **options)
        show(answer, as_json, flags.samples, SourceList(client, context).print)


@takes_flags(Flags)
@takes_server
def generate(
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt; - reads standard input.")],
    server: ServerOptions,
    flags: Flags,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the model's chat template around the prompt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate from a prompt, without a context.

    Example: longleaf generate --prompt "Once upon a time" --max-tokens 50 --temperature 0.8 --samples 3
    """
    options = flags.options(as_json)
    if raw:
        options["use_chat_template"] = False
    with connect(server) as client:
        show(client.generate(read_input(prompt, "prompt"), **options), as_json, flags.samples)


def nothing_more(_: Finished) -> None:
    """Under an answer."""


def show(
    answer: Generator[Event, None, None], as_json: bool, num_samples: int = 1, under: Under = nothing_more
) -> None:
    """Prints an answer while it streams: text, and what is `under` it, or one JSON object per delta and one at the end.
    Of several samples the text of each is printed when it is whole."""
    with closing(answer):
        events = _noted(answer)
        if as_json:
            _print_json(events, num_samples)
        elif num_samples > 1:
            _print_samples(events, num_samples, under)
        else:
            _print_text(events, under)


def _noted(answer: Iterable[Event]) -> Generator[Event, None, None]:
    """The events. Says on stderr that they may lead beyond what the model was trained for, once, and while they wait
    for a recovery how far that is."""
    is_reported, line = False, RecoveryLine(sys.stderr)
    try:
        for event in answer:
            if isinstance(event, Started) and event.is_beyond_trained and not is_reported:
                print("note: this may go beyond the length that the model was trained for", file=sys.stderr)
                is_reported = True
            if isinstance(event, Recovering):
                line.show(event)
            else:
                line.hide()
            yield event
    finally:
        line.hide()


class RecoveryLine:
    """How far a recovery is, on a terminal in the line below an answer, which goes on where it was. Elsewhere it is
    said once that there is one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_shown = self._is_shown = False

    def show(self, recovering: Recovering) -> None:
        counts = list[str]()
        if recovering.total_tokens:  # users of a service with credentials are not told
            counts.append(f"{recovering.recovered_tokens:,} of {recovering.total_tokens:,} tokens")
        if recovering.lost_tokens:
            counts.append(f"{recovering.lost_tokens:,} to go for this answer")
        message = f"recovering: {', '.join(counts)}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"{MAKE_ROOM}{SAVE}{BELOW}{message[:width]}{RESTORE}")
            self._out.flush()
        elif not self._has_shown:
            print(message, file=self._out, flush=True)
        self._has_shown = self._is_shown = True

    def hide(self) -> None:
        if self._is_shown and self._is_terminal:
            self._out.write(f"{SAVE}{BELOW}{RESTORE}")
            self._out.flush()
        self._is_shown = False


def _print_json(answer: Iterable[Event], num_samples: int) -> None:
    num_open = num_samples
    for event in answer:
        match event:
            case Delta():
                reported: dict[str, object] = {"text": event.text, "token_ids": event.token_ids}
                reported |= {"logprobs": event.logprobs} if event.logprobs else {}
            case Finished():
                reported = {"finish_reason": event.reason, "usage": event.usage, "is_exact": event.is_exact}
                reported |= {} if event.is_exact else {"exactness_note": event.exactness_note}
                reported |= {"attribution": event.attribution} if event.attribution else {}
                num_open -= 1
            case _:
                continue
        print_json(reported | ({"sample": event.sample} if num_samples > 1 else {}))
        if not num_open:
            return
    raise Unavailable("the answer broke off")


def _print_text(answer: Iterable[Event], under: Under) -> None:
    for event in answer:
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
        if isinstance(event, Finished):
            print(flush=True)
            under(event)
            print(footnote(event), file=sys.stderr)
            return
    raise Unavailable("the answer broke off")


def _print_samples(answer: Iterable[Event], num_samples: int, under: Under) -> None:
    texts = [""] * num_samples
    num_open = num_samples
    for event in answer:
        if isinstance(event, Delta):
            texts[event.sample] += event.text
        if isinstance(event, Finished):
            print(f"[{event.sample}] {texts[event.sample]}", flush=True)
            under(event)
            print(footnote(event), file=sys.stderr)
            num_open -= 1
            if not num_open:
                return
    raise Unavailable("the answer broke off")


def footnote(event: Finished) -> str:
    """What an answer took."""
    usage, timings = event.usage, event.timings
    speed = decode_speed(event)
    rate = f", {speed:,.1f} tokens/s" if speed else ""
    prompt = f"{usage.prompt_tokens:,} tokens before, {usage.cached_tokens:,} of them held"
    first = f"first after {human_seconds(timings.first_token_seconds)}"
    drafts = f"; {usage.accepted_tokens:,} of {usage.drafted_tokens:,} drafted tokens accepted"
    drafts = drafts if usage.drafted_tokens else ""
    reason = "for a reason that this client does not know" if event.reason == "unspecified" else event.reason
    return f"[{usage.completion_tokens:,} tokens ({reason}); {first}{rate}{drafts}; {prompt}; {exactness_told(event)}]"


def decode_speed(event: Finished) -> float | None:
    """Tokens per second after the first token; None when there was no second."""
    after_first, seconds = event.usage.completion_tokens - 1, event.timings.decode_seconds
    return after_first / seconds if after_first > 0 and seconds > 0 else None
