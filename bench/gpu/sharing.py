"""Ranks that are processes and share a device: whether they answer as one does, and how fast.

They are started as `--launcher local` does it, and are told their plans over pipes: neither Ray nor ZMQ is needed.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.gpu import ground
from bench.gpu.cases import Share

if TYPE_CHECKING:
    from bench.gpu import plans
    from bench.gpu.ranks import Shape
    from longleaf.rank_protocol.step import StepPlan, StepResult
    from workers.rank import Rank

BLOCK_SIZE = 32
DEADLINE = 240.0
"""The maximum seconds between two messages of a rank."""
KV_BYTES = 256 << 20
LEAVE_SECONDS = 20.0


class Failure:
    """The error that a rank sends instead of an answer."""

    def __init__(self, told: str) -> None:
        self.told = told


class Ranks:
    """The ranks of one world, in processes of their own, each at the end of a pipe."""

    def __init__(self, ends: list[Connection]) -> None:
        self._ends = ends
        self._heard: list[list[Any]] = [[] for _ in ends]
        self.readies: list[Any] = []

    def join(self) -> None:
        """Has them meet. Raises as `execute`."""
        ports = [self._next(number) for number in range(len(self._ends))]
        self._tell(ports[0])
        self.readies = [self._next(number) for number in range(len(self._ends))]

    def execute(self, plan: "StepPlan") -> "StepResult":
        """Has all of them do a step. Raises RuntimeError where one has failed or left, or all are silent."""
        self._tell(plan)
        return self._next(0)

    def _tell(self, message: object) -> None:
        for end in self._ends:
            end.send(message)

    def receive(self) -> Any:
        """The next message of the first rank. Raises as `execute`."""
        return self._next(0)

    def _next(self, number: int) -> Any:
        """The next message of a rank."""
        while not self._heard[number]:
            ready = wait(self._ends, DEADLINE)
            if not ready:
                raise RuntimeError(f"the ranks have been silent for {DEADLINE:.0f} s")
            for i, end in enumerate(self._ends):
                if end in ready:
                    self._hear(i, end)
        return self._heard[number].pop(0)

    def _hear(self, number: int, end: Connection) -> None:
        try:
            output = end.recv()
        except EOFError:
            raise RuntimeError(f"rank {number} has ended") from None
        if isinstance(output, Failure):
            raise RuntimeError(f"rank {number} failed:\n{output.told}")
        self._heard[number].append(output)


@contextmanager
def running(num_ranks: int, device: str, shape: "Shape") -> Iterator[Ranks]:
    """Ranks on a device (`cpu`, or `cuda:0`) with the same random model in float32."""
    with processes(num_ranks, serve, device, tuple(shape)) as ranks:
        ranks.join()
        yield ranks


@contextmanager
def processes(num_ranks: int, work: Callable[..., None], *given: object) -> Iterator[Ranks]:
    """Ranks in processes, each of which calls `work` with its end of a pipe, its number, the number of ranks, and the
    given arguments. All of these can be pickled.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_ranks)]
    processes = [
        context.Process(target=live, args=(there, work, i, num_ranks, *given), daemon=True)
        for i, (_, there) in enumerate(pipes)
    ]
    ends: Any = [here for here, _ in pipes]
    try:
        for process, (_, there) in zip(processes, pipes, strict=True):
            process.start()
            there.close()
        yield Ranks(ends)
    finally:
        for end in ends:
            end.close()  # a rank whose end is closed leaves
        for process in processes:
            process.join(LEAVE_SECONDS)
            process.kill()


def live(end: Connection, work: Callable[..., None], number: int, num_ranks: int, *given: Any) -> None:
    """A rank's process."""
    ground.stand_in()
    from longleaf.config import apply_environment, network_environment, rank_environment
    from longleaf.network_interfaces import interface_of

    apply_environment(rank_environment(1))
    apply_environment(network_environment(interface_of("127.0.0.1")))
    try:
        work(end, number, num_ranks, *given)
    except EOFError:
        pass
    except Exception:
        with suppress(OSError):  # the reader may be closed
            end.send(Failure(traceback.format_exc()))


def serve(end: Connection, number: int, num_ranks: int, device: str, shape: tuple[Any, ...]) -> None:
    """Executes plans until the other end is closed. Raises EOFError then."""
    import torch

    from bench.gpu.plans import EPOCH
    from bench.gpu.ranks import Shape, make_module, make_rank, served
    from longleaf.config import EngineConfig
    from longleaf.rank_protocol.group_messages import Join

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    config = EngineConfig(
        model="random",
        world_size=num_ranks,
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_bytes=KV_BYTES,
        device="cuda" if device.startswith("cuda") else "cpu",
    )
    rank = make_rank(config, number)
    end.send(0 if number else rank.open_store())
    port = end.recv()
    rank.allocate_pool(served(make_module(Shape(*shape), torch.float32, device), device))
    end.send(rank.join(Join(EPOCH, number, "127.0.0.1", port, ("here",) * num_ranks)))
    try:
        execute_plans(end, rank, number)
    finally:
        rank.close()


def execute_plans(end: Connection, rank: "Rank", number: int) -> None:
    """Executes plans; the first rank sends their results. Raises EOFError when the other end is closed."""
    while True:
        result = rank.execute(end.recv())
        if number == 0:
            end.send(result)


def measure(case: Share, device: str, shape: "Shape") -> dict[str, Any]:
    """The row of a case: several ranks against a single rank."""
    together, transport, kernels = answered(case, case.num_ranks, device, shape)
    alone, _, _ = answered(case, 1, device, shape)
    return {
        "kernels": kernels,
        "transport": transport,
        "tokens_per_s": round(case.num_rows / median(together.seconds), 1),
        "alone_tokens_per_s": round(case.num_rows / median(alone.seconds), 1),
        "is_same": together.tokens == alone.tokens,
    }


class Answered:
    """Answers by sequence, and the seconds of each decode step."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.seconds: list[float] = []


def answered(case: Share, num_ranks: int, device: str, shape: "Shape") -> tuple[Answered, str, str]:
    """Greedy answers to the prompts of a case, the transport between ranks, and the name of their kernels."""
    from bench.gpu import plans

    with running(num_ranks, device, shape) as ranks:
        found = collected(ranks, plans.answers(prompts_of(case, shape.vocabulary), num_ranks, BLOCK_SIZE))
        return found, ranks.readies[0].transport, ranks.readies[0].kernels


def prompts_of(case: Share, vocabulary: int) -> "list[plans.Asked]":
    """The prompts of a case."""
    from bench.gpu import plans

    prompts = [tuple((i * 31 + j * 7) % vocabulary for j in range(case.num_prompt)) for i in range(case.num_rows)]
    return [plans.Asked(prompt, case.num_tokens) for prompt in prompts]


def collected(ranks: Ranks, work: "Iterable[StepPlan]") -> Answered:
    """Answers of ranks to plans."""
    found = Answered()
    for plan in work:
        begin = time.perf_counter()
        result = ranks.execute(plan)
        if result.tokens:
            found.seconds.append(time.perf_counter() - begin)
        for sequence, tokens in result.tokens.items():
            found.tokens.setdefault(sequence, []).extend(token.id for token in tokens)
    return found
