"""`longleaf serve`: replaces itself by `python -m coordinator` with the same options."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from longleaf.cli.exec_process import become
from longleaf.cli.flags import takes_flags
from longleaf.cli.options import KV_DTYPE_HELP, AsJson, option
from longleaf.config import (
    DEFAULT_PORT,
    DRAIN_SECONDS,
    DataConfig,
    DeviceName,
    DtypeName,
    EngineConfig,
    GraphsChoice,
    KernelsChoice,
    KvDtypeName,
    Launcher,
    MergeChoice,
    PartialDtype,
    PrefillName,
    SamplingDefaults,
    SnapshotsChoice,
    WindowKeys,
    embedded_model,
)
from longleaf.launch import coordinator_command
from longleaf.service_settings import HttpConfig, LogFormat, LogLevel, SecurityConfig, TelemetryConfig
from longleaf.topology import count_ranks

SERVICE = "Model and address"
RANKS = "Ranks"
KEYS = "Keys and values"
STORAGE = "Persistence"
REQUESTS = "Requests and time limits"
LOSSES = "Lost ranks"
SECURITY = "Security"
HTTP = "HTTP"
TELEMETRY = "Metrics, logs and traces"
_DEFAULTS = EngineConfig(model="")
_TELEMETRY = TelemetryConfig()


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """The parsed options."""

    model: Annotated[
        Path | None, option(SERVICE, "Folder of the checkpoint.", default="the packaged look-up model", metavar="DIR")
    ] = None
    model_name: Annotated[
        str | None,
        option(SERVICE, "Name of the model for clients.", default="the name of the folder", metavar="NAME"),
    ] = None
    sampling_defaults: Annotated[
        SamplingDefaults,
        option(
            SERVICE,
            "Sampling parameters for requests that omit them: greedy decoding, or those in the model's "
            "generation_config.json.",
        ),
    ] = "greedy"
    http: Annotated[
        int | None,
        option(
            HTTP,
            "Port of the HTTP gateway: OpenAI-compatible API and web page; 0: any free port.",
            default="off",
            metavar="PORT",
        ),
    ] = None
    allow_host: Annotated[
        str | None,
        option(
            HTTP,
            "Host names under which clients may reach the gateway, separated by commas. IP addresses are always "
            "accepted.",
            default="localhost",
            metavar="NAMES",
        ),
    ] = None
    public_url: Annotated[
        str | None,
        option(
            HTTP,
            "URL of the gateway behind a proxy, such as https://books.example.",
            default="its own address",
            metavar="URL",
        ),
    ] = None
    host: Annotated[str, option(SERVICE, "Address to listen on; 0.0.0.0: all interfaces.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, option(SERVICE, "gRPC port; 0: any free port.", metavar="PORT")] = DEFAULT_PORT
    dtype: Annotated[DtypeName, option(SERVICE, "Type of weights and activations; auto: that of the checkpoint.")] = (
        _DEFAULTS.dtype
    )
    verify_model: Annotated[
        bool,
        option(
            SERVICE,
            "Compare the logits of the model with those of transformers' own attention before a checkpoint serves for "
            "the first time, and refuse a model that differs. Without the comparison, answers are not marked exact.",
            "--verify-model/--no-verify-model",
        ),
    ] = _DEFAULTS.verify_model
    allow_long: Annotated[
        bool,
        option(SERVICE, "Accept more tokens than the model was trained for; answers may get worse.", "--allow-long"),
    ] = _DEFAULTS.allow_long
    data_dir: Annotated[
        Path | None,
        option(
            STORAGE,
            "Folder for contexts, which then survive restarts; only one service at a time can use it.",
            default="contexts are lost when the service ends",
            metavar="DIR",
        ),
    ] = None
    warm: Annotated[
        bool,
        option(
            STORAGE,
            "Load stored contexts at the start, as many as fit, instead of on first use.",
            "--warm",
        ),
    ] = False
    snapshots: Annotated[
        SnapshotsChoice,
        option(
            STORAGE,
            "When to save keys and values (snapshots) to storage, so that they need not be computed again after a "
            "restart or an eviction; seal: after each ingest; demand: on export; off: never.",
        ),
    ] = DataConfig().snapshots
    snapshot_url: Annotated[
        str | None,
        option(
            STORAGE,
            "Storage of snapshots: a folder that all machines share, or a URL such as s3://bucket/longleaf.",
            default="in the data folder",
            metavar="URL",
        ),
    ] = None
    snapshot_quota: Annotated[
        int | None,
        option(
            STORAGE,
            "Maximum size of all snapshots; those of the least recently used contexts are deleted first.",
            default="no limit",
            metavar="BYTES",
        ),
    ] = None
    snapshot_expiry: Annotated[
        float | None,
        option(
            STORAGE,
            "Delete the snapshots of a context that has not been used for this time.",
            default="never",
            metavar="SECONDS",
        ),
    ] = None
    world_size: Annotated[int, option(RANKS, "Number of ranks (worker processes).")] = 1
    launcher: Annotated[
        Launcher,
        option(
            RANKS,
            "How ranks are started; local: as plain processes, fastest on one machine; ray: on one or several "
            "machines.",
        ),
    ] = "ray"
    ray_address: Annotated[
        str | None,
        option(
            RANKS,
            "Ray cluster to join, such as auto.",
            default="a new one on this machine",
            metavar="ADDRESS",
        ),
    ] = None
    wait_for_ranks: Annotated[
        float,
        option(
            RANKS,
            "How long to wait until the Ray cluster has a CPU (and GPU) for every rank; 0: fail immediately.",
            metavar="SECONDS",
        ),
    ] = 0.0
    device: Annotated[
        DeviceName,
        option(
            RANKS,
            "Device of the ranks; auto: one GPU per rank if there are GPUs, else CPUs; cuda: GPUs, which ranks of "
            "the local launcher may share.",
        ),
    ] = _DEFAULTS.device
    kernels: Annotated[KernelsChoice, option(RANKS, "Attention kernels; auto: the fastest available.")] = (
        _DEFAULTS.kernels
    )
    graphs: Annotated[
        GraphsChoice,
        option(RANKS, "CUDA graphs for decode steps (generating tokens); auto: where possible."),
    ] = _DEFAULTS.graphs
    threads: Annotated[int, option(RANKS, "CPU threads of each rank.")] = _DEFAULTS.threads_per_rank
    merge: Annotated[
        MergeChoice,
        option(
            RANKS,
            "Algorithm that merges the partial attention results of the ranks; auto: the fastest, measured at the "
            "start.",
        ),
    ] = _DEFAULTS.merge
    partials: Annotated[
        PartialDtype,
        option(
            RANKS,
            "Type in which ranks exchange partial results; bfloat16 halves the bytes, with a relative error of up to "
            "2^-8 per hop, and answers are not exact.",
        ),
    ] = _DEFAULTS.partials
    prefill: Annotated[
        PrefillName,
        option(
            RANKS,
            "Tensors that ranks exchange during prefill (reading documents and prompts); auto: those with fewer bytes.",
        ),
    ] = _DEFAULTS.prefill
    kv_bytes: Annotated[
        int | None,
        option(
            KEYS,
            "Memory for keys and values per rank.",
            default="40 % of the free memory, divided among the ranks of a machine; on GPUs most of it",
            metavar="BYTES",
        ),
    ] = None
    kv_dtype: Annotated[KvDtypeName, option(KEYS, KV_DTYPE_HELP)] = _DEFAULTS.kv_dtype
    block_size: Annotated[
        int,
        option(KEYS, "Tokens per block, the unit in which memory for keys and values is allocated.", metavar="TOKENS"),
    ] = _DEFAULTS.block_size
    window_keys: Annotated[
        WindowKeys,
        option(
            KEYS,
            "Keys of sliding-window layers; sharded: all keys are kept, each on one rank; replicated: only the keys in "
            "the window are kept, on every rank, so that ranks exchange nothing in these layers while they decode.",
        ),
    ] = _DEFAULTS.window_keys
    window_bytes: Annotated[
        int | None,
        option(
            KEYS,
            "With --window-keys replicated: the part of --kv-bytes for sliding-window layers.",
            default="enough for --max-sequences, at most half",
            metavar="BYTES",
        ),
    ] = None
    max_sequences: Annotated[int, option(REQUESTS, "Maximum number of concurrent generations.")] = (
        _DEFAULTS.max_sequences
    )
    max_waiting: Annotated[
        int,
        option(
            REQUESTS,
            "Maximum number of waiting generations and ingests; further ones are refused, with a delay before a retry.",
        ),
    ] = _DEFAULTS.max_waiting
    unread_timeout: Annotated[
        float, option(REQUESTS, "Time after which a stream that its client does not read is ended.", metavar="SECONDS")
    ] = _DEFAULTS.unread_timeout
    chunk_size: Annotated[
        int, option(REQUESTS, "Maximum number of prompt or document tokens per step.", metavar="TOKENS")
    ] = _DEFAULTS.chunk_size
    target_itl_ms: Annotated[
        float,
        option(
            REQUESTS,
            "Target time between two tokens of a running answer while prompts and documents are read; sets the size of "
            "the chunks in which they are read.",
            metavar="MILLISECONDS",
        ),
    ] = _DEFAULTS.target_itl_ms
    max_draft_tokens: Annotated[
        int,
        option(
            REQUESTS,
            "Maximum number of tokens drafted per step by n-gram lookup in the context, the question and the answer. "
            "Drafts make quotations faster and do not change the answer. 0: no drafts.",
        ),
    ] = _DEFAULTS.max_draft_tokens
    start_timeout: Annotated[
        float, option(REQUESTS, "Time limit for loading the model; large models need more.", metavar="SECONDS")
    ] = _DEFAULTS.start_timeout
    drain_seconds: Annotated[
        float, option(REQUESTS, "How long running calls may continue after a shutdown request.", metavar="SECONDS")
    ] = DRAIN_SECONDS
    step_timeout: Annotated[
        float,
        option(
            REQUESTS,
            "Time limit of a step with few tokens; others get more. A rank that delays a step for longer is killed.",
            metavar="SECONDS",
        ),
    ] = _DEFAULTS.step_timeout
    form_timeout: Annotated[
        float,
        option(
            LOSSES,
            "Time within which the ranks must form a new group after a loss, or twice the time of the first group if "
            "that is longer; then they try again.",
            metavar="SECONDS",
        ),
    ] = _DEFAULTS.form_timeout
    lost_after: Annotated[
        float,
        option(LOSSES, "Time without a heartbeat after which a rank is killed and counts as lost.", metavar="SECONDS"),
    ] = _DEFAULTS.lost_after
    max_losses_per_minute: Annotated[
        int,
        option(
            LOSSES, "Maximum number of lost ranks per minute that are replaced immediately; others are replaced later."
        ),
    ] = _DEFAULTS.max_losses_per_minute
    tls_cert: Annotated[
        Path | None,
        option(SECURITY, "Certificate chain of the service, in PEM; reloaded when it changes.", default="no TLS"),
    ] = None
    tls_key: Annotated[
        Path | None, option(SECURITY, "Private key of the certificate, without a passphrase.", default="none")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        option(
            SECURITY,
            "Certificate authorities of clients, in PEM; every client must present a certificate.",
            default="no client certificates",
        ),
    ] = None
    credentials: Annotated[
        Path | None,
        option(
            SECURITY,
            "File of accepted credentials with their tenants and roles: the lines that `longleaf credentials new` "
            "prints; reloaded when it changes.",
            default="every caller is admin",
        ),
    ] = None
    health_port: Annotated[
        int | None,
        option(SECURITY, "With TLS: port for health checks in plain text.", default="none", metavar="PORT"),
    ] = None
    insecure: Annotated[
        bool,
        option(
            SECURITY,
            "Allow addresses other than loopback without TLS or without credentials, for services behind a proxy or "
            "in a private network.",
            "--insecure",
        ),
    ] = False
    share_prefixes: Annotated[
        bool,
        option(
            SECURITY,
            "Share the prefix cache between tenants. Response times then reveal prompts of other tenants.",
            "--share-prefixes",
        ),
    ] = False
    metrics_port: Annotated[
        int | None,
        option(TELEMETRY, "Port of Prometheus metrics; 0: any free port.", default="none", metavar="PORT"),
    ] = _TELEMETRY.metrics_port
    metrics_host: Annotated[str, option(TELEMETRY, "Address of the metrics port.", metavar="ADDRESS")] = (
        _TELEMETRY.metrics_host
    )
    log_format: Annotated[LogFormat, option(TELEMETRY, "Log lines as text, or as JSON objects.")] = (
        _TELEMETRY.log_format
    )
    log_level: Annotated[
        LogLevel,
        option(TELEMETRY, "Minimum severity to log; info includes every call and the choice of kernels and merges."),
    ] = _TELEMETRY.log_level
    traces: Annotated[
        bool,
        option(
            TELEMETRY,
            "Send traces over OTLP, configured by the variables OTEL_*; needs 'longleaf[otel]'.",
            "--traces",
        ),
    ] = _TELEMETRY.traces

    def config(self) -> EngineConfig:
        """The settings of the ranks."""
        shared = {name: value for name, value in asdict(self).items() if name in EngineConfig.__struct_fields__}
        shared |= {"model": str(self.model or embedded_model()), "threads_per_rank": self.threads}
        if self.snapshot_url is not None and "://" not in self.snapshot_url:
            shared |= {"snapshot_url": os.path.abspath(self.snapshot_url)}
        return EngineConfig(**shared)

    def data(self) -> DataConfig:
        """The settings of persistence."""
        return DataConfig(
            data_dir=os.path.abspath(self.data_dir) if self.data_dir else self.data_dir,
            warm=self.warm,
            snapshots=self.snapshots,
            snapshot_quota=self.snapshot_quota,
            snapshot_expiry=self.snapshot_expiry,
        )

    def security(self) -> SecurityConfig:
        """The settings of security."""
        return SecurityConfig(**self._of(SecurityConfig))

    def gateway(self) -> HttpConfig:
        """The settings of the HTTP gateway."""
        return HttpConfig(**self._of(HttpConfig))

    def telemetry(self) -> TelemetryConfig:
        """The settings of metrics, logs and traces."""
        return TelemetryConfig(**self._of(TelemetryConfig))

    def _of(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """The options that are fields of `struct`. Paths become absolute: the service may run in another folder."""
        found = {name: getattr(self, name) for name in struct.__struct_fields__}
        return {name: os.path.abspath(value) if isinstance(value, Path) else value for name, value in found.items()}


@takes_flags(ServeFlags)
def serve(flags: ServeFlags, as_json: AsJson = False) -> None:
    """Serve a model until interrupted.

    Once it is ready, the service prints a summary and `listening on HOST:PORT`; with --json, {"address": "HOST:PORT"}.
    The port opens earlier: while the model is loading, calls are refused with an error that has the progress. After an
    interrupt or SIGTERM, new calls are refused, and running calls get --drain-seconds to finish. A second interrupt
    ends them immediately.

    With --http PORT, an HTTP gateway listens on the same host, with the same certificate and credentials. Its address
    is printed on the next line; with --json, as {"http": "http://HOST:PORT"}.

    Examples:

      longleaf serve --launcher local --http 8000
      longleaf serve --model ./Qwen3-0.6B --world-size 4 --data-dir ~/.longleaf
    """
    command = coordinator_command(
        flags.config(),
        host=flags.host,
        port=flags.port,
        launcher=flags.launcher,
        ray_address=flags.ray_address,
        model_name=flags.model_name,
        sampling_defaults=flags.sampling_defaults,
        wait_for_ranks=flags.wait_for_ranks,
        drain_seconds=flags.drain_seconds,
        data=flags.data(),
        security=flags.security(),
        telemetry=flags.telemetry(),
        gateway=flags.gateway(),
        as_json=as_json,
    )
    if flags.log_format == "text":
        print(f"starting {count_ranks(flags.world_size)} ({flags.launcher}) …", file=sys.stderr, flush=True)
    become(command)
