"""CUDA graphs of torch on a simulated torch.cuda: the remains of a refused capture, and the memory that counts as
used."""

from contextlib import contextmanager

import pytest

from workers.cuda_graphs import graphs
from workers.cuda_graphs.graphs import CaptureRefused, CollectiveGraphs, CudaGraphs

MIB = 1 << 20


class Cuda:
    """Stands for torch.cuda. A refused capture cannot end, and its stream stays the current one; unused memory stays
    reserved until it is released."""

    def __init__(self):
        self.current = "the usual stream"
        self.unused = 0
        self.used = 0
        self.resets = 0

    def Stream(self, device):
        return "the stream of captures"

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self):
        return self

    def graph_pool_handle(self):
        return (0, 1)

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.current, before = stream, self.current
        try:
            yield
        except RuntimeError:
            raise RuntimeError("the capture was invalidated")  # noqa: B904
        self.current = before

    def replay(self):
        pass

    def reset(self):
        self.resets += 1

    def empty_cache(self):
        self.unused = 0

    def memory_reserved(self, device):
        return self.used + self.unused


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(graphs, "cuda", found)
    return found


def refuse():
    raise RuntimeError("operation not permitted")


def test_refused_capture_raises_the_first_error_and_restores_the_stream(cuda):
    with pytest.raises(CaptureRefused, match="RuntimeError: operation not permitted"):
        CudaGraphs("cuda:0", MIB).capture(refuse)
    assert cuda.current == "the usual stream"


def test_only_memory_of_captures_is_counted(cuda):
    made = CudaGraphs("cuda:0", 2 * MIB)
    cuda.used, cuda.unused = 900 * MIB, 900 * MIB

    def take():
        cuda.used += MIB
        cuda.unused += 100 * MIB

    for _ in range(3):
        made.check_room()
        cuda.used += 50 * MIB
        made.capture(take)
    with pytest.raises(CaptureRefused, match=r"2\.0 MiB"):
        made.check_room()


def test_all_graphs_are_released(cuda):
    made = CudaGraphs("cuda:0", MIB)
    for _ in range(3):
        made.capture(lambda: None)
    made.release()
    made.release()
    assert cuda.resets == 3


class RefusingGraphs:
    """Implements workers.cuda_graphs.graphs.Graphs."""

    def __init__(self, room=True, capture=True):
        self._room, self._capture = room, capture

    def check_room(self):
        if not self._room:
            raise CaptureRefused("no room")

    def capture(self, work):
        if not self._capture:
            raise CaptureRefused("no capture")
        return work

    def release(self):
        pass


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("step", ["room", "capture"])
def test_either_all_ranks_capture_or_none(step, mine, theirs):
    requested = []

    def agree(is_so):
        requested.append(is_so)
        return is_so and theirs

    shared = CollectiveGraphs(RefusingGraphs(**{step: mine}), agree)

    def act():
        return shared.check_room() if step == "room" else shared.capture(refuse)

    if mine and theirs:
        assert act() is (None if step == "room" else refuse)
    else:
        with pytest.raises(CaptureRefused, match="another rank" if mine else f"no {step}"):
            act()
    assert requested == [mine]
