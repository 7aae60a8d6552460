"""Messages and exit codes of errors on the command line."""

from longleaf.cli.options import message_of
from longleaf.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    LongleafError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from longleaf.options import flag_names, parts_of, with_flag_names
from longleaf.service_settings import SecurityConfig, ServiceConfig, TelemetryConfig

OPTIONS = {
    "credential": "--credential-file",
    "tls_ca": "--tls-ca",
    "sampling.max_token_count": "--max-tokens",
    "sampling.temperature": "--temperature",
    "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p",
    "sampling.seed": "--seed",
    "sampling.stop": "--stop",
    "sampling.min_p": "--min-p",
    "sampling.repetition_penalty": "--repetition-penalty",
    "sampling.presence_penalty": "--presence-penalty",
    "sampling.frequency_penalty": "--frequency-penalty",
    "sampling.logit_bias": "--logit-bias",
    "sampling.stop_token_ids": "--stop-token",
    "sampling.logprob_count": "--logprobs",
    "return_token_bytes": "--token-bytes",
    "sample_count": "--samples",
    "max_draft_token_count": "--max-draft-tokens",
    "client_id": "--client",
    "request_id": "--request-id",
    "token_count": "--tokens",
    "prompt_token_count": "--prompt-tokens",
    "max_token_count": "--max-tokens",
    "context.display_name": "--display-name",
    "context.ttl": "--ttl",
    "config.name": "--name",
    "config.display_name": "--display-name",
    "config.ttl": "--ttl",
    "config.upload_id": "--upload-id",
    "prefaced_config.system": "--system",
    "config.capacity_token_count": "--capacity",
    "resume": "--resume",
    "min_interval_duration": "--interval",
    "model_name": "--model-name",
}
"""Command-line options of the request fields and settings whose names differ."""


ACCESS = {"tls_ca": "--tls-ca", **flag_names(SecurityConfig, TelemetryConfig)}
"""Settings of security and telemetry, which errors about another setting may name."""


CONTEXTS = "contexts/"
"""Prefix of resource names of contexts."""


def describe(error: LongleafError) -> str:
    """The error message, with command-line options instead of field names."""
    if isinstance(error, NotFound) and (context := error.name.removeprefix(CONTEXTS)) != error.name:
        return f"there is no context named {context}; `longleaf contexts list` lists all contexts"
    if isinstance(error, AlreadyExists) and (context := error.name.removeprefix(CONTEXTS)) != error.name:
        advice = f"append to it (`longleaf ingest --append`), delete it (`longleaf contexts delete {context}`)"
        return f"there is already a context named {context}: {advice}, or use another name"
    if not isinstance(error, InvalidArgument):
        return message_of(error)
    settings = flag_names(*parts_of(ServiceConfig).values())
    field = (settings | OPTIONS).get(error.field, error.field)
    advice = "; any text may be the --display-name" if error.field == "config.name" else ""
    return f"{field}: {with_flag_names(error.description, ACCESS)}{advice}"


def exit_code(error: LongleafError) -> int:
    """1 if a retry may help, 2 if the input must change."""
    if isinstance(error, ResourceExhausted) and error.subject.startswith("quotas/"):
        return 2 if error.retry_seconds is None else 1
    may_help = isinstance(error, Unavailable | ResourceExhausted | DeadlineExceeded) or type(error) is LongleafError
    return 1 if may_help else 2
