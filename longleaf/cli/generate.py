"""`longleaf ask` and `longleaf generate`."""

import shutil
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from typing import Annotated, TextIO

import typer

from longleaf.cli.flags import Flags, takes_flags, takes_server
from longleaf.cli.options import AsJson, ServerOptions, connect, exactness_line, print_json, read_input
from longleaf.cli.provenance_output import SourceFlags, SourceList
from longleaf.errors import Unavailable
from longleaf.formatting import human_count, human_seconds
from longleaf.types import Delta, Event, Finished, Recovering, Started

Under = Callable[[Finished], None]
"""Prints additional output below an answer."""
MAKE_ROOM = "\x1bD\x1bM"
"""Terminal sequence that ensures a line below the cursor, and keeps the cursor."""
SAVE, RESTORE = "\x1b7", "\x1b8"
"""Terminal sequences that save and restore the cursor."""
BELOW = "\r\n\x1b[K"
"""Terminal sequence that moves to the next line and erases it."""


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
    """Ask a question about a context.

    The context does not change, so any number of questions can run at the same time.

    Examples:

      longleaf ask book "Who is the captain?"
      longleaf ask book "Summarize chapter 3." --max-tokens 500 --sources
    """
    options = flags.options(as_json) | traced.options()
    with connect(server) as client:
        answer = client.ask(context, read_input(question, "question"), **options)
        show(answer, as_json, flags.samples, partial(SourceList(client).print, context))


@takes_flags(Flags)
@takes_server
def generate(
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt; - reads standard input.")],
    server: ServerOptions,
    flags: Flags,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template of the model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text from a prompt, without a context.

    Examples:

      longleaf generate --prompt "Write a haiku about a whale." --max-tokens 50
      longleaf generate --raw --prompt "Call me" --temperature 0.8 --samples 3
    """
    options = flags.options(as_json)
    if raw:
        options["use_chat_template"] = False
    with connect(server) as client:
        show(client.generate(read_input(prompt, "prompt"), **options), as_json, flags.samples)


def no_output(_: Finished) -> None:
    """Prints nothing."""


def show(answer: Generator[Event, None, None], as_json: bool, num_samples: int = 1, under: Under = no_output) -> None:
    """Prints an answer while it streams: its text followed by the output of `under`, or one JSON object per delta and
    one at the end. The text of several samples is printed when each is complete."""
    with closing(answer):
        events = with_notes(answer)
        if as_json:
            print_events(events, num_samples)
        elif num_samples > 1:
            _print_samples(events, num_samples, under)
        else:
            _print_text(events, under)


def with_notes(answer: Iterable[Event]) -> Generator[Event, None, None]:
    """The events. Prints to stderr a note if the answer may exceed the length that the model was trained for, and the
    progress of a recovery."""
    is_reported, line = False, RecoveryLine(sys.stderr)
    try:
        for event in answer:
            if isinstance(event, Started) and event.is_beyond_trained and not is_reported:
                print("note: the answer may be longer than the model was trained for", file=sys.stderr)
                is_reported = True
            if isinstance(event, Recovering):
                line.show(event)
            else:
                line.hide()
            yield event
    finally:
        line.hide()


class RecoveryLine:
    """The progress of a recovery: in the line below the answer on a terminal, and printed once elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_shown = self._is_shown = False

    def show(self, recovering: Recovering) -> None:
        counts = list[str]()
        if recovering.total_tokens:  # 0: hidden from users of a service with credentials
            counts.append(f"{recovering.recovered_tokens:,} of {recovering.total_tokens:,} tokens")
        if recovering.lost_tokens:
            counts.append(f"{recovering.lost_tokens:,} left for this answer")
        message = f"restoring keys and values: {', '.join(counts)}"
        if recovering.missing_weights:
            message = f"waiting for weights of lost ranks: {recovering.missing_weights:.0%} of the model"
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


def print_events(answer: Iterable[Event], num_samples: int) -> None:
    """Prints one JSON object per delta and one at the end. Raises Unavailable for an incomplete answer."""
    num_open = num_samples
    for event in answer:
        match event:
            case Delta():
                fields: dict[str, object] = {"text": event.text, "token_ids": event.token_ids}
                fields |= {"logprobs": event.logprobs} if event.logprobs else {}
            case Finished():
                fields = {"finish_reason": event.reason, "usage": event.usage, "is_exact": event.is_exact}
                fields |= {} if event.is_exact else {"exactness_note": event.exactness_note}
                fields |= {"dequantization": event.dequantization} if event.dequantization else {}
                fields |= {"attribution": event.attribution} if event.attribution else {}
                num_open -= 1
            case _:
                continue
        print_json(fields | ({"sample": event.sample} if num_samples > 1 else {}))
        if not num_open:
            return
    raise Unavailable("the answer ended before its last event")


def _print_text(answer: Iterable[Event], under: Under) -> None:
    for event in answer:
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
        if isinstance(event, Finished):
            print(flush=True)
            under(event)
            print(footnote(event), file=sys.stderr)
            return
    raise Unavailable("the answer ended before its last event")


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
    raise Unavailable("the answer ended before its last event")


def footnote(event: Finished) -> str:
    """The length, times and exactness of an answer."""
    usage, timings = event.usage, event.timings
    speed = decode_speed(event)
    rate = f", {speed:,.1f} tokens/s" if speed else ""
    prompt = f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens were in memory"
    first = f"first token after {human_seconds(timings.first_token_seconds)}"
    drafts = f"; {usage.accepted_tokens:,} of {usage.drafted_tokens:,} drafted tokens accepted"
    drafts = drafts if usage.drafted_tokens else ""
    return f"[{_length(event)}; {first}{rate}{drafts}; {prompt}; {exactness_line(event)}]"


def _length(event: Finished) -> str:
    """The number of tokens of an answer, and the reason for its end unless it is the model's end token."""
    tokens = human_count(event.usage.completion_tokens, "token")
    match event.reason:
        case "length":
            return f"cut off after {tokens} (--max-tokens)"
        case "stop" if not event.matched_stop:
            return f"{tokens}, complete"
        case "stop" | "stop_token":
            return f"{tokens}, ended by a stop {'string' if event.reason == 'stop' else 'token'}"
        case "end_token":
            return tokens
        case "unspecified":
            return f"{tokens}, ended for an unknown reason"


def decode_speed(event: Finished) -> float | None:
    """Tokens per second after the first token; None if there is only one."""
    after_first, seconds = event.usage.completion_tokens - 1, event.timings.decode_seconds
    return after_first / seconds if after_first > 0 and seconds > 0 else None
