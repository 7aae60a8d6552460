"""`longleaf ask` and `longleaf generate`."""

import sys
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Annotated

import typer

from longleaf.commands.options import AsJson, Server, connect, print_json
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.messages import Delta, Event, Finished, SamplingOptions

MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this share of probability.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.", show_default="random")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]
IgnoreEnd = Annotated[bool, typer.Option("--ignore-end-token", help="Go on past the model's end token.")]


def ask(
    context: Annotated[str, typer.Argument(help="Name of the context.")],
    question: Annotated[str, typer.Argument(help="The question.")],
    server: Server,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_end_token: IgnoreEnd = False,
    as_json: AsJson = False,
) -> None:
    """Ask about a context. The context stays as it is.

    Example: longleaf ask book "Who did it?" --max-tokens 200
    """
    options = _sampling(max_tokens, temperature, top_k, top_p, seed, stop, ignore_end_token)
    with connect(server) as client:
        show(client.ask(context, question, **options), as_json)


def generate(
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt; - reads standard input.")],
    server: Server,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_end_token: IgnoreEnd = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the model's chat template around the prompt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate from a prompt, without a context.

    Example: longleaf generate --prompt "Once upon a time" --max-tokens 50 --temperature 0.8
    """
    options = _sampling(max_tokens, temperature, top_k, top_p, seed, stop, ignore_end_token)
    text = _read_input() if prompt == "-" else prompt
    with connect(server) as client:
        show(client.generate(text, use_chat_template=False if raw else None, **options), as_json)


def _read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument("prompt", f"standard input is not UTF-8 at byte {error.start}") from None


def _sampling(
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: list[str] | None,
    ignore_end_token: bool,
) -> SamplingOptions:
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        ignore_end_token=ignore_end_token,
    )


def show(answer: Generator[Event, None, None], as_json: bool) -> None:
    """Prints an answer while it streams: text, or one JSON object per delta and one at the end."""
    with closing(answer):
        _print(answer, as_json)


def _print(answer: Iterable[Event], as_json: bool) -> None:
    for event in answer:
        match event:
            case Delta(_, token_ids, text) if as_json:
                print_json({"text": text, "token_ids": token_ids})
            case Delta(_, _, text):
                print(text, end="", flush=True)
            case Finished() if as_json:
                print_json({"finish_reason": event.reason, "usage": event.usage})
                return
            case Finished():
                print(flush=True)
                print(footnote(event), file=sys.stderr)
                return
            case _:
                pass
    raise Unavailable("the answer broke off")


def footnote(event: Finished) -> str:
    """What an answer took."""
    usage, timings = event.usage, event.timings
    speed = decode_speed(event)
    rate = f", {speed:.1f} tokens/s" if speed else ""
    prompt = f"{usage.prompt_tokens:,} tokens before, {usage.cached_tokens:,} of them held"
    first = f"first after {timings.first_token_seconds:.2f} s"
    return f"[{usage.completion_tokens} tokens ({event.reason}); {first}{rate}; {prompt}]"


def decode_speed(event: Finished) -> float | None:
    """Tokens per second after the first token; None when there was no second."""
    after_first, seconds = event.usage.completion_tokens - 1, event.timings.decode_seconds
    return after_first / seconds if after_first > 0 and seconds > 0 else None
