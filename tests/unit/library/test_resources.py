"""The resource limits of a process, from control groups in simulated file systems."""

import os

import psutil
import pytest

from longleaf import config, resources
from longleaf.errors import StartError

MIB = 1 << 20
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "36 31 0:33 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
UNLIMITED = 9223372036854771712
"""The value of cgroup v1 for a group without a limit."""


@pytest.fixture
def system(tmp_path):
    """Creates a file system from contents by path."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return make


def processes(groups, mounts, mount_root="/"):
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts.format(root=mount_root).rstrip()}


def group(folder, limit, used, stat=""):
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def old_group(folder, limit, used, stat=""):
    names = ("limit_in_bytes", "usage_in_bytes", "stat")
    return {f"{folder}/memory.{name}": value for name, value in zip(names, (limit, used, stat), strict=True)}


def test_machine_is_the_limit_without_control_groups(system):
    found = resources.memory(system({}))
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free <= found.total
    assert resources.num_processors(system({})) == len(os.sched_getaffinity(0))


def test_group_limit_counts_and_reclaimable_memory_is_free(system):
    stat = f"anon {MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\nslab_reclaimable {MIB}"
    files = processes("0::/a", V2) | group("sys/fs/cgroup/a", 64 * MIB, 10 * MIB, stat)
    assert resources.memory(system(files)) == (64 * MIB, (64 - 10 + 4) * MIB)


def test_lowest_limit_up_to_the_root_counts(system):
    files = processes("0::/a/b/c", V2)
    files |= group("sys/fs/cgroup/a/b/c", "max", MIB)
    files |= group("sys/fs/cgroup/a/b", 96 * MIB, 2 * MIB) | {"sys/fs/cgroup/a/b/memory.high": 64 * MIB}
    files |= group("sys/fs/cgroup/a", 80 * MIB, 70 * MIB)
    assert resources.memory(system(files)) == (64 * MIB, 10 * MIB)


def test_full_group_has_no_free_memory(system):
    files = processes("0::/a", V2) | group("sys/fs/cgroup/a", 64 * MIB, 65 * MIB)
    assert resources.memory(system(files)) == (64 * MIB, 0)


@pytest.mark.parametrize("limit", ["max", UNLIMITED])
def test_group_without_a_limit_is_unlimited(system, limit):
    folder = "sys/fs/cgroup/memory/a"
    groups, mounts = ("0::/memory/a", V2) if limit == "max" else ("4:memory:/a", V1)
    make = group if limit == "max" else old_group
    assert (
        resources.memory(system(processes(groups, mounts) | make(folder, limit, MIB))).total
        == psutil.virtual_memory().total
    )


def test_control_groups_version_1(system):
    stat = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {MIB}\ntotal_active_file {2 * MIB}"
    files = processes("5:cpu,cpuacct:/else\n4:memory:/a/b\n0::/", V1 + V2.replace("cgroup rw", "cgroup/unified rw"))
    files |= old_group("sys/fs/cgroup/memory/a/b", UNLIMITED, MIB)
    files |= old_group("sys/fs/cgroup/memory/a", 64 * MIB, 10 * MIB, stat)
    assert resources.memory(system(files)) == (64 * MIB, (64 - 10 + 3) * MIB)


@pytest.mark.parametrize(
    ("groups", "mount_root"),
    [
        ("0::/docker/1", "/docker/1"),  # the container sees its own part of the hierarchy
        ("0::/", "/"),  # with a cgroup namespace
        ("0::/../else", "/"),  # it was moved out of that namespace
        ("0::/docker/1", "/other"),
    ],
)
def test_limits_inside_a_container(system, groups, mount_root):
    files = processes(groups, V2, mount_root) | group("sys/fs/cgroup", 64 * MIB, 4 * MIB)
    assert resources.memory(system(files)) == (64 * MIB, 60 * MIB)


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "wanted"),
    [
        ("0::/a", V2, {"sys/fs/cgroup/a/cpu.max": "100000 100000"}, 1),
        ("0::/a", V2, {"sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ("0::/a/b", V2, {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "100000 50000"}, 2),
        ("0::/a", V2, {"sys/fs/cgroup/a/cpu.max": "max 100000"}, 1 << 20),
        (
            "3:cpu,cpuacct:/a",
            V1_CPU,
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": 250000,
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
            },
            2,
        ),
        (
            "3:cpu,cpuacct:/a",
            V1_CPU,
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
            },
            1 << 20,
        ),
    ],
)
def test_processors_are_limited_by_affinity_and_quota(system, monkeypatch, groups, mounts, files, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1 << 20))
    assert resources.num_processors(system(processes(groups, mounts) | files)) == wanted


def test_ranks_of_a_machine_divide_its_memory_or_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr(resources, "memory", lambda: resources.Memory(100 * MIB, 90 * MIB))
    monkeypatch.setattr(resources, "gpu_memory", lambda: [24 * MIB, 16 * MIB])
    assert resources.slot_memory(3, has_gpu=False) == 30 * MIB
    assert resources.slot_memory(3, has_gpu=True) == 16 * MIB
    monkeypatch.setattr(resources, "gpu_memory", list)
    assert resources.slot_memory(3, has_gpu=True) is None


def test_affinity_counts_for_slots(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    config.check_slots_here(config.RANKS_PER_CPU)
    with pytest.raises(StartError, match="9 ranks do not fit: this machine has 8 slots"):
        config.check_slots_here(config.RANKS_PER_CPU + 1)


@pytest.mark.parametrize(
    ("files", "visible", "number"),
    [
        (["null"], None, 0),
        (["nvidiactl", "nvidia0", "nvidia1", "nvidia10", "nvidia-uvm"], None, 3),
        (["nvidiactl", "nvidia0", "nvidia1", "nvidia2"], "0, 2", 2),
        (["nvidiactl", "nvidia0", "nvidia1"], "GPU-ab,-1,1", 1),
        (["nvidiactl", "nvidia0"], "", 0),
        (["nvidiactl", "nvidia0"], "0,1,2", 1),
        (["kfd"], None, 1),
        (["null"], "0", 0),
    ],
)
def test_visible_gpus_are_counted_by_their_files(system, monkeypatch, files, visible, number):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resources.num_gpus(system({f"dev/{name}": "" for name in files})) == number


def test_gpu_driver_is_detected_by_its_file(system):
    assert not resources.has_gpu_driver(system({"dev/null": ""}))
    assert resources.has_gpu_driver(system({"dev/nvidiactl": ""}))
