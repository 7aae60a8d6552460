"""Options as fields of a dataclass or a struct, and the options that the commands of generations share."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import msgspec
from msgspec import NODEFAULT

from longleaf.cli.options import ServerOptions, option
from longleaf.errors import InvalidArgument
from longleaf.options import Setting, config_from_flags, flags_of
from longleaf.read_limited import read_small
from longleaf.types import JSON_OBJECT, MAX_CONSTRAINT_BYTES, Constraint, GenerateOptions, json_schema, lark, regex

CHOICE = "Sampling"
ANSWER = "Answer"
SERVICE = "Scheduling and retries"
CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar")
"""Options that describe a constraint; at most one can be given."""
ClientId = Annotated[
    str,
    option(
        SERVICE,
        "Id for fair scheduling: each id gets an equal share of the service.",
        default="this machine",
        metavar="ID",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling options that `longleaf chat` has as well."""

    temperature: Annotated[
        float | None, option(CHOICE, "Sampling temperature; 0 is greedy.", default="set by the service, usually 0")
    ] = None
    top_k: Annotated[
        int | None,
        option(CHOICE, "Sample from the N most likely tokens; 0: from all.", default="set by the service, usually 0"),
    ] = None
    top_p: Annotated[
        float | None,
        option(
            CHOICE,
            "Sample from the most likely tokens whose total probability is X; 1: from all.",
            default="set by the service, usually 1",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        option(
            CHOICE,
            "Exclude tokens whose probability is below X times that of the most likely token.",
            default="set by the service, usually 0",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        option(
            CHOICE,
            "Above 1: penalize tokens of the context, the prompt and the answer so far.",
            default="set by the service, usually 1",
        ),
    ] = None
    seed: Annotated[
        int | None,
        option(
            CHOICE,
            "Seed of sampling; the same seed gives the same answer, unless rounding differs under load.",
            default="random",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Flags(SamplingFlags):
    """The parsed options."""

    max_tokens: Annotated[int, option(ANSWER, "Maximum number of tokens to generate.")] = 128
    presence_penalty: Annotated[float, option(CHOICE, "Above 0: penalize tokens that are already in the answer.")] = 0.0
    frequency_penalty: Annotated[
        float, option(CHOICE, "Above 0: penalize tokens for each occurrence in the answer.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        option(CHOICE, "Add BIAS to the logit of token ID; may be repeated.", default=False, metavar="ID=BIAS"),
    ] = None
    stop: Annotated[list[str] | None, option(ANSWER, "Text that ends the answer; may be repeated.", default=False)] = (
        None
    )
    stop_token: Annotated[
        list[int] | None, option(ANSWER, "Token id that ends the answer; may be repeated.", default=False, metavar="ID")
    ] = None
    ignore_end_token: Annotated[bool, option(ANSWER, "Continue after the model's end token.", "--ignore-end-token")] = (
        False
    )
    json_schema: Annotated[
        Path | None,
        option(ANSWER, "Answer with JSON that the JSON Schema in FILE accepts.", default=False, metavar="FILE"),
    ] = None
    json_object: Annotated[bool, option(ANSWER, "Answer with a JSON object.", "--json-object")] = False
    regex: Annotated[
        str | None,
        option(ANSWER, "Answer with text that the regular expression matches.", default=False, metavar="REGEX"),
    ] = None
    grammar: Annotated[
        Path | None,
        option(ANSWER, "Answer with text of the Lark grammar in FILE.", default=False, metavar="FILE"),
    ] = None
    samples: Annotated[int, option(ANSWER, "Number of answers; the prompt is processed only once.")] = 1
    logprobs: Annotated[
        int | None,
        option(ANSWER, "With --json: print the log probability of each token and of N alternatives.", default=False),
    ] = None
    token_bytes: Annotated[
        bool, option(ANSWER, "With --logprobs: also print the bytes of each token, in base64.", "--token-bytes")
    ] = False
    max_draft_tokens: Annotated[
        int | None,
        option(
            SERVICE,
            "Maximum number of tokens drafted per step by n-gram lookup, which makes quotations faster; 0: no drafts.",
            default="set by the service",
        ),
    ] = None
    priority: Annotated[int, option(SERVICE, "Requests of higher priority run first.")] = 0
    client: ClientId = ""
    resumable: Annotated[
        bool, option(SERVICE, "Continue the answer when a lost connection is restored.", "--resumable")
    ] = False
    request_id: Annotated[
        str,
        option(
            SERVICE,
            "Id of the answer; with --resumable, repeating the command within a minute prints the same answer from its "
            "beginning.",
            default="random",
            metavar="ID",
        ),
    ] = ""
    timeout: Annotated[
        float | None, option(SERVICE, "Time limit for the whole answer.", default="no limit", metavar="SECONDS")
    ] = None

    def options(self, as_json: bool) -> GenerateOptions:
        """Options for the client. Raises InvalidArgument."""
        if self.logprobs is not None and not as_json:
            raise InvalidArgument("--logprobs", "needs --json")
        if self.token_bytes and self.logprobs is None:
            raise InvalidArgument("--token-bytes", "needs --logprobs")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidArgument("--timeout", "must be above 0 seconds")
        named = {"stop_token": "stop_tokens", "samples": "num_samples", "logprobs": "num_logprobs"}
        named |= {"token_bytes": "with_token_bytes"}
        given = {named.get(name, name): value for name, value in asdict(self).items() if name not in CONSTRAINTS}
        given["constraint"] = self._constraint()
        given["logit_bias"] = _biases(self.logit_bias or [])
        return cast(GenerateOptions, given)

    def _constraint(self) -> Constraint | None:
        """The constraint that the options describe. Raises InvalidArgument."""
        given = [name for name, value in asdict(self).items() if name in CONSTRAINTS and value not in (None, False)]
        if len(given) > 1:
            names = [f"--{name.replace('_', '-')}" for name in given]
            raise InvalidArgument(names[1], f"cannot be given together with {names[0]}")
        if self.json_schema is not None:
            return json_schema(_text_of(self.json_schema, "--json-schema"))
        if self.grammar is not None:
            return lark(_text_of(self.grammar, "--grammar"))
        if self.regex is not None:
            return regex(self.regex)
        return JSON_OBJECT if self.json_object else None


def _text_of(file: Path, flag: str) -> str:
    """The text of a file. Raises InvalidArgument."""
    try:
        return read_small(flag, file, MAX_CONSTRAINT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(flag, f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _biases(typed: list[str]) -> dict[int, float]:
    try:
        pairs = [pair.split("=", 1) for pair in typed]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise InvalidArgument("--logit-bias", f"{' '.join(typed)} is not ID=BIAS") from None


def takes_flags(kind: type[Any], taken: str = "flags") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: adds an option for each field of the dataclass `kind`, and passes an instance as `taken`."""
    hints = get_type_hints(kind, include_extras=True)
    added = {field.name: (hints[field.name], field.default) for field in fields(kind)}
    return _takes(added, lambda values: kind(**values), taken)


def takes_config(struct: type[msgspec.Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: adds an option for each setting of `struct`, and passes an instance as `config`."""
    added = {setting.name: _parameter(setting) for setting in flags_of(struct)}
    return _takes(added, partial(config_from_flags, struct), "config")


def _parameter(setting: Setting) -> tuple[Any, Any]:
    """The annotation and the default of a setting's parameter."""
    given, kind, default = setting.option, setting.kind, setting.field.default
    if given.flag_default is not None:
        kind, default = kind | None, None
    elif default is NODEFAULT or default == ():
        default = None
    if given.is_path:
        kind = Path | None
    elif kind == tuple[str, ...]:
        kind = list[str] | None
    flag = option(given.group, given.help, setting.names, default=given.default, metavar=setting.metavar)
    return Annotated[kind, flag], default


def _takes(
    added: dict[str, tuple[Any, Any]], make: Callable[[dict[str, Any]], Any], taken: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: adds parameters, given by their annotations and defaults, and passes the object that `make`
    creates from their values as `taken`."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]

    def takes(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            made = make({name: given.pop(name) for name in added})
            command(**given, **{taken: made})

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != taken
        ]
        signature = inspect.Signature([*own, *parameters])
        cast(Any, run).__signature__ = signature
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        return run

    return takes


takes_server = takes_flags(ServerOptions, "server")
"""Decorates a command that calls a service: adds the options of the connection."""
