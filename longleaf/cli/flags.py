"""Commands with many options: those are the fields of a dataclass. Here are the ones that `longleaf ask` and
`longleaf generate` share."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import wraps
from typing import Annotated, Any, cast, get_type_hints

from longleaf.cli.options import ServerOptions, option
from longleaf.errors import InvalidArgument
from longleaf.types import GenerateOptions

CHOICE = "How tokens are chosen"
ANSWER = "What is answered"
SERVICE = "How the service treats it"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Values of the flags, as they were typed."""

    max_tokens: Annotated[int, option(ANSWER, "Most tokens to generate.")] = 128
    temperature: Annotated[
        float | None, option(CHOICE, "0 is greedy; higher is livelier.", default="the service's, 0")
    ] = None
    top_k: Annotated[
        int | None, option(CHOICE, "Keep the k most likely tokens; 0 keeps all.", default="the service's, 0")
    ] = None
    top_p: Annotated[
        float | None,
        option(CHOICE, "Keep the likeliest tokens up to this share of probability.", default="the service's, 1"),
    ] = None
    min_p: Annotated[
        float | None,
        option(CHOICE, "Drop tokens less likely than this share of the likeliest one.", default="the service's, 0"),
    ] = None
    repetition_penalty: Annotated[
        float | None, option(CHOICE, "Above 1 avoids all tokens seen so far.", default="the service's, 1")
    ] = None
    presence_penalty: Annotated[float, option(CHOICE, "Above 0 avoids tokens that the answer has already.")] = 0.0
    frequency_penalty: Annotated[float, option(CHOICE, "As before, for each time that it has them.")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(CHOICE, "Make a token more or less likely, as ID=BIAS; may be given several times.", default=False),
    ] = None
    seed: Annotated[
        int | None, option(CHOICE, "Same seed, same tokens, up to rounding under load.", default="random")
    ] = None
    stop: Annotated[
        list[str] | None, option(ANSWER, "Text that ends the answer; may be given several times.", default=False)
    ] = None
    stop_token: Annotated[
        list[int] | None, option(ANSWER, "Token id that ends the answer; may be given several times.", default=False)
    ] = None
    ignore_end_token: Annotated[bool, option(ANSWER, "Go on past the model's end token.", "--ignore-end-token")] = False
    samples: Annotated[int, option(ANSWER, "Answers to the same prompt, which is read once.")] = 1
    logprobs: Annotated[
        int | None,
        option(ANSWER, "With --json: tell how likely each token was, and so many others.", default=False),
    ] = None
    token_bytes: Annotated[
        bool, option(ANSWER, "With --logprobs: tell the bytes of each token, too, in base64.", "--token-bytes")
    ] = False
    max_draft_tokens: Annotated[
        int | None,
        option(
            SERVICE,
            "Tokens that a step may try ahead at most, guessed from what was said before; 0: none.",
            default="the service's",
        ),
    ] = None
    priority: Annotated[int, option(SERVICE, "Higher goes first.")] = 0
    client: Annotated[str, option(SERVICE, "Whom a fair share is counted for.", default="this machine")] = ""
    resumable: Annotated[
        bool, option(SERVICE, "Go on where the answer broke off when the connection is lost.", "--resumable")
    ] = False
    request_id: Annotated[
        str,
        option(
            SERVICE,
            "Names the answer; with --resumable the same command again, for a minute, reads it from its begin.",
            default="random",
        ),
    ] = ""
    timeout: Annotated[float | None, option(SERVICE, "Seconds for the whole answer.", default="no limit")] = None

    def options(self, as_json: bool) -> GenerateOptions:
        """The flags in the client's words. Raises InvalidArgument."""
        if self.logprobs is not None and not as_json:
            raise InvalidArgument("--logprobs", "are shown with --json alone")
        if self.token_bytes and self.logprobs is None:
            raise InvalidArgument("--token-bytes", "are told with --logprobs alone")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidArgument("--timeout", "must be above 0 seconds")
        named = {"stop_token": "stop_tokens", "samples": "num_samples", "logprobs": "num_logprobs"}
        named |= {"token_bytes": "with_token_bytes"}
        given = {named.get(name, name): value for name, value in asdict(self).items()}
        given["logit_bias"] = _biases(self.logit_bias or [])
        return cast(GenerateOptions, given)


def _biases(typed: list[str]) -> dict[int, float]:
    try:
        pairs = [pair.split("=", 1) for pair in typed]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise InvalidArgument("--logit-bias", f"{' '.join(typed)} is not ID=BIAS") from None


def takes_flags(kind: type[Any], taken: str = "flags") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with an option for each field of the dataclass `kind`, which it gets together as `taken`."""
    hints = get_type_hints(kind, include_extras=True)
    added = {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    }

    def takes(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            flags = kind(**{name: given.pop(name) for name in added})
            command(**given, **{taken: flags})

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != taken
        ]
        signature = inspect.Signature([*own, *added.values()])
        cast(Any, run).__signature__ = signature
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        return run

    return takes


takes_server = takes_flags(ServerOptions, "server")
"""A command that calls a service, with the options of where it is and how to come in."""
