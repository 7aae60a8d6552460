"""One rank: a model, its share of the KV cache, and the epochs that it joins."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from longleaf.backoff import backoff_delay
from longleaf.comm import Groups
from longleaf.comm.abort import ExchangeAborter, Sockets
from longleaf.comm.process_group import (
    ProcessGroups,
    Store,
    agree_on_carrier,
    connect_store,
    epoch_store,
    open_store,
)
from longleaf.config import cache_folder
from longleaf.errors import ModelRefused, StartError
from longleaf.fingerprint import Fingerprint, file_states, read_fingerprint
from longleaf.formatting import describe_dequantization, human_bytes, human_seconds
from longleaf.kernels import registry
from longleaf.kernels.backend import Backend
from longleaf.kernels.cpu.compiled import NativeBackend
from longleaf.kernels.cpu.linear import use_native_linear
from longleaf.merge import tiers
from longleaf.rank_protocol.group_messages import Join, KvLayout, MergeTiming, Ready
from longleaf.rank_protocol.member_messages import Hello
from longleaf.rank_protocol.rank_spec import RankSpec
from longleaf.rank_protocol.snapshots import Discard, Failure, Fetch, Order, Outcome, Save, Saved
from longleaf.rank_protocol.step import StepPlan, StepResult
from longleaf.runs import ceil_div
from longleaf.shares import most_parts
from longleaf.storage.store import Store as Storage
from longleaf.topology import Topology, too_few_gpus
from workers.cuda_graphs.graphs import CudaGraphs, Graphs
from workers.exactness import EXACT, ExactnessRecords, verify_model
from workers.group_session import GroupSession, RankResources
from workers.kv_cache.pools import check_kv_bytes, kv_bytes_per_token, kv_dtype, make_pool, name_of, sharded_layers
from workers.kv_cache.quantized import QuantizedPool
from workers.kv_cache.slots import FloatKvPool
from workers.kv_cache.workspace_estimate import room_for_graphs
from workers.kv_io.kv_io import ENDED, NOT_RESIDENT, KvIo, OpenStore
from workers.kv_io.kv_piece import form_of
from workers.model import model as models
from workers.model.compiled_mixers import compile_mixers
from workers.model.local_weights import LocalWeights
from workers.model.sharded_layers import RowExchange, processor_of
from workers.model.sharded_model import load_share
from workers.model.stored_layers import weight_bytes
from workers.model.weight_shares import Share
from workers.rank_runtime import StepHandle
from workers.sampling.constraints import Constraints, VocabularyLoader
from workers.sampling.device_sampler import DeviceSampler, make_sampler
from workers.sampling.sampler import CpuSampler
from workers.step.last_tokens import DeviceIds, HostIds, LastTokens

log = logging.getLogger(__name__)
OPEN_WITHOUT_PROBE: OpenStore = partial(Storage.open, probe=False)
"""Opens a storage without a write test: read-only storage is still readable."""
READ_ATTEMPTS = 6
"""Attempts to read weights of a lost rank."""
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 10.0


class Rank:
    """Executes step plans. Lifecycle: make_hello, load, then, for each epoch, join, execute ..., leave; close.

    `load` sets `model`, `pool`, `backend` and `graphs`. These attributes, `sampler` and `last_ids` outlast epochs;
    `epoch` does not. Tests may replace these attributes to inject errors or to record calls.
    """

    model: models.Model
    pool: FloatKvPool | QuantizedPool
    backend: Backend

    def __init__(
        self, spec: RankSpec, open_snapshots: OpenStore = OPEN_WITHOUT_PROBE, records: ExactnessRecords | None = None
    ) -> None:
        """`open_snapshots` opens the storage of `snapshot_url`. `records` lists the models that were verified; the
        default is the list of this machine.
        """
        self._spec = spec
        self.config = spec.config
        num_gpus, num_ranks = count_gpus(), spec.num_ranks_seeing
        self.device = choose_device(self.config.device, spec.gpu, num_gpus, num_ranks)
        self._ranks_per_gpu = 1 if self.device == "cpu" else ceil_div(num_ranks, max(1, num_gpus))
        num_sequences = self.config.max_sequences
        self._vocabulary = VocabularyLoader(Path(self.config.model))
        constraints = Constraints(self._vocabulary.get)
        self.sampler: CpuSampler | DeviceSampler = make_sampler(self.device, num_sequences, constraints)
        self.last_ids: LastTokens = HostIds() if self.device == "cpu" else DeviceIds(num_sequences, self.device)
        self.graphs: Graphs | None = None
        self.kv_io = KvIo(spec.member, self.config.snapshot_url, open_snapshots, self.device)
        self.epoch: GroupSession | None = None
        self._fingerprint: Fingerprint | None = None
        """The fingerprint of the model, once it has been read."""
        self._files: dict[str, tuple[int, int]] = {}
        """The sizes and times of its files just before."""
        self._records = records or ExactnessRecords(cache_folder() / EXACT)
        self._exactness_note = ""
        """The reason why the model was not compared with plain attention; empty if it was."""
        self._exchange: RowExchange | None = None
        """The exchanges of a loaded model with sharded weights."""
        self._weights: LocalWeights | None = None
        """The weights of this rank, if they are sharded."""
        self._must_verify = True
        """Whether no epoch has compared a model with sharded weights."""
        self._fence = ExchangeAborter()
        self._next_store: Store | None = None
        """The store for the next epoch, if this rank will be its rank 0."""
        self._sockets = Sockets()
        """The sockets of the epoch and its store."""
        self._store: Store | None = None
        self._process_groups: ProcessGroups | None = None

    def make_hello(self) -> Hello:
        """The hello message of this member. The first member of a machine adds the fingerprint of the model."""
        spec = self._spec
        hello = Hello(spec.member, spec.node, spec.host, os.getpid())
        if not spec.is_first_here:
            return hello
        try:
            self._read_fingerprint()
            return msgspec.structs.replace(hello, fingerprint=self._fingerprint)
        except ModelRefused as error:  # reported with those of other machines, which may have the model
            return msgspec.structs.replace(hello, missing=str(error))

    def _read_fingerprint(self) -> None:
        """Raises ModelRefused."""
        folder = Path(self.config.model)
        self._files = file_states(folder)
        self._fingerprint = read_fingerprint(folder)

    def load(self, parts: Sequence[int] = ()) -> None:
        """Loads the model, or these parts of its weights, and allocates the pool. Raises ModelRefused or StartError."""
        if self.device == "cpu":
            torch.set_num_threads(self.config.threads_per_rank)
        else:  # must come first: Triton launches kernels on the current device, which is initially GPU 0
            torch.cuda.set_device(self.device)
        config, num_ranks_here = self.config, self._spec.num_ranks_here
        check_kv_bytes(config, self.device, num_ranks_here, self._ranks_per_gpu)
        model = self._load_model(parts)
        backend = registry.choose(config.kernels, self.device, model.dtype)
        if isinstance(backend, NativeBackend):
            if model.mixers is not None:
                num_features = model.module.config.get_text_config().hidden_size
                compile_mixers(model.mixers.layers, num_features, backend.recurrence)
            use_native_linear(model.module, backend.product)
        if self._verifies_model and model.exchange is None:
            self._exactness_note = verify_model(model, backend, config, self._fingerprint, self._records)
        self.allocate_pool(model, backend)

    def _load_model(self, parts: Sequence[int]) -> models.Model:
        """The model with all weights or, if they are sharded, with these parts."""
        config = self.config
        keeps_stored = config.weights_dtype == "stored"
        if not config.has_shares:
            return models.load(config.model, config.dtype, self.device, keeps_stored=keeps_stored)
        if config.spare_ranks and self._fingerprint is None:
            self._read_fingerprint()  # to be compared before this rank reads weights of a lost one
        share = Share(tuple(parts), config.world_size)
        found = load_share(config.model, config.dtype, self.device, share, keeps_stored=keeps_stored)
        self._weights = found.weights
        spare_bytes = found.weights.room(most_parts(config.world_size, config.spare_ranks)) if config.spare_ranks else 0
        return replace(found.model, spare_bytes=spare_bytes)

    @property
    def _verifies_model(self) -> bool:
        """Whether this rank compares the model with plain attention. The first rank of each machine does, while the
        others load; a refusal ends the start of the whole group. Replacements skip the check: they load the same model
        and must be ready quickly.
        """
        spec = self._spec
        return self.config.verify_model and spec.is_first_here and spec.member < self.config.world_size

    def allocate_pool(self, model: models.Model, backend: Backend | None = None) -> None:
        """Allocates the pool of a loaded model, for `backend` or, by default, the configured one. Raises ModelRefused
        or StartError.
        """
        config, num_ranks_here = self.config, self._spec.num_ranks_here
        self.model, self._exchange = model, model.exchange
        self.pool, windows = make_pool(self.model, config, num_ranks_here, self._ranks_per_gpu)
        self.backend = backend or registry.choose(config.kernels, self.device, self.model.dtype)
        if self.device.startswith("cuda") and config.cuda_graphs == "auto":
            self.graphs = CudaGraphs(self.device, room_for_graphs(self.model, config))
        self._ready = Ready(
            member=self._spec.member,
            device=self.device,
            dtype=name_of(self.model.dtype),
            num_blocks=self.pool.num_blocks,
            bytes_per_token=kv_bytes_per_token(sharded_layers(self.model, config), self.model.dtype, config),
            kv_dtype=kv_dtype(self.model, config),
            rotary=self.model.rotary,
            full_layers=tuple(layer for layer, spec in sorted(self.model.layers.items()) if spec.reach.is_full),
            windows=windows,
            kernels=self.backend.name,
            form=form_of(self.pool, of_windows=False),
            form_of_windows=form_of(self.pool, of_windows=True),
            weight_bytes=weight_bytes(model.module),
            weight_parts=0 if self._weights is None else len(self._weights.share.parts),
            exactness_note=self._exactness_note,
            dequantization=describe_dequantization(model.layouts, name_of(model.dtype)),
        )

    def hold(self, parts: Sequence[int]) -> int:
        """Uses these parts of the weights from the next epoch on, and reads those that are not in memory. Returns the
        bytes that were read. Raises RuntimeError within an epoch, or if the weights are not sharded, ModelRefused if
        the checkpoint is another one than at the start, and the errors of reading.
        """
        if self._weights is None:
            raise RuntimeError("this rank holds all weights")
        began = time.monotonic()
        num_bytes = self._read_parts(self._weights, parts)
        seconds = time.monotonic() - began
        log.info("weights: this rank holds %d parts; read %s in %.1f s", len(parts), human_bytes(num_bytes), seconds)
        self._ready = msgspec.structs.replace(
            self._ready, weight_bytes=weight_bytes(self.model.module), weight_parts=len(parts)
        )
        return num_bytes

    def _read_parts(self, weights: LocalWeights, parts: Sequence[int]) -> int:
        """Reads again after errors of the storage, which survivors may share: one such error would end all of them, and
        with them the contexts."""
        number = 1
        while True:
            try:
                if weights.must_read(parts):
                    self._check_unchanged()
                return weights.hold(parts)
            except (OSError, ModelRefused) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError) or number == READ_ATTEMPTS:
                    raise
                delay = backoff_delay(number, FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS)
                log.warning("weights: %s; this rank reads again in %s", error, human_seconds(delay))
                time.sleep(delay)
                number += 1

    def _check_unchanged(self) -> None:
        """Raises ModelRefused if weights that are read now would be those of another model than the present ones."""
        folder = Path(self.config.model)
        if self._fingerprint is None or file_states(folder) == self._files:
            return
        if read_fingerprint(folder).digest != self._fingerprint.digest:
            raise ModelRefused(f"{folder} has changed since the start: its weights cannot replace those of a lost rank")

    def open_store(self) -> int:
        """Opens the rendezvous store of the next epoch and returns its port. Raises OSError if it cannot listen."""
        self._sockets = Sockets()  # the first rank also connects to its own store
        store = self._next_store = open_store(self._spec.host)
        return store.port

    def join(self, join: Join) -> Ready:
        """Joins the process groups of an epoch, if it has several ranks. The block table starts empty. Raises
        ExchangeAborted, and the errors of torch when the other ranks cannot be reached.
        """
        if join.rank == 0:
            self._vocabulary.start()
        groups = self._join_groups(join) if join.world_size > 1 else None
        return msgspec.structs.replace(self.connect(groups, join.merges), epoch=join.epoch)

    def _join_groups(self, join: Join) -> Groups:
        if join.rank:
            self._sockets = Sockets()
        self._fence.add(self._sockets.shut_down)
        self._store, self._next_store = connect_store(join.host, join.port) if join.rank else self._next_store, None
        store, longest = self._store, self.config.longest_wait
        place = epoch_store(store, join.epoch)
        carrier = agree_on_carrier(join.rank, join.world_size, place, self.device, timeout=longest)
        self._process_groups = made = ProcessGroups(
            join.rank, Topology(join.nodes), store, epoch=join.epoch, timeout=longest, carrier=carrier
        )
        self._sockets.complete()
        self._fence.add(made.fence)
        return made.groups

    def connect(self, groups: Groups | None, merges: Sequence[MergeTiming] = ()) -> Ready:
        """Uses the groups of an epoch for the exchanges of steps. All ranks must connect at the same time. `merges` are
        timings that an earlier epoch measured.
        """
        if self._exchange is not None:
            self._exchange.enter(groups.world if groups is not None else None, self.device, processor_of(self.device))
            self._verify_together(groups)
        loaded = (self.model, self.pool, self.backend, self.sampler, self.last_ids)
        resources = RankResources(self.config, self.device, *loaded, self.kv_io, self.graphs)
        self.epoch = epoch = GroupSession(resources, groups, merges)
        ready = self._ready
        if groups is not None:
            chosen = [(timing.merge, timing.rows) for timing in epoch.peers.timings] or [(self.config.merge, 0)]
            ready = msgspec.structs.replace(
                ready,
                transport=groups.transport,
                intra_node_transport=groups.intra_node_transport,
                inter_node_transport=groups.inter_node_transport,
                merges=epoch.peers.timings,
                tiers=tuple(tiers(name, groups.topology, rows) for name, rows in chosen),
            )
        if ready.windows:
            # these blocks have the same ids on every rank, so their number is the minimum over ranks
            windows = msgspec.structs.replace(ready.windows, num_blocks=epoch.peers.smallest(ready.windows.num_blocks))
            ready = msgspec.structs.replace(ready, windows=windows)
        epoch.prepare()
        return ready

    def _verify_together(self, groups: Groups | None) -> None:
        """Compares a model with sharded weights with plain attention, when the first epoch forms. A collective call."""
        if groups is None:
            return
        is_pending = self._must_verify and self.config.verify_model
        self._must_verify = False
        if not groups.world.all_gather(torch.tensor([int(is_pending)], device=self.device)).min():
            return  # some ranks have done so: replacements skip the check
        self._exactness_note = verify_model(
            self.model, self.backend, self.config, self._fingerprint, self._records, groups
        )
        self._ready = msgspec.structs.replace(self._ready, exactness_note=self._exactness_note)

    def set_layout(self, layout: KvLayout) -> None:
        """Replaces the block table of the current epoch by the layout. All ranks have joined, so weights that others
        hold now are released.
        """
        self._session.set_layout(layout)
        if self._weights is not None:
            self._weights.drop_surplus()

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step; rank 0 returns the sampled tokens."""
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> StepHandle:
        """Begins a step, before the end of the previous one if it `may_overlap`."""
        with self.kv_io.beside_step():
            return self._session.start(plan)

    def submit_order(self, order: Order, answer: Callable[[Outcome], None]) -> None:
        """Begins an order in the background. `answer` receives its outcome, possibly on another thread."""
        match order:
            case Save():
                if refusal := self._refusal(order):
                    answer(Saved(self._spec.member, order.ticket, failure=refusal))
                else:
                    self.kv_io.save(order, self.pool, answer)
            case Fetch():
                self.kv_io.fetch(order, self.pool, answer)
            case Discard():
                self.kv_io.discard(order.tickets)

    def _refusal(self, order: Save) -> Failure | None:
        if self.epoch is None:
            return ENDED
        return None if self.epoch.holds(order) else NOT_RESIDENT

    @property
    def _session(self) -> GroupSession:
        """The current epoch. Raises RuntimeError if the rank is in none."""
        if self.epoch is None:
            raise RuntimeError("this rank is in no epoch")
        return self.epoch

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges with other ranks that this rank has begun in this epoch. Thread-safe."""
        groups = self._process_groups
        return groups.num_exchanges if groups else 0

    def fence(self) -> None:
        """Aborts the current or next wait of this rank for others, in an exchange or a join: it raises an error.
        Thread-safe."""
        self._fence.abort()

    def leave(self) -> None:
        """Leaves the epoch, however it ended, and discards its state; the model and the pool remain. Does not wait for
        other ranks, which may be lost.
        """
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self.kv_io.end_epoch()
            epoch.close()  # must come first: NCCL cannot end a group before the graphs that hold its exchanges
        groups, self._process_groups = self._process_groups, None
        if groups is not None:
            groups.abort()
            self._sockets.shut_down()  # an error may hold the last reference to a gloo group
        if self._exchange is not None:
            self._exchange.leave()
        self._store = None
        self._fence.reset()
        self.sampler.clear()
        self.last_ids.clear()

    def close(self) -> None:
        """Leaves the epoch and closes the KV I/O. Must also work after the loss of another rank."""
        self.leave()
        self.kv_io.close()


def choose_device(wanted: str, gpu: int | None, num_gpus: int, num_ranks: int) -> str:
    """Returns `cpu`, or `cuda:N` for a rank that was assigned GPU number `gpu`. `num_gpus` GPUs are visible to
    `num_ranks` ranks. Raises StartError if GPUs were requested and there is none, or if ranks would share a GPU
    although `wanted` is not cuda.
    """
    if wanted == "cuda" and not num_gpus:
        raise StartError("device: cuda is not available: torch finds no GPU")
    if wanted == "cpu" or gpu is None or not num_gpus:
        return "cpu"
    if gpu >= num_gpus and wanted != "cuda":
        raise too_few_gpus(num_ranks, "this machine", num_gpus)
    return f"cuda:{gpu % num_gpus}"


def count_gpus() -> int:
    """The number of usable GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
