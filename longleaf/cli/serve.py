"""`longleaf serve`: becomes `python -m coordinator` with the same options."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from longleaf.cli.exec_process import become
from longleaf.cli.flags import takes_flags
from longleaf.cli.options import KV_DTYPE_TOLD, AsJson, option
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

SERVICE = "What is served, and where"
RANKS = "Ranks, and how they work together"
KEYS = "Keys and values"
KEEPING = "What is kept"
REQUESTS = "Requests and times"
LOSSES = "Ranks that are lost"
SECURITY = "Who may come in"
HTTP = "A door for HTTP"
TELEMETRY = "What the service tells of itself"
_DEFAULTS = EngineConfig(model="")
_TELEMETRY = TelemetryConfig()


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """What was typed."""

    model: Annotated[
        Path | None, option(SERVICE, "Folder of the checkpoint.", default="the small model in the package")
    ] = None
    model_name: Annotated[
        str | None,
        option(SERVICE, "What clients see of the model, whatever its folder is called.", default="its folder's"),
    ] = None
    sampling_defaults: Annotated[
        SamplingDefaults,
        option(
            SERVICE,
            "Sampling parameters of requests that leave them out: greedy decoding, or those of the model's "
            "generation_config.json.",
        ),
    ] = "greedy"
    http: Annotated[
        int | None,
        option(HTTP, "Port of a door for HTTP beside the service: OpenAI's dialect, and a page.", default="no door"),
    ] = None
    allow_host: Annotated[
        str | None,
        option(
            HTTP, "Names under which it is called, beside addresses; with commas between them.", default="localhost"
        ),
    ] = None
    public_url: Annotated[
        str | None, option(HTTP, "What callers see of it behind a proxy, such as https://books.example.", default="own")
    ] = None
    host: Annotated[str, option(SERVICE, "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option(SERVICE, "Port to listen on; 0 lets the system choose.")] = DEFAULT_PORT
    dtype: Annotated[DtypeName, option(SERVICE, "Numeric type; auto takes the checkpoint's.")] = _DEFAULTS.dtype
    verify_model: Annotated[
        bool,
        option(
            SERVICE,
            "Compare the model with plain attention before it serves, once for each checkpoint. A model that differs "
            "is refused; without the comparison answers are not marked exact.",
            "--verify-model/--no-verify-model",
        ),
    ] = _DEFAULTS.verify_model
    allow_long: Annotated[
        bool, option(SERVICE, "Take what goes beyond the positions that the model was trained for.", "--allow-long")
    ] = _DEFAULTS.allow_long
    data_dir: Annotated[
        Path | None,
        option(
            KEEPING,
            "Folder in which contexts outlive the service; one service at a time may have it.",
            default="in memory alone",
        ),
    ] = None
    warm: Annotated[
        bool,
        option(
            KEEPING,
            "Have kept contexts come back at the start, not when they are first asked: as many as fit.",
            "--warm",
        ),
    ] = False
    snapshots: Annotated[
        SnapshotsChoice,
        option(
            KEEPING,
            "When keys and values go to storage, so that they need not be computed again: seal, once a document has "
            "been read; demand, when it is exported; off, never.",
        ),
    ] = DataConfig().snapshots
    snapshot_url: Annotated[
        str | None,
        option(
            KEEPING,
            "Where they lie: a folder that all machines share, or a URL such as s3://bucket/longleaf.",
            default="in the data folder",
        ),
    ] = None
    snapshot_quota: Annotated[
        int | None,
        option(KEEPING, "Bytes that they may take; of contexts used least recently they go first.", default="no limit"),
    ] = None
    snapshot_expiry: Annotated[
        float | None,
        option(KEEPING, "Seconds without a use after which those of a context go.", default="never"),
    ] = None
    world_size: Annotated[int, option(RANKS, "Number of ranks (worker processes).")] = 1
    launcher: Annotated[Launcher, option(RANKS, "What starts the ranks.")] = "ray"
    ray_address: Annotated[
        str | None, option(RANKS, "A running Ray cluster to join, such as auto.", default="start one here")
    ] = None
    wait_for_ranks: Annotated[
        float, option(RANKS, "Seconds to wait for a Ray cluster to have a slot for every rank; 0 refuses at once.")
    ] = 0.0
    device: Annotated[
        DeviceName,
        option(
            RANKS,
            "Where ranks compute; auto: each on its own GPU where there are any, else on CPUs; cuda: on GPUs, "
            "which those of the local launcher may share.",
        ),
    ] = _DEFAULTS.device
    kernels: Annotated[
        KernelsChoice, option(RANKS, "What computes attention there; auto: the fastest that can be had.")
    ] = _DEFAULTS.kernels
    graphs: Annotated[
        GraphsChoice,
        option(RANKS, "Whether decode steps on GPUs are captured and replayed; auto: where it can be done."),
    ] = _DEFAULTS.graphs
    threads: Annotated[int, option(RANKS, "CPU threads of each rank.")] = _DEFAULTS.threads_per_rank
    merge: Annotated[MergeChoice, option(RANKS, "How partial attention is merged; auto measures at the start.")] = (
        _DEFAULTS.merge
    )
    partials: Annotated[
        PartialDtype, option(RANKS, "Type in which partials travel; bfloat16 rounds them by 2^-8 per hop.")
    ] = _DEFAULTS.partials
    prefill: Annotated[PrefillName, option(RANKS, "What ranks gather while they read; auto: what has fewer bytes.")] = (
        _DEFAULTS.prefill
    )
    kv_bytes: Annotated[
        int | None,
        option(
            KEYS,
            "Bytes of keys and values per rank.",
            default="40 % of what a machine has free, over its ranks; of a GPU, most",
        ),
    ] = None
    kv_dtype: Annotated[KvDtypeName, option(KEYS, KV_DTYPE_TOLD)] = _DEFAULTS.kv_dtype
    block_size: Annotated[int, option(KEYS, "Tokens per block of the pool.")] = _DEFAULTS.block_size
    window_keys: Annotated[
        WindowKeys,
        option(
            KEYS,
            "Where keys of windowed layers lie: all of them, each on its rank, or the last ones on every rank, "
            "which then exchange nothing in these layers.",
        ),
    ] = _DEFAULTS.window_keys
    window_bytes: Annotated[
        int | None,
        option(
            KEYS,
            "With --window-keys replicated: the part of --kv-bytes for windowed layers.",
            default="by --max-sequences, at most half",
        ),
    ] = None
    max_sequences: Annotated[int, option(REQUESTS, "Generations that run at once.")] = _DEFAULTS.max_sequences
    max_waiting: Annotated[
        int, option(REQUESTS, "Generations and ingests that wait; more are refused, and told when to come again.")
    ] = _DEFAULTS.max_waiting
    unread_timeout: Annotated[float, option(REQUESTS, "Seconds after which a stream that nobody reads is ended.")] = (
        _DEFAULTS.unread_timeout
    )
    chunk_size: Annotated[int, option(REQUESTS, "Prompt tokens read per step.")] = _DEFAULTS.chunk_size
    target_itl_ms: Annotated[
        float, option(REQUESTS, "Milliseconds between tokens that running streams should keep while prompts are read.")
    ] = _DEFAULTS.target_itl_ms
    max_draft_tokens: Annotated[
        int,
        option(
            REQUESTS,
            "Tokens of an answer that a step may try ahead, as the context, the question or the answer has gone on "
            "before. Right ones are kept, wrong ones are dropped, and the answer stays the same: it comes faster where "
            "it quotes. 0: none.",
        ),
    ] = _DEFAULTS.max_draft_tokens
    start_timeout: Annotated[
        float, option(REQUESTS, "Seconds that ranks may take to load the model; a large one needs more.")
    ] = _DEFAULTS.start_timeout
    drain_seconds: Annotated[
        float, option(REQUESTS, "Seconds that running calls may take to end once the service is told to.")
    ] = DRAIN_SECONDS
    step_timeout: Annotated[
        float, option(REQUESTS, "Seconds a step of few tokens may take before the rank that holds it up is killed.")
    ] = _DEFAULTS.step_timeout
    form_timeout: Annotated[
        float, option(LOSSES, "Seconds that ranks may take to form a new group (twice the first one's if longer).")
    ] = _DEFAULTS.form_timeout
    lost_after: Annotated[
        float, option(LOSSES, "Seconds without a sign of life after which a rank is killed and counts as lost.")
    ] = _DEFAULTS.lost_after
    max_losses_per_minute: Annotated[
        int, option(LOSSES, "Losses of ranks in a minute beyond which further ones are not replaced at once.")
    ] = _DEFAULTS.max_losses_per_minute
    tls_cert: Annotated[
        Path | None,
        option(SECURITY, "Certificate chain of this service, in PEM; read again when it changes.", default="no TLS"),
    ] = None
    tls_key: Annotated[Path | None, option(SECURITY, "Its private key, without a passphrase.", default="none")] = None
    tls_client_ca: Annotated[
        Path | None,
        option(SECURITY, "Authorities whose certificates clients must show.", default="clients need none"),
    ] = None
    credentials: Annotated[
        Path | None,
        option(
            SECURITY,
            "Who may come in, as which tenant and role: lines of longleaf credentials new. Read again when it changes.",
            default="everybody, as admin",
        ),
    ] = None
    health_port: Annotated[
        int | None, option(SECURITY, "With TLS: a port for health checks alone, in plain text.", default="none")
    ] = None
    insecure: Annotated[
        bool,
        option(
            SECURITY,
            "Listen beyond this machine without TLS or without credentials: a proxy has them, "
            "or nobody else can reach it.",
            "--insecure",
        ),
    ] = False
    share_prefixes: Annotated[
        bool,
        option(
            SECURITY,
            "Let tenants reuse keys of each other's prompts; how long one waits then tells what another has asked.",
            "--share-prefixes",
        ),
    ] = False
    metrics_port: Annotated[
        int | None, option(TELEMETRY, "Port of metrics for Prometheus; 0 lets the system choose.", default="none")
    ] = _TELEMETRY.metrics_port
    metrics_host: Annotated[str, option(TELEMETRY, "Address of that port.")] = _TELEMETRY.metrics_host
    log_format: Annotated[LogFormat, option(TELEMETRY, "Lines for people, or a JSON object per line.")] = (
        _TELEMETRY.log_format
    )
    log_level: Annotated[
        LogLevel, option(TELEMETRY, "What is less important is not logged; info has a line for every call.")
    ] = _TELEMETRY.log_level
    traces: Annotated[
        bool,
        option(TELEMETRY, "Send traces over OTLP, as the variables OTEL_* say; needs 'longleaf\\[otel]'.", "--traces"),
    ] = _TELEMETRY.traces

    def config(self) -> EngineConfig:
        """What ranks are told of it."""
        shared = {name: value for name, value in asdict(self).items() if name in EngineConfig.__struct_fields__}
        shared |= {"model": str(self.model or embedded_model()), "threads_per_rank": self.threads}
        if self.snapshot_url is not None and "://" not in self.snapshot_url:
            shared |= {"snapshot_url": os.path.abspath(self.snapshot_url)}
        return EngineConfig(**shared)

    def data(self) -> DataConfig:
        """What of it outlives the service."""
        return DataConfig(
            data_dir=os.path.abspath(self.data_dir) if self.data_dir else self.data_dir,
            warm=self.warm,
            snapshots=self.snapshots,
            snapshot_quota=self.snapshot_quota,
            snapshot_expiry=self.snapshot_expiry,
        )

    def security(self) -> SecurityConfig:
        """Whom it lets in."""
        return SecurityConfig(**self._of(SecurityConfig))

    def door(self) -> HttpConfig:
        """Its door for HTTP."""
        return HttpConfig(**self._of(HttpConfig))

    def telemetry(self) -> TelemetryConfig:
        """What it tells of itself."""
        return TelemetryConfig(**self._of(TelemetryConfig))

    def _of(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """The options that are fields of `struct`; paths from the root, for the service may run in another folder."""
        found = {name: getattr(self, name) for name in struct.__struct_fields__}
        return {name: os.path.abspath(value) if isinstance(value, Path) else value for name, value in found.items()}


@takes_flags(ServeFlags)
def serve(flags: ServeFlags, as_json: AsJson = False) -> None:
    """Serve a model until interrupted.

    Prints `listening on HOST:PORT` once it is ready; with --json, {"address": "HOST:PORT"}. The port is open earlier:
    until the model is there calls are told how far that is. After an interrupt, or SIGTERM, no new calls are taken, and
    those that run may end within --drain-seconds; a second one ends them at once.

    With --http PORT a door for HTTP is opened beside it on the same host, with the same certificate and credentials,
    and the second line tells its address, http://HOST:PORT; with --json, {"http": "http://HOST:PORT"}.

    Example: longleaf serve --model ./Qwen3-0.6B --world-size 4 --data-dir ~/.longleaf
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
        door=flags.door(),
        as_json=as_json,
    )
    if flags.log_format == "text":
        print(f"starting {count_ranks(flags.world_size)} ({flags.launcher}) …", file=sys.stderr, flush=True)
    become(command)
