"""The devices of ranks; the devices of the cluster and the machine are simulated, so no GPU is needed."""

import pytest

from coordinator.cluster import local_fleet
from coordinator.cluster.local_fleet import LocalFleet
from coordinator.cluster.ray_fleet import bundle_for
from longleaf.comm.process_group import fastest_transport
from longleaf.config import EngineConfig
from longleaf.errors import StartError
from workers.rank import choose_device


def config(device, world_size=4):
    return EngineConfig(model="", device=device, world_size=world_size)


@pytest.mark.parametrize(
    ("device", "num_gpus", "takes_gpu"),
    [("auto", 0, False), ("auto", 4, True), ("auto", 9, True), ("cuda", 4, True), ("cpu", 0, False), ("cpu", 9, False)],
)
def test_either_all_ranks_or_none_use_a_gpu(device, num_gpus, takes_gpu):
    bundle = bundle_for(config(device), {"CPU": 4.0, "GPU": float(num_gpus)})
    assert bundle == ({"CPU": 1.0, "GPU": 1.0} if takes_gpu else {"CPU": 1.0})


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_cluster_with_too_few_gpus_is_an_error(num_gpus):
    with pytest.raises(
        StartError, match=rf"^device: 4 ranks, .* {num_gpus} GPUs?: .*--world-size {num_gpus} .*--device cpu"
    ):
        bundle_for(config("auto"), {"CPU": 4.0, "GPU": float(num_gpus)})


@pytest.mark.parametrize(("total", "reported"), [({"CPU": 3.0}, 3), ({"CPU": 3.0, "GPU": 4.0}, 3), ({}, 0)])
def test_too_few_slots_are_an_error(total, reported):
    with pytest.raises(StartError, match=f"world size 4 needs 4 slots, the cluster has {reported}"):
        bundle_for(config("auto"), total)


def test_requested_gpus_must_exist_in_the_cluster():
    with pytest.raises(StartError, match="^device: cuda .* no GPU"):
        bundle_for(config("cuda"), {"CPU": 4.0})


@pytest.mark.parametrize(
    ("wanted", "gpu", "num_gpus", "device"),
    [
        ("cpu", 1, 2, "cpu"),
        ("auto", 1, 0, "cpu"),
        ("auto", None, 2, "cpu"),  # the launcher gave this rank no GPU, although torch detects two
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 0, 1, "cuda:0"),
        ("cuda", 1, 4, "cuda:1"),
    ],
)
def test_rank_uses_its_assigned_gpu(wanted, gpu, num_gpus, device):
    assert choose_device(wanted, gpu, num_gpus, num_ranks=2) == device


@pytest.mark.parametrize(("gpu", "num_gpus"), [(1, 1), (3, 2)])
def test_ranks_share_a_gpu_only_if_cuda_was_requested(gpu, num_gpus):
    ways = rf"--world-size {num_gpus} .*--launcher local --device cuda.*--device cpu"
    with pytest.raises(StartError, match=rf"^device: 4 ranks, .* this machine has {num_gpus} GPUs?: .*{ways}"):
        choose_device("auto", gpu, num_gpus, num_ranks=4)
    assert choose_device("cuda", gpu, num_gpus, num_ranks=4) == f"cuda:{gpu % num_gpus}"


async def test_local_launcher_starts_no_ranks_without_the_requested_gpu(monkeypatch):
    fleet = LocalFleet(lambda spec: None)
    monkeypatch.setattr(local_fleet, "has_gpu_driver", lambda: False)
    with pytest.raises(StartError, match="^device: cuda is not available: this machine has no GPU driver$"):
        await fleet.reserve(config("cuda", world_size=1))
    await fleet.reserve(config("auto", world_size=1))
    monkeypatch.setattr(local_fleet, "has_gpu_driver", lambda: True)
    await fleet.reserve(config("cuda", world_size=1))


def test_requested_gpu_must_exist_on_the_machine():
    with pytest.raises(StartError, match="torch finds no GPU"):
        choose_device("cuda", 0, 0, num_ranks=1)


@pytest.mark.parametrize(
    ("places", "transport"),
    [
        (["cpu", "cpu"], "shared_memory"),
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-b", "GPU-a"], "gloo"),
        (["GPU-a", "cpu"], "gloo"),
    ],
)
def test_shared_gpus_and_mixed_devices_use_gloo(places, transport):
    assert fastest_transport(places) == transport
