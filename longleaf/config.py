"""Settings of a service, and the only place that reads the environment."""

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
"""When keys and values go to storage: once a document has been read, when somebody asks for it, or never."""
WindowKeys = Literal["sharded", "replicated"]
SamplingDefaults = Literal["greedy", "model"]
"""Sampling parameters of requests that leave them out: greedy decoding, or those of generation_config.json."""

DEFAULT_PORT = 50051
DRAIN_SECONDS = 2.0
"""How long a service that ends lets calls run, by default."""
LOOPBACK = "127.0.0.1"
NOT_VERIFIED = "not verified"
"""Why answers are not marked exact where a model was not compared with plain attention."""
CLIENT_NAME = "longleaf-client"
"""What the clients of this project call themselves, before the name of their library."""
MAX_REQUEST_BYTES = 4 << 20
"""What gRPC itself allows by default. It takes some ten milliseconds to parse, in which nothing else happens."""
MAX_RESPONSE_BYTES = 64 << 20
MAX_SECONDS = 1e6
MAX_MODEL_NAME = 256
"""Characters."""
MAX_DRAFT_TOKENS = 31
"""With the token before them they are 32 rows of a step."""
MIN_ROWS = 16
"""Rows that a step may have with drafts, however few sequences may run at once."""
RANKS_PER_CPU = 8
"""More processes on a CPU only wait for each other."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What coordinator and ranks must agree on. Token counts are in tokens, sizes in bytes, times in seconds."""

    model: str
    """Folder of the checkpoint."""
    world_size: int = 1
    """Number of ranks."""
    merge: MergeChoice = "auto"
    """How partials are merged; auto measures at the start and takes the fastest."""
    partials: PartialDtype = "float32"
    """Numeric type in which partials travel; bfloat16 halves the bytes, and each hop of a merge rounds them to 8 bits
    of mantissa, a relative error of at most 2^-8. The merges `paper` and `packed` add up in float32 all the same."""
    prefill: PrefillName = "auto"
    """What is gathered when a prompt is read: queries, keys, or per chunk and layer what has fewer bytes."""
    chunk_size: int = 4096
    """Prompt tokens read per step."""
    block_size: int = 128
    """Tokens per block of the key/value pool."""
    replicate_below: int = 64
    """Prompts shorter than this are read as replicated rows: every rank computes them."""
    kv_bytes: int | None = None
    """Size of each rank's key/value pool; None takes 40 % of a machine's free memory, divided by the ranks there, and
    of a GPU what is free beside the weights and what steps need."""
    dtype: DtypeName = "auto"
    """Numeric type of the weights, keys and values; auto takes the checkpoint's."""
    kv_dtype: KvDtypeName = "auto"
    """How keys and values are kept: auto in the type of the weights; int8 rounds them, and answers are not exact."""
    window_keys: WindowKeys = "sharded"
    """Where keys of windowed layers lie: sharded, all of them, each on its rank like any other; replicated, only the
    last ones that can still be seen, on every rank, so that these layers need no exchange in decode."""
    window_bytes: int | None = None
    """Part of kv_bytes that replicated keys of windowed layers take; None: enough for max_sequences generations and as
    many contexts, but no more than half."""
    device: DeviceName = "auto"
    """Where ranks compute; auto: each on a GPU of its own where there are any, else on CPUs; cuda: on GPUs, which plain
    processes may share, and Ray's may not."""
    verify_model: bool = True
    """Whether the first rank of each machine compares the model with plain attention before it serves. Without that
    answers are not marked exact."""
    kernels: KernelsChoice = "auto"
    """What computes attention on a rank's device; auto takes the fastest that can be had there."""
    graphs: GraphsChoice = "auto"
    """Whether decode steps on GPUs are captured once and replayed; auto: where that can be done."""
    threads_per_rank: int = 1
    """CPU threads of each rank."""
    step_timeout: float = 60.0
    """Seconds a step of few tokens may take before the rank that holds it up is killed."""
    step_timeout_per_token: float = 0.05
    """Seconds added per token that the step computes."""
    start_timeout: float = 300.0
    """Seconds the ranks may take to load the model."""
    form_timeout: float = 10.0
    """Seconds that ranks who have loaded it may take to form a new group after a loss, or twice as long as the first
    group took if that is more; then it is tried again."""
    lost_after: float = 5.0
    """Seconds without a sign of life after which a rank is killed and counts as lost."""
    max_losses_per_minute: int = 6
    """Losses of ranks in a minute beyond which further ones are not replaced at once."""
    max_draft_tokens: int = 7
    """Tokens of an answer that a step may try ahead, guessed from what was said before; 0: none."""
    max_sequences: int = 64
    """Generations that run at once."""
    max_waiting: int = 256
    """Generations and ingests that wait; more are refused."""
    unread_timeout: float = 120.0
    """Seconds that a stream may stay unread when its connection takes no more; then it is ended."""

    target_itl_ms: float = 100.0
    """Milliseconds between two tokens of a stream that reading prompts beside it should keep to."""
    share_prefixes: bool = False
    """Tenants may reuse keys of each other's beginnings of prompts; how long one waits then tells what another has
    asked."""
    allow_long: bool = False
    """Take what goes beyond the positions that the model was trained for: nobody knows what it answers there."""
    snapshot_url: str | None = None
    """Where keys and values of contexts lie on storage: a folder, or any URL of fsspec; None: in the data folder."""

    @property
    def longest_wait(self) -> float:
        """Seconds that a rank may have to wait for another: while models load, or for the longest step."""
        return max(self.start_timeout, self.step_timeout + self.chunk_size * self.step_timeout_per_token)

    @property
    def max_rows(self) -> int:
        """Rows that a decode step may have, drafts among them; questions of several tokens may have more."""
        return max(self.max_sequences, MIN_ROWS) if self.max_draft_tokens else self.max_sequences

    @property
    def exactness_note(self) -> str:
        """Why answers with these settings are not exact: keys, values or partials are rounded more than the model
        itself rounds, or the model is not verified. Empty where they may be."""
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
            raise InvalidArgument("window_bytes", "is for window_keys replicated; sharded keys share one pool")


def check_waits(wait_for_ranks: float, drain_seconds: float) -> None:
    """Raises InvalidArgument for what is no number of seconds to wait."""
    for name, value in (("wait_for_ranks", wait_for_ranks), ("drain_seconds", drain_seconds)):
        if not 0 <= value <= MAX_SECONDS:
            raise InvalidArgument(name, f"{human_number(value)} is not between 0 and {human_number(MAX_SECONDS)}")


class DataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives a service, and where."""

    data_dir: str | None = None
    """Where contexts are kept; None: in memory alone."""
    warm: bool = False
    """Have kept contexts come back at the start, those used last first, before anybody asks them."""
    snapshots: SnapshotsChoice = "seal"
    """When keys and values go to storage."""
    snapshot_quota: int | None = None
    """Bytes that they may take there; of contexts used least recently they go first. None: no limit."""
    snapshot_expiry: float | None = None
    """Seconds without a use after which those of a context go; None: never."""

    def check(self, snapshot_url: str | None) -> None:
        """Raises InvalidArgument naming the first setting that makes no sense."""
        if self.data_dir == "":
            raise InvalidArgument("data_dir", "is empty: give a folder, or leave it out to keep nothing")
        if self.data_dir is None:
            needs = {"warm": self.warm, "snapshot_url": snapshot_url, "snapshot_quota": self.snapshot_quota}
            needs |= {"snapshot_expiry": self.snapshot_expiry}
            for name in (name for name, value in needs.items() if value):
                raise InvalidArgument(name, "needs data_dir: without it nothing is kept")
        if self.snapshot_quota is not None and self.snapshot_quota < 1:
            raise InvalidArgument("snapshot_quota", f"{self.snapshot_quota} is not a positive number of bytes")
        if self.snapshot_expiry is not None and not 0 < self.snapshot_expiry <= MAX_SECONDS:
            message = f"{human_seconds(self.snapshot_expiry)} is not above 0 and at most {human_seconds(MAX_SECONDS)}"
            raise InvalidArgument("snapshot_expiry", message)


def check_model_name(name: str) -> None:
    """Raises InvalidArgument for what cannot be told to clients, or not be read by people."""
    if not 1 <= len(name) <= MAX_MODEL_NAME or not name.isprintable() or name != name.strip():
        rule = f"must be 1 to {MAX_MODEL_NAME} printable characters, the first and the last no space"
        raise InvalidArgument("model_name", rule)


def default_server() -> str:
    """Address that client commands use: LONGLEAF_SERVER, else the local default port."""
    return os.environ.get("LONGLEAF_SERVER") or f"localhost:{DEFAULT_PORT}"


def with_port(server: str) -> str:
    """`server` with the default port if it names none; what else gRPC takes for an address stays as it is.

    Raises InvalidArgument for the address of a web page.
    """
    if server.startswith(("http://", "https://")):
        raise InvalidArgument("server", f"{server} is not HOST:PORT: leave out what comes before the host")
    is_host = re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", server)
    return f"{server}:{DEFAULT_PORT}" if is_host else server


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address, as gRPC, ZMQ and web browsers understand it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def embedded_model() -> Path:
    """Folder of the model that the package carries."""
    return Path(__file__).resolve().parent / "demo" / "lookup"


def cache_folder() -> Path:
    """Where compiled kernels are kept between starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longleaf"


def check_slots_here(world_size: int) -> None:
    """Raises StartError when this machine is too small for so many ranks."""
    slots = RANKS_PER_CPU * num_processors()
    if world_size > slots:
        raise StartError(f"world size {world_size} needs as many slots, this machine has {slots}")


def ray_environment(token_file: Path | None) -> dict[str, str]:
    """Variables that Ray must see before it is imported. `token_file` is that of a Ray that is started here; for one
    that is joined, how to authenticate is left to the user's environment.

    A Ray that is started here refuses whoever lacks its token, whatever the environment says, and listens on the
    loopback address alone. On Linux it does so only where it believes that its system is one without clusters; in Ray
    2.60 nothing else hangs on that variable but what `ray start` says and refuses.
    """
    # the last of them: else Ray prints pages on standard output when a machine is gone, which is told in words of ours
    wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": r"(?s).*"}
    variables = {name: os.environ.get(name, value) for name, value in wanted.items()}
    if token_file is not None:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_AUTH_TOKEN": ""}
        variables |= {"RAY_ENABLE_K8S_TOKEN_AUTH": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return variables


def rank_environment(threads: int) -> dict[str, str]:
    """Variables that a rank must see before it imports torch.

    Two torch threads on one busy core are far slower than one, so the count is set and never guessed. Torch's memory
    comes in huge pages, where the system has them: reading keys and weights once per token is what decode takes time
    for, and one core reads them up to 1.6 times as fast. NCCL registers no buffers of captured exchanges: a rank whose
    step does not fit launches what the others replay, and there such buffers are unknown.
    """
    wanted = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    wanted |= {"THP_MEM_ALLOC_ENABLE": "1", "NCCL_GRAPH_REGISTER": "0"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def loading_environment() -> dict[str, str]:
    """Variables that a rank must see before it loads weights for another device than its host: they are read one after
    the other. What threads have read ahead, and converted, would lie in the host's memory until it is taken away."""
    return {"HF_DEACTIVATE_ASYNC_LOAD": os.environ.get("HF_DEACTIVATE_ASYNC_LOAD", "1")}


def network_environment(interface: str | None) -> dict[str, str]:
    """Variables that name the interface at which others reach this rank to gloo and NCCL, unless they are set here.

    Gloo would take the address that the machine's name resolves to, which others may not reach, and NCCL any interface.
    """
    if interface is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # without = NCCL takes a prefix
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def apply_environment(variables: dict[str, str]) -> None:
    """Puts `variables` into this process's environment."""
    os.environ.update(variables)
