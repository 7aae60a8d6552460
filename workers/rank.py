"""One rank: a model, its share of the keys and values, and its place in the group."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from longleaf.attention import Partial
from longleaf.channel.lives import Join, Ready
from longleaf.channel.rank_spec import RankSpec
from longleaf.channel.sequences import Sequences
from longleaf.channel.step import Decode, Prefill, Row, StepPlan, StepResult
from longleaf.comm import Groups
from longleaf.comm.process_group import (
    ProcessGroups,
    Store,
    agree_on_carrier,
    connect_store,
    epoch_store,
    open_store,
)
from longleaf.errors import StartError
from longleaf.geometry import FLOAT32_POSITIONS
from longleaf.kernels import table
from longleaf.kernels.backend import FixedBackend
from longleaf.runs import ceil_div
from longleaf.topology import Topology, too_few_gpus
from longleaf.tree import Wire, choose_merge, make_merge
from workers.buckets import bucket_sizes
from workers.decode.bucket import Bucket
from workers.decode.choosing import Choosing, Telling
from workers.decode.graphs import CudaGraphs, Graphs
from workers.decode.steps import FixedSteps, Launched, try_out
from workers.keys.ledger import Ledger
from workers.keys.pools import (
    check_kv_bytes,
    kv_bytes_per_token,
    kv_dtype,
    make_pool,
    name_of,
    sharded_layers,
    windowed_layers,
)
from workers.keys.workspace import room_for_graphs
from workers.model import model as models
from workers.pending import Pending, done
from workers.sampling.device_sampler import DeviceChoice, DeviceSampler, make_sampler
from workers.step.forward import DecodeStep, Peers, PrefillDone, PrefillStep
from workers.step.inputs import InputBuilder, Inputs, RowNumbers
from workers.step.last_ids import DeviceIds, HostIds, LastIds
from workers.step.layers import RowLayer
from workers.step.past import PastBuilder
from workers.step.windows import WindowBuilder
from workers.transfers import Moment, ToHost
from workers.verification import Verifier

log = logging.getLogger("longleaf.rank")  # what the library logs while a rank starts, people are told


class Rank:
    """Executes step plans. Life: open_store (rank 0), load, join, execute ..., close.

    What computes has names of its own: `model`, `pool`, `backend` and `graphs` once it is loaded, `peers` once it has
    joined, `sampler` and `last_ids`. Whoever wants to see that an error shows, or what passes through, puts something
    else in their place.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._config = spec.config
        num_gpus, num_ranks = count_gpus(), spec.num_ranks_seeing
        self._device = choose_device(self._config.device, spec.gpu, num_gpus, num_ranks)
        self._ranks_per_gpu = 1 if self._device == "cpu" else ceil_div(num_ranks, max(1, num_gpus))
        self.peers: Peers | None = None
        self._process_groups: ProcessGroups | None = None
        self._store: Store | None = None
        self._sequences = Sequences(self._config.block_size)
        num_sequences = self._config.max_sequences
        self.sampler = make_sampler(self._device, num_sequences)
        self.last_ids: LastIds = HostIds() if self._device == "cpu" else DeviceIds(num_sequences, self._device)
        self.graphs: Graphs | None = None
        self._fixed: FixedSteps | None = None
        self._before = done(None)
        """The step that was begun last."""

    def open_store(self) -> int:
        """Opens the store of rank 0 and returns its port; 0 when there is nobody to meet."""
        if self._config.world_size == 1:
            return 0
        store = open_store(self._spec.host)
        self._store = store
        return store.port

    def load(self) -> None:
        """Loads the model and lays out the pool. Raises ModelRefused or StartError."""
        if self._device == "cpu":
            torch.set_num_threads(self._config.threads_per_rank)
        else:  # before anything else is on a GPU: kernels of Triton are launched on the current one, which is the first
            torch.cuda.set_device(self._device)
        config, num_ranks_here = self._config, self._spec.num_ranks_here
        check_kv_bytes(config, self._device, num_ranks_here, self._ranks_per_gpu)
        self.lay_out(models.load(config.model, config.dtype, self._device))

    def lay_out(self, model: models.Model) -> None:
        """Lays out the pool of a model that is there. Raises ModelRefused or StartError."""
        config, num_ranks_here = self._config, self._spec.num_ranks_here
        self.model = model
        self.pool, windows = make_pool(self.model, config, num_ranks_here, self._ranks_per_gpu)
        self._ledger = Ledger(self._spec.rank, config.block_size)
        self.backend = table.choose(config.kernels, self._device, self.model.dtype)
        self._wire = Wire(self.backend, getattr(torch, config.partials))
        self._inputs = self._make_inputs()
        if self._device.startswith("cuda") and config.graphs == "auto":
            self.graphs = CudaGraphs(self._device, room_for_graphs(self.model, config))
        self._verifier = Verifier(self.model, self._ledger, config)
        self._ready = Ready(
            rank=self._spec.rank,
            device=self._device,
            dtype=name_of(self.model.dtype),
            num_blocks=self.pool.num_blocks,
            bytes_per_token=kv_bytes_per_token(sharded_layers(self.model, config), self.model.dtype, config),
            kv_dtype=kv_dtype(self.model, config),
            rotary=self.model.rotary,
            windows=windows,
            kernels=self.backend.name,
        )

    def _make_inputs(self) -> InputBuilder:
        model, config, ledger, pool = self.model, self._config, self._ledger, self.pool
        sharded, windowed = sharded_layers(model, config), windowed_layers(model, config)
        size = config.world_size
        windows = WindowBuilder(ledger, windowed, world_size=size, device=self._device)
        return InputBuilder(
            ledger,
            pool,
            model.layers,
            world_size=size,
            pasts=PastBuilder(ledger, pool, sharded, world_size=size, way=config.prefill, wire=self._wire),
            windows=windows if windowed else None,
        )

    def join(self, join: Join) -> Ready:
        """Enters the process groups of an epoch; nothing to do at world size 1."""
        if self._config.world_size == 1:
            self._prepare()
            return self._ready
        store = self._store or connect_store(join.host, join.port)
        self._store = store
        rank, longest = self._spec.rank, self._config.longest_wait
        place = epoch_store(store, join.epoch)
        carrier = agree_on_carrier(rank, self._config.world_size, place, self._device, timeout=longest)
        self._process_groups = ProcessGroups(
            rank, Topology(join.nodes), store, epoch=join.epoch, timeout=longest, carrier=carrier
        )
        return self.connect(self._process_groups.groups)

    def connect(self, groups: Groups) -> Ready:
        """Uses an epoch's groups for the exchanges of the steps. All ranks must connect at the same time."""
        ready = msgspec.structs.replace(self._ready, transport=groups.transport)
        self._wire.agree(groups.world, self._device)
        widest = max(self.model.layers.values(), key=lambda layer: layer.num_heads * layer.value_dim)
        heads, dim = widest.num_heads, widest.value_dim
        if self._config.merge == "auto":
            merge = choose_merge(groups, self._wire, heads, dim, self._device)
            ready = msgspec.structs.replace(ready, merges=merge.timings)
        else:
            merge = make_merge(self._config.merge, groups, self._wire)
            # what is compiled or connected at the first use must not make the first step wait
            merge.to_all(Partial.identity(1, heads, dim, device=self._device))
        self.peers = Peers(groups.world, merge)
        if ready.windows:
            # their blocks have the same ids on every rank, so they are as many as the rank has that has the fewest
            counts = groups.world.all_gather(torch.tensor([ready.windows.num_blocks], device=self._device))
            windows = msgspec.structs.replace(ready.windows, num_blocks=int(counts.min()))
            ready = msgspec.structs.replace(ready, windows=windows)
        if self.graphs is not None and groups.world.transport == "gloo":
            log.info("graphs: none, for tensors travel through the host's memory")
            self.graphs = None
        self._prepare()
        return ready

    @torch.inference_mode()
    def _prepare(self) -> None:
        """Has steps be over memory of fixed address, where the kernels can do that. All ranks prepare at the same
        time."""
        backend, sampler, last_ids = self.backend, self.sampler, self.last_ids
        can_prepare = isinstance(backend, FixedBackend) and isinstance(last_ids, DeviceIds)
        if not self._agree(can_prepare):  # ranks exchange as many rows in a step
            return
        assert isinstance(backend, FixedBackend)
        assert isinstance(last_ids, DeviceIds)
        rotary, sizes = self.model.rotary, bucket_sizes(self._config.max_sequences)
        may_be_double = bool(rotary.kind) and (self._config.allow_long or rotary.trained > FLOAT32_POSITIONS)
        buckets = [Bucket(size, self._inputs, may_be_double=may_be_double) for size in sizes]
        logits_RV = try_out(buckets, backend, self._logits)
        telling, choosing = Telling(sizes[-1], last_ids, self._tell, self._device), None
        if logits_RV is not None and isinstance(sampler, DeviceSampler):
            choosing = Choosing(sampler, torch.zeros_like(logits_RV), telling.ids_R)
        self._fixed = FixedSteps(buckets, last_ids, telling, choosing, self._device)
        self._fixed.prepare(self._logits, self.graphs, self._agree)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step; rank 0 returns the sampled tokens."""
        return self.start(plan).result()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Pending:
        """Begins a step, before the end of the one before it if that `may_overlap`."""
        plan = self._sequences.complete(plan)
        self._ledger.release(plan.release_segments)
        self.last_ids.forget(plan.release_sequences)
        self.sampler.forget(plan.release_sequences)
        self._verifier.forget(plan.release_sequences)
        result = StepResult(plan.epoch, plan.step, {})
        work = plan.work
        self._before = self._prefill(work, result) if isinstance(work, Prefill) else self._decode(work, result)
        return self._before

    def close(self) -> None:
        """Leaves the group. Ranks are told to leave when one of them was lost, too, so that nobody is waited for."""
        if self.graphs is not None:
            self.graphs.release()  # first: NCCL ends no group before the graphs that hold its exchanges
        if self._process_groups is not None:
            self._process_groups.abort()

    def _prefill(self, work: Prefill, result: StepResult) -> Pending:
        """An answer says that the keys are there, and after how many seconds: on a GPU a chunk is only launched by now,
        and nothing has waited for it."""
        inputs = self._inputs.prefill(work)
        step = PrefillStep(inputs, self.pool, self.backend, self.peers, self.model.last_layer)
        with contextlib.suppress(PrefillDone):
            self._forward(self.model.decoder, inputs, step)
        told = ToHost(step.has_finite_keys())

        def finish() -> StepResult | None:
            has_finite_keys = bool(told.wait())
            is_first = self._spec.rank == 0
            return msgspec.structs.replace(result, has_finite_keys=has_finite_keys) if is_first else None

        return Pending(lambda: told.arrival.is_past, finish)

    def _decode(self, work: Decode, result: StepResult) -> Pending:
        rows = self._inputs.numbers(work, self.last_ids)
        sampled = [row for row in work.rows if row.token_index >= 0]
        begun = (self._fixed and self._fixed.begin(rows, sampled)) or self._begin(rows, sampled)
        result = msgspec.structs.replace(result, kv_bytes_read=self._inputs.kv_bytes_read(rows))
        pending = Pending(lambda: begun.end.is_past, lambda: self._finish(work, sampled, begun, result))
        if isinstance(self.last_ids, HostIds) or self._verifier.watches(work.rows):
            self._before.result()  # what breaks in a step must not show in the answer to the one before
            pending.result()  # logits that are compared must not be overwritten by the next step
        return pending

    def _begin(self, rows: RowNumbers, sampled: Sequence[Row]) -> Launched:
        """A step of any shape, over tensors of its own."""
        inputs = self._inputs.tensors(rows, self.last_ids)
        logits_RV = self._logits(inputs)
        choice = self.sampler.start(sampled, logits_RV) if sampled and logits_RV is not None else None
        if sampled:
            ids_R = choice.ids() if choice else inputs.token_ids_T.new_zeros(len(sampled))
            self.last_ids.note(sampled, self._tell(ids_R))
        end = choice.arrival if isinstance(choice, DeviceChoice) else Moment(torch.device(self._device))
        return Launched(end, choice, logits_RV)

    def _finish(self, work: Decode, sampled: Sequence[Row], begun: Launched, result: StepResult) -> StepResult | None:
        """What is to be answered, once the device is done with a step."""
        begun.end.wait()
        if begun.logits_RV is None:
            return None
        tokens = begun.choice.tokens() if begun.choice else []
        self._verifier.take(sampled, tokens, begun.logits_RV)
        broken = self.sampler.broken
        return msgspec.structs.replace(
            result,
            tokens={row.sequence: token for row, token in zip(sampled, tokens, strict=True) if token is not None},
            not_finite=tuple(row.sequence for row in sampled if row.sequence in broken),
            comparisons=self._verifier.compare(row for row in work.rows if row.sequence not in broken),
        )

    def _agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks, which ask at the same time."""
        if self.peers is None:
            return is_so
        told = self.peers.comm.all_gather(torch.tensor([is_so], dtype=torch.long, device=self._device))
        return is_so and bool(told.min())

    def _tell(self, ids_T: Tensor) -> Tensor:
        """The ids that rank 0 has chosen."""
        return self.peers.comm.broadcast(ids_T) if self.peers else ids_T

    def _logits(self, inputs: Inputs[RowLayer]) -> Tensor | None:
        """Goes through the model. On rank 0 logits [R, V] of the R rows to sample from."""
        step = DecodeStep(inputs, self.pool, self.backend, self.peers)
        if self._spec.rank != 0:
            self._forward(self.model.decoder, inputs, step)
            return None
        assert inputs.sample_rows_R is not None
        return self._forward(self.model.module, inputs, step, logits_to_keep=inputs.sample_rows_R)[0][0]

    def _forward(
        self, module: torch.nn.Module, inputs: Inputs[Any], step: DecodeStep | PrefillStep, **options: Tensor
    ) -> tuple[Tensor, ...]:
        self.model.ropes.rows = inputs.ropes
        arguments = self.model.arguments(step, inputs.token_ids_T, inputs.positions_T)
        return module(**arguments, return_dict=False, **options)


def choose_device(wanted: str, gpu: int | None, num_gpus: int, num_ranks: int) -> str:
    """`cpu`, or `cuda:N` for a rank that was given the GPU of this number, of the `num_gpus` that it and others of the
    `num_ranks` see. Raises StartError when GPUs were asked for and there is none, or when ranks would share one and
    that was not asked for."""
    if wanted == "cuda" and not num_gpus:
        raise StartError("device: cuda was asked for, and torch sees no GPU")
    if wanted == "cpu" or gpu is None or not num_gpus:
        return "cpu"
    if gpu >= num_gpus and wanted != "cuda":
        raise too_few_gpus(num_ranks, "this machine", num_gpus)
    return f"cuda:{gpu % num_gpus}"


def count_gpus() -> int:
    """GPUs that this process sees and can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
