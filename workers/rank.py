"""One rank: a model, its share of the keys and values, and its place in the group."""

import contextlib
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
from longleaf.kernels import table
from longleaf.runs import ceil_div
from longleaf.sampling import Token
from longleaf.topology import Topology, too_few_gpus
from longleaf.tree import Wire, choose_merge, make_merge
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
from workers.model import model as models
from workers.sampling.device_sampler import make_sampler
from workers.sampling.sampler import NO_TOKEN
from workers.step.forward import DecodeStep, Peers, PrefillDone, PrefillStep
from workers.step.inputs import InputBuilder, Inputs
from workers.step.layers import RowLayer
from workers.step.past import PastBuilder
from workers.step.windows import WindowBuilder
from workers.transfers import ToHost, to_device
from workers.verification import Verifier


class Rank:
    """Executes step plans. Life: open_store (rank 0), load, join, execute ..., close.

    What computes has names of its own: `model`, `pool` and `backend` once it is loaded, `peers` once it has joined, and
    `sampler`. Whoever wants to see that an error shows, or what passes through, puts something else in their place.
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
        self._last_ids: dict[int, int] = {}
        self.sampler = make_sampler(self._device)

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
        self.model = models.load(config.model, config.dtype, self._device)
        self.pool, windows = make_pool(self.model, config, num_ranks_here, self._ranks_per_gpu)
        self._ledger = Ledger(self._spec.rank, config.block_size)
        self.backend = table.choose(config.kernels, self._device, self.model.dtype)
        self._wire = Wire(self.backend, getattr(torch, config.partials))
        self._inputs = self._make_inputs()
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
        return ready

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step; rank 0 returns the sampled tokens."""
        plan = self._sequences.complete(plan)
        self._ledger.release(plan.release_segments)
        for sequence in plan.release_sequences:
            self._last_ids.pop(sequence, None)
        self.sampler.forget(plan.release_sequences)
        self._verifier.forget(plan.release_sequences)
        result = StepResult(plan.epoch, plan.step, {})
        result = self._prefill(plan.work, result) if isinstance(plan.work, Prefill) else self._decode(plan.work, result)
        return result if self._spec.rank == 0 else None

    def _wait_for_device(self) -> None:
        """An answer says that the keys are there, and after how many seconds: on a GPU a chunk is only launched by
        now, and nothing has waited for it. The ids of a decode step have, so that there is nothing left to wait for."""
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leaves the group. Ranks are told to leave when one of them was lost, too, so that nobody is waited for."""
        if self._process_groups is not None:
            self._process_groups.abort()

    def _prefill(self, work: Prefill, result: StepResult) -> StepResult:
        inputs = self._inputs.prefill(work)
        step = PrefillStep(inputs, self.pool, self.backend, self.peers, self.model.last_layer)
        with contextlib.suppress(PrefillDone):
            self._forward(self.model.decoder, inputs, step)
        has_finite_keys = step.has_finite_keys()
        if self._spec.rank != 0:
            return result
        self._wait_for_device()
        return msgspec.structs.replace(result, has_finite_keys=bool(has_finite_keys))

    def _decode(self, work: Decode, result: StepResult) -> StepResult:
        inputs = self._inputs.decode(work, self._last_ids)
        step = DecodeStep(inputs, self.pool, self.backend, self.peers)
        rows = [row for row in work.rows if row.token_index >= 0]
        if self._spec.rank != 0:
            self._forward(self.model.decoder, inputs, step)
            self._note(rows, self._receive(len(rows)))
            return result
        logits_RV = self._logits(inputs, step)
        tokens = self._choose(rows, logits_RV) if rows else []
        self._note(rows, [(token or NO_TOKEN).id for token in tokens])
        self._verifier.take(rows, tokens, logits_RV)
        broken = self.sampler.broken
        return msgspec.structs.replace(
            result,
            tokens={row.sequence: token for row, token in zip(rows, tokens, strict=True) if token is not None},
            kv_bytes_read=step.kv_bytes_read,
            not_finite=tuple(row.sequence for row in rows if row.sequence in broken),
            comparisons=self._verifier.compare(row for row in work.rows if row.sequence not in broken),
        )

    def _choose(self, rows: Sequence[Row], logits_RV: Tensor) -> list[Token | None]:
        """The tokens of rows, which the other ranks are told. None where there can be none."""
        choice = self.sampler.start(rows, logits_RV)
        if self.peers:
            self.peers.comm.broadcast(choice.ids())
        return choice.tokens()

    def _receive(self, num_rows: int) -> list[int]:
        """The ids that rank 0 has chosen."""
        if not self.peers or not num_rows:
            return []
        ids_R = self.peers.comm.broadcast(torch.zeros(num_rows, dtype=torch.long, device=self._device))
        return ToHost(ids_R).wait().tolist()

    def _note(self, rows: Sequence[Row], ids: Sequence[int]) -> None:
        """Remembers the last token of each sequence, for the next step."""
        self._last_ids.update(zip([row.sequence for row in rows], ids, strict=True))

    def _logits(self, inputs: Inputs[RowLayer], step: DecodeStep) -> Tensor:
        """Logits [R, V] of the R rows to sample from."""
        keep = to_device(torch.tensor(inputs.sample_rows, dtype=torch.long), self._device)
        return self._forward(self.model.module, inputs, step, logits_to_keep=keep)[0][0]

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
