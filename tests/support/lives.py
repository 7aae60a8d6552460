"""Members as processes with real models, and a test in the coordinator's place."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import zmq

from longleaf.config import EngineConfig
from longleaf.rank_protocol.encoding import FromRank, ToRank, decode_from_rank, encode
from longleaf.rank_protocol.group_messages import (
    AbortExchanges,
    GroupFailure,
    Join,
    KvLayout,
    MergeTiming,
    OpenStore,
    Ready,
    StoreOpened,
)
from longleaf.rank_protocol.member_messages import Heartbeat, Hello, Load, Loaded, Stop
from longleaf.rank_protocol.rank_spec import ConnectInfo, RankSpec
from longleaf.rank_protocol.step import StepPlan
from tests.support.fakes.kv_store import FolderStore

HOST = "127.0.0.1"
SECONDS = 60.0
"""Timeout for a member's message; it is not a measurement."""
VICTIM = 2
"""The member that fails in steps with one of these numbers."""
RAISE, FREEZE, KILL, KEEP = 901, 902, 903, 904
"""The last one raises, and something of the epoch stays."""
T = TypeVar("T", bound=FromRank)


def strike(step: int) -> None:
    match step:
        case 901 | 904:
            raise RuntimeError("failed on request")
        case 902:
            os.kill(os.getpid(), signal.SIGSTOP)
        case 903:
            os.kill(os.getpid(), signal.SIGKILL)


def live(spec: RankSpec) -> None:
    """The life of a member. The victim strikes in the middle of a forward pass, where the others wait for it."""
    import torch

    from longleaf.config import apply_environment, network_environment
    from longleaf.network_interfaces import interface_of
    from workers.control import serve
    from workers.rank import Rank

    class Striking:
        def __init__(self, merge: Any, step: int) -> None:
            self._merge, self._step, self._layers = merge, step, iter(range(100))

        def to_all(self, partial: Any) -> Any:
            if next(self._layers) == 1:
                strike(self._step)
            return self._merge.to_all(partial)

    class Victim(Rank):
        def start(self, plan: StepPlan) -> Any:
            if plan.step in (RAISE, FREEZE, KILL, KEEP):
                assert self.epoch is not None
                assert self.epoch.peers is not None
                self.kept = self.epoch.peers.comm if plan.step == KEEP else None
                peers: Any = self.epoch.peers
                peers.merge = Striking(peers.merge, plan.step)
            return super().start(plan)

    torch.set_num_threads(1)
    apply_environment(network_environment(interface_of(spec.host)))
    kind = Victim if spec.member == VICTIM else Rank
    os._exit(serve(spec, lambda spec: kind(spec, cast("Any", GatedStore))))


class GatedStore(FolderStore):
    """While a pipe `gate` exists in the folder, calls block until a test opens it for writing. A blocked call creates a
    file `waiting`."""

    def _answer(self) -> None:
        if (gate := self.folder / "gate").exists():
            (self.folder / "waiting").touch()
            os.close(os.open(gate, os.O_RDONLY))
        super()._answer()


class Members:
    """Processes that have loaded, on the machines of `nodes`, one letter each, and their messages in order of
    arrival."""

    def __init__(self, nodes: str, config: EngineConfig) -> None:
        self.nodes = nodes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._invitations = []
        context = multiprocessing.get_context("forkserver")
        self._processes = []
        for member, node in enumerate(nodes):
            keys = zmq.curve_keypair()
            invitation = ConnectInfo(
                address=f"tcp://{HOST}:{port}", server_key=public, public_key=keys[0], secret_key=keys[1]
            )
            place = {"host": HOST, "node": node, "num_ranks_here": nodes.count(node), "gpu": None}
            spec = RankSpec(member=member, config=config, invitation=invitation, **place)
            self._invitations.append(invitation)
            self._processes.append(context.Process(target=live, args=(spec,), daemon=True))
            self._processes[-1].start()
        self._received: list[FromRank] = []
        self.beats: dict[int, Heartbeat] = {}
        """The last of each member."""

    def load(self) -> None:
        for member in range(len(self.nodes)):
            self.hear(Hello, member)
            self.say(member, Load())
        for member in range(len(self.nodes)):
            self.hear(Loaded, member)

    def say(self, member: int, message: ToRank) -> None:
        invitation = self._invitations[member]
        name = invitation.heartbeat_id if isinstance(message, AbortExchanges) else invitation.commands_id
        self._socket.send_multipart([name, encode(message)])

    def hear(self, kind: type[T], member: int) -> T:
        """The next message of a type from a member; only rank 0 sends results."""
        deadline = time.monotonic() + SECONDS
        while True:
            for message in self._received:
                if isinstance(message, kind) and getattr(message, "member", member) == member:
                    self._received.remove(message)
                    return message
            self._listen(deadline)

    def _listen(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        assert left > 0 and self._socket.poll(1 + int(left * 1000)), f"no such message; got {self._received}"
        message = decode_from_rank(self._socket.recv_multipart()[1])
        if isinstance(message, Heartbeat):
            self.beats[message.member] = message
        else:
            self._received.append(message)

    def wait_for_step(self, member: int, epoch: int, step: int) -> None:
        """Returns once a heartbeat reports this step. Heartbeats come once a second, and earlier ones may be queued."""
        while (beat := self.wait_for_beat(member).progress).step != step or beat.epoch != epoch:
            pass

    def wait_for_beat(self, member: int) -> Heartbeat:
        """The next one."""
        self.beats.pop(member, None)
        deadline = time.monotonic() + SECONDS
        while member not in self.beats:
            self._listen(deadline)
        return self.beats[member]

    def invite(self, epoch: int, ranks: Sequence[int], merges: tuple[MergeTiming, ...] = ()) -> None:
        """Sends the members `ranks`, in this order, the request to join an epoch."""
        port = 0
        if len(ranks) > 1:
            self.say(ranks[0], OpenStore(epoch))
            port = self.hear(StoreOpened, ranks[0]).port
        nodes = tuple(self.nodes[member] for member in ranks)
        for rank, member in enumerate(ranks):
            self.say(member, Join(epoch, rank, HOST, port, nodes, merges))

    def form(self, epoch: int, ranks: Sequence[int], layout: KvLayout | None = None, **how: Any) -> list[Ready]:
        self.invite(epoch, ranks, **how)
        readies = [self.hear(Ready, member) for member in ranks]
        assert [ready.epoch for ready in readies] == [epoch] * len(ranks)
        if layout is not None:
            for member in ranks:
                self.say(member, layout)
        return readies

    def tell(self, ranks: Sequence[int], *plans: StepPlan) -> None:
        for plan in plans:
            for member in ranks:
                self.say(member, plan)

    def broken(self, member: int) -> GroupFailure:
        return self.hear(GroupFailure, member)

    def kill(self, member: int) -> None:
        """Kills a member in any state, as a fleet does."""
        self._processes[member].kill()
        self._processes[member].join(SECONDS)

    def is_alive(self, member: int) -> bool:
        return self._processes[member].is_alive()

    def open_resources(self, member: int) -> dict[str, int]:
        """Files, threads and pieces of shared memory of a member."""
        process = psutil.Process(self._processes[member].pid)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        return {
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "boards": len({line for line in maps.splitlines() if "/dev/shm/longleaf" in line}),
        }

    def close(self) -> None:
        for member, process in enumerate(self._processes):
            if process.is_alive():
                self.say(member, Stop())
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join(SECONDS)
        self._socket.close(linger=0)
        self._context.term()
