"""Settings of a service, and environment variables of its processes."""

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from longleaf.errors import InvalidArgument, StartError
from longleaf.formatting import human_number, human_seconds
from longleaf.resources import num_processors

Launcher = Literal["ray", "local"]
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
SamplingDefaults = Literal["greedy", "model"]
"""Defaults for sampling parameters that a request omits: greedy decoding, or the values of generation_config.json."""

DEFAULT_PORT = 50051
DRAIN_SECONDS = 2.0
"""Default time that running calls get to finish when the service stops."""
LOOPBACK = "127.0.0.1"
NOT_VERIFIED = "not verified"
"""Reason why answers are not marked exact if the model was not compared with plain attention."""
CLIENT_NAME = "longleaf-client"
"""User agent of this project's clients; precedes the name of the gRPC library."""
MAX_REQUEST_BYTES = 4 << 20
"""gRPC's default limit. Parsing a request of this size blocks the event loop for about ten milliseconds."""
MAX_RESPONSE_BYTES = 64 << 20
MAX_SECONDS = 1e6
MAX_MODEL_NAME = 256
"""In characters."""
MAX_DRAFT_TOKENS = 31
"""Together with the token before them, 31 drafts occupy 32 rows of a step."""
MIN_ROWS = 16
"""Rows that a step with drafts may have regardless of `max_sequences`."""
RANKS_PER_CPU = 8
"""Maximum number of ranks per CPU. More processes would only wait for each other."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that coordinator and ranks share. Token counts are in tokens, sizes in bytes, times in seconds."""

    model: str
    """Checkpoint folder."""
    world_size: int = 1
    """Number of ranks."""
    merge: MergeChoice = "auto"
    """Merge algorithm for partials; auto measures at startup and takes the fastest."""
    partials: PartialDtype = "float32"
    """Numeric type of transmitted partials. bfloat16 halves the bytes, and each hop of a merge rounds to 8 bits of
    mantissa, a relative error of at most 2^-8. The merges `paper` and `packed` always accumulate in float32."""
    prefill: PrefillName = "auto"
    """Data gathered in prefill: queries, keys, or the smaller of both per chunk and layer."""
    chunk_size: int = 4096
    """Prompt tokens per prefill step."""
    block_size: int = 128
    """Tokens per block of the key/value pool."""
    replicate_below: int = 64
    """Shorter prompts are computed as replicated rows, on every rank."""
    kv_bytes: int | None = None
    """Size of each rank's key/value pool. None: on CPUs, 40 % of the machine's free memory divided by its ranks; on
    GPUs, the memory that weights and steps leave free."""
    dtype: DtypeName = "auto"
    """Numeric type of the weights, keys and values; auto takes the checkpoint's."""
    kv_dtype: KvDtypeName = "auto"
    """Storage type of keys and values: auto takes the type of the weights; int8 rounds, so answers are not exact."""
    window_keys: WindowKeys = "sharded"
    """Placement of the keys of sliding-window layers. sharded: all keys, each on its rank as in other layers.
    replicated: only the keys that can still be attended to, on every rank, so that these layers need no exchange in
    decode."""
    window_bytes: int | None = None
    """Part of kv_bytes for replicated sliding-window keys; None: enough for max_sequences generations and as many
    contexts, but at most half."""
    device: DeviceName = "auto"
    """Device of the ranks. auto: one GPU per rank if there are GPUs, else CPUs. cuda: GPUs, which ranks that are plain
    processes may share, but Ray's may not."""
    verify_model: bool = True
    """Whether the first rank of each machine compares the model with plain attention before it serves. Without the
    comparison, answers are not marked exact."""
    kernels: KernelsChoice = "auto"
    """Attention kernels; auto takes the fastest available on the device."""
    graphs: GraphsChoice = "auto"
    """Whether decode steps on GPUs are captured once and replayed as CUDA graphs; auto: if possible."""
    threads_per_rank: int = 1
    """CPU threads of each rank."""
    step_timeout: float = 60.0
    """Time limit in seconds of a step with few tokens; the rank that delays it is then killed."""
    step_timeout_per_token: float = 0.05
    """Seconds added to the limit per computed token."""
    start_timeout: float = 300.0
    """Seconds within which the ranks must load the model."""
    form_timeout: float = 10.0
    """Seconds within which loaded ranks must form a new group after a loss, or twice the duration of the first
    formation if that is more; then the attempt is repeated."""
    lost_after: float = 5.0
    """Seconds without a heartbeat after which a rank is killed and counts as lost."""
    max_losses_per_minute: int = 6
    """Lost ranks per minute beyond which further ones are not replaced immediately."""
    max_draft_tokens: int = 7
    """Draft tokens that a step may verify for an answer, predicted from earlier text; 0: none."""
    max_sequences: int = 64
    """Maximum number of running generations."""
    max_waiting: int = 256
    """Maximum number of waiting generations and ingests; more are refused."""
    unread_timeout: float = 120.0
    """Seconds after which a stream that is not read, and whose connection accepts no more data, is aborted."""

    target_itl_ms: float = 100.0
    """Target in milliseconds for the time between two tokens of a stream while prompts are prefilled."""
    share_prefixes: bool = False
    """Permits tenants to reuse the keys of each other's prompt prefixes; response times then reveal which prefixes
    other tenants have used."""
    allow_long: bool = False
    """Accept more tokens than the model was trained for; the quality of such answers is unknown."""
    snapshot_url: str | None = None
    """Storage of snapshots: a folder, or any URL of fsspec; None: in the data folder."""

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
        if self.partials != "float32" and self.world_size > 1:
            reasons.append(f"partials are rounded to {self.partials}")
        if not self.verify_model:
            reasons.append(NOT_VERIFIED)
        return "; ".join(reasons)

    @property
    def is_exact(self) -> bool:
        """Whether answers with these settings may be exact."""
        return not self.exactness_note

    def check(self) -> None:
        """Raises InvalidArgument naming the first setting that is out of range."""
        limits = {"world_size": (1, 4096), "chunk_size": (1, 1 << 20), "block_size": (1, 1 << 16)}
        limits |= {"replicate_below": (1, 1 << 20), "step_timeout": (0.1, MAX_SECONDS)}
        limits |= {"step_timeout_per_token": (0, MAX_SECONDS), "start_timeout": (0.1, MAX_SECONDS)}
        limits |= {"form_timeout": (0.1, MAX_SECONDS), "lost_after": (1, MAX_SECONDS)}
        limits |= {"max_losses_per_minute": (0, 1 << 20)}
        limits |= {"threads_per_rank": (1, 1024), "max_sequences": (1, 65536), "max_waiting": (1, 1 << 20)}
        limits |= {"unread_timeout": (0.1, MAX_SECONDS)}
        limits |= {"target_itl_ms": (1, MAX_SECONDS * 1000), "max_draft_tokens": (0, MAX_DRAFT_TOKENS)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(
                    name, f"{human_number(value)} is not between {human_number(low)} and {human_number(high)}"
                )
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise InvalidArgument("kv_bytes", f"{self.kv_bytes} is not a positive number of bytes")
        if self.window_bytes is not None and self.window_bytes < 1:
            raise InvalidArgument("window_bytes", f"{self.window_bytes} is not a positive number of bytes")
        if self.window_bytes is not None and self.window_keys == "sharded":
            raise InvalidArgument("window_bytes", "requires window_keys replicated; sharded keys share one pool")


def check_waits(wait_for_ranks: float, drain_seconds: float) -> None:
    """Raises InvalidArgument for invalid waiting times in seconds."""
    for name, value in (("wait_for_ranks", wait_for_ranks), ("drain_seconds", drain_seconds)):
        if not 0 <= value <= MAX_SECONDS:
            raise InvalidArgument(name, f"{human_number(value)} is not between 0 and {human_number(MAX_SECONDS)}")


class DataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of persistence."""

    data_dir: str | None = None
    """Folder for contexts; None: in memory only."""
    warm: bool = False
    """Restore persisted contexts at startup, the most recently used first, before they are requested."""
    snapshots: SnapshotsChoice = "seal"
    """When snapshots of keys and values are written."""
    snapshot_quota: int | None = None
    """Limit of their size in bytes; those of the least recently used contexts are deleted first. None: no limit."""
    snapshot_expiry: float | None = None
    """Seconds without use after which a context's snapshots are deleted; None: never."""

    def check(self, snapshot_url: str | None) -> None:
        """Raises InvalidArgument naming the first setting that is invalid."""
        if self.data_dir == "":
            raise InvalidArgument("data_dir", "is empty: give a folder, or omit it to keep contexts in memory only")
        if self.data_dir is None:
            needs = {"warm": self.warm, "snapshot_url": snapshot_url, "snapshot_quota": self.snapshot_quota}
            needs |= {"snapshot_expiry": self.snapshot_expiry}
            for name in (name for name, value in needs.items() if value):
                raise InvalidArgument(name, "requires data_dir")
        if self.snapshot_quota is not None and self.snapshot_quota < 1:
            raise InvalidArgument("snapshot_quota", f"{self.snapshot_quota} is not a positive number of bytes")
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
    # loss itself.
    wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": r"(?s).*"}
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
