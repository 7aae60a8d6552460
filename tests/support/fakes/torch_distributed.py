"""A fake torch.distributed for ranks that are threads: executes calls as NCCL would, and records them.

Where NCCL would hang, mix up data or be undefined, CollectiveMismatch is raised on all ranks. There is no time limit:
it is raised as soon as every rank waits for another. Replaces `dist` in `longleaf.comm.process_group`.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor

from longleaf.errors import CollectiveMismatch

T = TypeVar("T")
WORLD = "world"
ISEND, IRECV = "isend", "irecv"


class CollectiveCall(NamedTuple):
    """A collective call on a whole group, which must be the same on each rank."""

    name: str
    about: tuple[object, ...] = ()
    """Shapes, types and ranks, which must be equal."""


class P2POp(NamedTuple):
    """One direction of an exchange between two ranks."""

    op: str
    tensor: Tensor
    group: "FakeGroup"
    group_peer: int


class FakeGroup:
    """A communicator: its members by world rank, and all of their calls."""

    def __init__(self, name: str, members: Sequence[int], backend: str) -> None:
        self.name = name
        self.members = tuple(members)
        self.backend = backend
        self.is_formed = False
        """Whether all ranks have made a common call. Only then may single pairs exchange tensors."""
        self.calls: dict[int, list[CollectiveCall]] = {rank: [] for rank in members}
        """The collective calls of each rank, in order."""
        self.sent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        """The sent tensors, by sender and receiver."""
        self.awaited: dict[tuple[int, int], int] = defaultdict(int)
        """The number of posted receives, by sender and receiver."""
        self.meetings: dict[int, dict[int, Any]] = defaultdict(dict)
        """The inputs of the ranks for each call, by call number."""

    def __str__(self) -> str:
        return f"{self.name} {self.members}"


class PendingTransfer(NamedTuple):
    """A rank that waits for others."""

    is_done: Callable[[], bool]
    what: str


class FakeStore:
    """The store of rank 0, or the part of it with a prefix."""

    def __init__(self, owner: "FakeDistributed", values: dict[str, bytes], prefix: str = "") -> None:
        self._owner = owner
        self._values = values
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        self._owner.update(lambda: self._values.update({self._prefix + key: value.encode()}))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        del timeout  # no timeout is needed: the fake raises an error once all ranks wait
        self._owner.wait(lambda: all(self._prefix + key in self._values for key in keys), f"for {', '.join(keys)}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._values[self._prefix + key] for key in keys]

    def part(self, prefix: str) -> "FakeStore":
        return FakeStore(self._owner, self._values, f"{self._prefix}{prefix}/")

    @property
    def name(self) -> str:
        return self._prefix


class FakeWork:
    """A send or a receive in progress."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class FakeDistributed:
    """The functions of torch.distributed that `longleaf.comm.process_group` uses. Tensors may be on any device."""

    P2POp = P2POp
    isend, irecv = ISEND, IRECV

    def __init__(self, world_size: int) -> None:
        self.groups: list[FakeGroup] = []
        """All groups created, worlds first."""
        self.store = FakeStore(self, {})
        self.group = FakeDefault(self)
        self.distributed_c10d = SimpleNamespace(_abort_process_group=self._abort)
        self.ended: list[tuple[int, str]] = []
        """The ranks that left a world, each with `destroyed` or `aborted`."""
        self._world_size = world_size
        self._changed = threading.Condition()
        self._here = threading.local()
        self._running = set(range(world_size))
        self._waiting: dict[int, PendingTransfer] = {}
        self._error: CollectiveMismatch | None = None

    def run(self, work: Callable[[int], T]) -> list[T]:
        """The results of `work(rank)` for each rank, in separate threads. Raises the exception of the first rank that
        failed."""
        self._running = set(range(self._world_size))
        with ThreadPoolExecutor(self._world_size) as threads:
            futures = [threads.submit(self._live, rank, work) for rank in range(self._world_size)]
        if errors := [error for future in futures if (error := future.exception())]:
            # the others failed only because this rank was missing
            raise next((error for error in errors if not isinstance(error, CollectiveMismatch)), errors[0])
        return [future.result() for future in futures]

    def check(self) -> None:
        """Raises CollectiveMismatch unless all ranks of each group made the same calls, and everything sent was
        received."""
        for group in self.groups:
            first = group.calls[group.members[0]]
            for rank, calls in group.calls.items():
                if calls != first:
                    raise CollectiveMismatch(f"{group}: rank {rank} calls {calls}, rank {group.members[0]} {first}")
            for pair in {*group.sent, *group.awaited}:
                if len(group.sent[pair]) != group.awaited[pair]:
                    message = f"{len(group.sent[pair])} tensors are sent and {group.awaited[pair]} awaited"
                    raise CollectiveMismatch(f"{group}: from rank {pair[0]} to {pair[1]} {message}")

    # --- the API of torch.distributed ---

    def init_process_group(
        self,
        backend: str,
        *,
        store: FakeStore,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device_id: torch.device | None = None,
    ) -> None:
        assert (rank, world_size) == (self._here.rank, self._world_size)
        with self._changed:
            made = next((group for group in self.groups if group.name == store.name + WORLD), None)
            if made is None:
                made = FakeGroup(store.name + WORLD, range(world_size), backend)
                self.groups.append(made)
        self._here.world = made
        if device_id is not None:  # otherwise NCCL forms it at the first call
            self._exchange_inputs(made, CollectiveCall("form", (backend, timeout)))

    def new_group(self, ranks: Sequence[int], timeout: timedelta) -> FakeGroup | None:
        world = self.world()
        name = f"{world.name}/{len(world.calls[self._here.rank])}"
        self._exchange_inputs(world, CollectiveCall("split", (tuple(ranks), timeout)))
        if self._here.rank not in ranks:
            return None
        with self._changed:
            made = next((group for group in self.groups if group.name == name), None)
            if made is None:
                made = FakeGroup(name, ranks, world.backend)
                made.is_formed = True
                self.groups.append(made)
        return made

    def get_rank(self, group: FakeGroup) -> int:
        return group.members.index(self._here.rank)

    def get_world_size(self, group: FakeGroup) -> int:
        return len(group.members)

    def get_backend(self, group: FakeGroup) -> str:
        return group.backend

    def PrefixStore(self, prefix: str, store: FakeStore) -> FakeStore:
        return store.part(prefix)

    def all_gather_single(self, out: Tensor, tensor: Tensor, group: FakeGroup) -> None:
        out.copy_(torch.stack(self._exchange(group, "all_gather", tensor)).view(out.shape))

    def all_to_all_single(self, out: Tensor, tensor: Tensor, group: FakeGroup) -> None:
        own = self.get_rank(group)
        found = self._exchange(group, "all_to_all", tensor)
        assert tensor.shape[0] % len(found) == 0
        out.copy_(torch.stack([sent.chunk(len(found))[own] for sent in found]).view(out.shape))

    def all_reduce(self, tensor: Tensor, op: object, group: FakeGroup) -> None:
        found = torch.stack(self._exchange(group, f"all_reduce {op}", tensor))
        tensor.copy_(found.amax(dim=0) if op == torch.distributed.ReduceOp.MAX else found.sum(dim=0))

    def broadcast(self, tensor: Tensor, group_src: int, group: FakeGroup) -> None:
        tensor.copy_(self._exchange(group, f"broadcast from {group_src}", tensor)[group_src])

    def batch_isend_irecv(self, operations: Sequence[P2POp]) -> list[FakeWork]:
        group, own = operations[0].group, self._here.rank
        peers = [group.members[one.group_peer] for one in operations]
        pairs = [(own, peer) if one.op == ISEND else (peer, own) for one, peer in zip(operations, peers, strict=True)]
        if not group.is_formed:
            self._form(group, [(one.op, pair) for one, pair in zip(operations, pairs, strict=True)])
        works: list[FakeWork] = []
        with self._changed:
            for one, pair in zip(operations, pairs, strict=True):
                if one.op == ISEND:
                    group.sent[pair].append(one.tensor.clone())
                    finish = partial(self._await_receipt, group, pair, len(group.sent[pair]))
                else:
                    finish = partial(self._receive, group, pair, group.awaited[pair], one.tensor)
                    group.awaited[pair] += 1
                works.append(FakeWork(finish))
            self._changed.notify_all()
        return works

    def destroy_process_group(self) -> None:
        """Waits for all ranks, as NCCL may."""
        self._exchange_inputs(self.world(), CollectiveCall("destroy"))
        self._end("destroyed")

    def _abort(self) -> None:
        self._end("aborted")

    # --- implementation ---

    @property
    def own_rank(self) -> int:
        """The calling rank."""
        return self._here.rank

    def world(self) -> FakeGroup:
        """The world of the calling rank."""
        return self._here.world

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Blocks until `is_done`. Raises CollectiveMismatch when every rank waits."""
        with self._changed:
            self._wait(is_done, what)

    def update(self, change: Callable[[], None]) -> None:
        """Applies a change, and notifies the waiting ranks."""
        with self._changed:
            change()
            self._changed.notify_all()

    def _live(self, rank: int, work: Callable[[int], T]) -> T:
        self._here.rank = rank
        try:
            return work(rank)
        finally:
            with self._changed:
                self._running.discard(rank)
                self._changed.notify_all()

    def _end(self, how: str) -> None:
        with self._changed:
            self.ended.append((self._here.rank, how))
        del self._here.world

    def _exchange(self, group: FakeGroup, name: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks of the group, in order."""
        assert tensor.is_contiguous(), "NCCL requires contiguous tensors"
        return self._exchange_inputs(group, CollectiveCall(name, (tuple(tensor.shape), tensor.dtype)), tensor.clone())

    def _form(self, group: FakeGroup, own: Sequence[tuple[str, tuple[int, int]]]) -> None:
        """Point-to-point operations form a group only if all of its ranks take part in the first batch."""
        found = [one for batch in self._exchange_inputs(group, CollectiveCall("first batch"), own) for one in batch]
        sent, awaited = ({pair for op, pair in found if op == wanted} for wanted in (ISEND, IRECV))
        if sent != awaited:
            with self._changed:
                self._fail(f"{group}: the first batch of some ranks is not the first one of their peers")

    def _exchange_inputs(self, group: FakeGroup, call: CollectiveCall, own: Any = None) -> list[Any]:
        """The inputs of all ranks of the group for this call, which must be the same on each rank."""
        rank = self._here.rank
        with self._changed:
            number = len(group.calls[rank])
            group.calls[rank].append(call)
            brought = group.meetings[number]
            first = next(iter(brought), rank)
            if group.calls[first][number] != call:
                theirs = group.calls[first][number]
                self._fail(f"{group}: rank {rank} calls {call} where rank {first} calls {theirs}")
            brought[rank] = own
            self._wait(lambda: len(brought) == len(group.members), f"in {call} of {group}")
            group.is_formed = True
        return [brought[member] for member in group.members]

    def _await_receipt(self, group: FakeGroup, pair: tuple[int, int], number: int) -> None:
        """Blocks until the receiver has posted `number` receives."""
        self.wait(lambda: group.awaited[pair] >= number, f"to send to rank {pair[1]} in {group}")

    def _receive(self, group: FakeGroup, pair: tuple[int, int], number: int, out: Tensor) -> None:
        self.wait(lambda: len(group.sent[pair]) > number, f"to receive from rank {pair[0]} in {group}")
        sent = group.sent[pair][number]
        if (sent.shape, sent.dtype) != (out.shape, out.dtype):
            with self._changed:
                self._fail(f"{group}: rank {pair[0]} sends {sent.shape}, rank {pair[1]} awaits {out.shape}")
        out.copy_(sent)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        rank = self._here.rank
        self._waiting[rank] = PendingTransfer(is_done, what)
        self._changed.notify_all()
        while not is_done():
            if self._error is not None:
                raise self._error
            if self._is_stuck():
                self._fail("; ".join(f"rank {one} waits {found.what}" for one, found in sorted(self._waiting.items())))
            self._changed.wait()
        del self._waiting[rank]

    def _is_stuck(self) -> bool:
        return set(self._waiting) == self._running and not any(one.is_done() for one in self._waiting.values())

    def _fail(self, reason: str) -> None:
        self._error = CollectiveMismatch(reason)
        self._changed.notify_all()
        raise self._error


class FakeDefault:
    """Stands for `torch.distributed.group`."""

    def __init__(self, owner: FakeDistributed) -> None:
        self._owner = owner

    @property
    def WORLD(self) -> Any:
        return self._owner.world()
